"""Convert parts of timm's models (norms, activations, MLPs, attention, LayerScale) to arguments of our ViT.

A reader reads one part of each kind, such as the first block. `read` compares all others with what the model's own
class builds from that, so a reader only refuses what such a skeleton has, and this library lacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from timm.layers import GluMlp, LayerNorm, LayerScale, Mlp, RmsNorm, SwiGLU
from torch import nn

from graticule.backbones.base import Backbone
from graticule.checkpoints.skeleton import build_skeleton, check_as_built, code_of
from graticule.external.convert.sizes import build_empty
from graticule.external.images import fit_of
from graticule.layers.parts import ACTIVATIONS, act_layer_of
from graticule.registry.checks import format_value
from graticule.registry.registry import NameTable

Reader = Callable[[Any], "Conversion"]
#: What the skeleton of a model of another library is built from, and what to do about a difference from it.
_RULE = ("settings that have a counterpart here", "convert the model before such a change")


@dataclass(frozen=True)
class Conversion:
    """Description of a model of timm or transformers as one of ours, read from its attributes.

    backbone: the class of our model.
    arguments: arguments of its constructor except `position`, as plain values, which can be written to a file.
    encoding: the encoding of the model, as text.
    build_source: builds a model of the other library from what was read, without weights, as `build_of_class` does; by
        default from the configuration of a model of transformers.
    names: name of a tensor in the model -> its name in timm's layout or ours, for those that `own_name` of the
        backbone and `published_names` of the position do not give; several names if the rows of the tensor are split
        among several tensors here; none if it has no effect on the tokens of an image, as a mask token.
    """

    backbone: type[Backbone]
    arguments: Mapping[str, Any]
    encoding: str
    build_source: Callable[[], nn.Module] | None = None
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)


#: The function that reads the models of a class. A subclass computes something else, so it has its own entry.
#: Classes of transformers, which is never imported here, are given by name, such as 'transformers.ViTModel'.
CONVERSIONS: NameTable[type[nn.Module] | str, Reader] = NameTable("conversion", "graticule.external.convert")


def register_conversion(*kinds: type[nn.Module] | str) -> Callable[[Reader], Reader]:
    """Return a decorator that registers a function that reads models of these classes of timm or transformers.

    The function takes a model and returns its `Conversion`; it calls `refuse` for parts that cannot be converted.
    """

    def add(reader: Reader) -> Reader:
        CONVERSIONS.update(dict.fromkeys(kinds, reader))
        return reader

    return add


def _reader(kind: type) -> Reader | None:
    by_name = kind.__module__.startswith("transformers.models.")
    return CONVERSIONS.get(f"transformers.{kind.__name__}" if by_name else kind)


def can_convert(model: nn.Module) -> bool:
    """Return whether `convert` takes models of the class of `model`."""
    return _reader(type(model)) is not None


def _place_of(error: BaseException, model: nn.Module) -> str:
    """Name the innermost part of a model that an error is about, or at which it was raised, and what it lacks."""
    names = {id(part): name for name, part in model.named_modules() if name}
    values, traceback = list[object](), error.__traceback__
    while traceback is not None:
        values += traceback.tb_frame.f_locals.values()
        traceback = traceback.tb_next
    places = [names[id(value)] for value in (*values, getattr(error, "obj", None)) if id(value) in names]
    lack = f", which has no `{error.name}`" if isinstance(error, AttributeError) and error.name else ""
    return f": `{places[-1]}`, {type(model.get_submodule(places[-1])).__name__}{lack}" if places else lack


def read(model: nn.Module) -> Conversion:
    """Describe a model of timm or transformers as one of ours."""
    if isinstance(model, Backbone):
        raise ValueError(
            f"`model` must be a model of timm or transformers, got {type(model).__name__}, which is one of ours "
            "already; graticule.change_position gives it another position."
        )
    kind = type(model)
    reader = _reader(kind)
    if reader is None:
        for base in filter(_reader, kind.__mro__):
            raise ValueError(
                f"`model` must be a {base.__name__} itself, got {kind.__name__} of {kind.__module__}, a subclass with "
                f"code of its own; convert a {base.__name__} into which its state dict is loaded."
            )
        timms = ", ".join(sorted(known.__name__ for known in CONVERSIONS if isinstance(known, type)))
        others = ", ".join(sorted(known.rpartition(".")[2] for known in CONVERSIONS if isinstance(known, str)))
        raise ValueError(
            f"`model` must be of a class that is read, got {kind.__name__} of {kind.__module__}. Read are timm's "
            f"{timms} and transformers' {others}; graticule.attach gives a transformer of any library a position, if "
            "its blocks share one grid, and docs/backbones.md has the operations that take other classes."
        )
    library = kind.__module__.partition(".")[0]
    try:
        if library == "transformers":
            check_as_built(model, _built_by_config(model), *_RULE)
        conversion = reader(model)
        if conversion.build_source is not None:
            check_as_built(model, build_skeleton(conversion.build_source), *_RULE)
    except ValueError:
        raise
    except Exception as error:  # a part lacks what a part of its place has
        for place, actual, expected in code_of(model):
            raise ValueError(f"`model` must have its own code, but {place} is {actual}, not {expected}.") from error
        raise ValueError(
            f"`model` must be a {kind.__name__} as {library} builds it, got one with a part of another kind"
            f"{_place_of(error, model)}."
        ) from error
    return conversion


def _built_by_config(model: Any) -> nn.Module:
    """Build the skeleton of a model of transformers; Swin sets its windows and shifts in the first pass."""
    for name, value in (("quantization_config", None), ("return_dict", True)):
        if (actual := getattr(model.config, name, value)) != value:
            raise refuse(model, f"config.{name}", actual, f"must be {value}")
    skeleton = build_empty(model, model.config)
    parts = dict(model.named_modules())
    for name, part in skeleton.named_modules():
        if any(
            getattr(parts.get(name), key, None) != getattr(part, key, None) for key in ("window_size", "shift_size")
        ):
            getattr(part, "set_shift_and_window_size", lambda _: None)(getattr(part, "input_resolution", None))
    return skeleton


def build_of_class(
    model: nn.Module, *arguments: Mapping[str, Any], signature: Any = None, **others: Any
) -> Callable[[], nn.Module]:
    """Return what builds a model of the class of `model` from those arguments that its constructor has.

    Of several mappings the last one counts. `signature` has the arguments of a constructor that takes any.
    """
    known = inspect.signature(signature or type(model)).parameters
    chosen = {name: value for mapping in (*arguments, others) for name, value in mapping.items() if name in known}
    return partial(type(model), **chosen)


def factory_of(part: nn.Module) -> Callable[..., nn.Module]:
    """Return what builds norms or activations as `part` is one."""
    settings = {name: getattr(part, name) for name in ("eps", "approximate") if hasattr(part, name)}
    return partial(type(part), **settings)


def refuse(model: nn.Module, attribute: str, value: Any, rule: str) -> ValueError:
    """Return the error for an attribute of a model or a module that violates a rule, such as 'must be False'."""
    value_text = type(value).__name__ if isinstance(value, nn.Module) else format_value(value)
    return ValueError(f"`{attribute}` of {type(model).__name__} {rule} to be converted, got {value_text}.")


def check_kind(model: nn.Module, attribute: str, *kinds: type[nn.Module]) -> None:
    """Check that an attribute of a module, given as a path, is exactly of one of these classes."""
    part = model.get_submodule(attribute)
    if type(part) not in kinds:
        names = " or ".join(dict.fromkeys(kind.__name__ for kind in kinds))
        raise refuse(model, attribute, part, f"must be {names}")


def sum_of(*encodings: object) -> str:
    """Return the sum of encodings as text; those that are None, False or empty are left out."""
    return " + ".join(str(encoding) for encoding in encodings if encoding) or "none"


_LAYER_NORMS, _RMS_NORMS = (nn.LayerNorm, LayerNorm), (nn.RMSNorm, RmsNorm)


def norm_text(owner: nn.Module, attribute: str) -> str | None:
    """Return the name, in this library, of a norm that is an attribute of a module; None for an identity."""
    norm = owner.get_submodule(attribute)
    if isinstance(norm, nn.Identity):
        return None
    if type(norm) not in (*_LAYER_NORMS, *_RMS_NORMS) or norm.weight is None:
        raise refuse(owner, attribute, norm, "must be a LayerNorm or RMSNorm with weights")
    return f"{'layernorm' if type(norm) in _LAYER_NORMS else 'rmsnorm'}(eps={norm.eps})"


def has(owner: Any, attribute: str) -> bool:
    """Return whether a module has a part of this name that is no identity."""
    return not isinstance(getattr(owner, attribute, None), nn.Identity | None)


def act_text(owner: nn.Module, attribute: str) -> str:
    """Return timm's name of an activation that is an attribute of a module."""
    act = owner.get_submodule(attribute)
    exact = getattr(act, "approximate", "none") == "none"
    for name in ACTIVATIONS:
        kind = act_layer_of(name)
        if type(act) is kind and (name == "gelu") <= exact:
            return name
    if isinstance(act, nn.GELU) and not exact:
        return "gelu_tanh"
    raise refuse(owner, attribute, act, f"must be one of {', '.join(ACTIVATIONS)}")


def trunk_arguments(model: nn.Module, patches: Any) -> dict[str, Any]:
    """Read the arguments for images, classes and channels from a model and its patch embedding, timm's `PatchEmbed`."""
    fit = fit_of(model, patches)
    size = [side * count for side, count in zip(patches.patch_size, patches.grid_size, strict=True)]
    return {
        "img_size": tuple(size if fit == "pad" else patches.img_size),
        **({} if fit == "exact" else {"fit": fit}),
        "patch_size": tuple(patches.patch_size),
        "in_chans": patches.proj.in_channels,
        "num_classes": model.num_classes,
        "embed_dim": model.embed_dim,
    }


def ratio_of(hidden: int, dim: int) -> float:
    """Return a ratio whose product with `dim`, rounded down, is `hidden`."""
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else (hidden + 0.5) / dim


def read_mlp(block: nn.Module) -> dict[str, Any]:
    """Return an MLP of timm as arguments of our ViT."""
    mlp: Any = block.get_submodule("mlp")
    kinds: dict[type[nn.Module], str] = {Mlp: "mlp", SwiGLU: "swiglu", GluMlp: "swiglu_packed"}
    check_kind(block, "mlp", *kinds)
    return {
        "mlp_layer": kinds[type(mlp)],
        "mlp_ratio": ratio_of(mlp.fc2.in_features, mlp.fc2.out_features),
        "act_layer": act_text(mlp, "act"),
        "scale_mlp_norm": has(mlp, "norm"),
    }


def source_of_mlp(mlp: Any) -> dict[str, Any]:
    """Return the arguments of timm's ViT for its MLPs."""
    first = mlp.fc1_g if isinstance(mlp, SwiGLU) else mlp.fc1
    return {
        "mlp_layer": partial(GluMlp, gate_last=False) if isinstance(mlp, GluMlp) else type(mlp),
        "mlp_ratio": ratio_of(first.out_features, first.in_features),
        "act_layer": factory_of(mlp.act),
    }


def read_attention(block: nn.Module) -> dict[str, Any]:
    """Return an attention of timm as arguments of our ViT."""
    attn: Any = block.get_submodule("attn")
    return {
        **_read_projection(attn),
        "num_heads": attn.num_heads,
        "attn_drop_rate": rate_of(attn, "attn_drop"),
        "proj_drop_rate": rate_of(attn, "proj_drop"),
        "proj_bias": attn.proj.bias is not None,
        "qk_norm": has(attn, "q_norm"),
        "scale_attn_norm": has(attn, "norm"),
    }


def _read_projection(attn: Any) -> dict[str, Any]:
    """Return the arguments for the projections to queries, keys and values."""
    if attn.qkv is not None:
        if getattr(attn, "q_bias", None) is not None:
            return {"qkv_layer": "no_key_bias", "qkv_bias": True}
        return {"qkv_layer": "fused", "qkv_bias": attn.qkv.bias is not None}
    bias, key_bias = attn.q_proj.bias is not None, attn.k_proj.bias is not None
    if key_bias and not bias:
        raise refuse(attn, "k_proj.bias", "a bias", "must be None as the bias of the queries")
    return {"qkv_layer": "separate" if bias == key_bias else "separate_no_key_bias", "qkv_bias": bias}


def layer_scale(block: Any) -> tuple[float, float]:
    """Return the initial values of LayerScale for attention and MLP; 0 if there is none."""
    pairs = [(getattr(block, f"gamma_{n}", None), getattr(block, f"ls{n}", None)) for n in (1, 2)]
    scales = [initial_scale(part) if gamma is None else float(block.init_values or 1.0) for gamma, part in pairs]
    return scales[0], scales[1]


def initial_scale(scale: Any) -> float:
    """Return the initial value of a LayerScale; 0 if it is another module."""
    return float(scale.init_values or 1.0) if isinstance(scale, LayerScale) else 0.0


def rate_of(owner: nn.Module, attribute: str) -> float:
    """Return the rate of a dropout that is an attribute of a module, given as a path."""
    check_kind(owner, attribute, nn.Dropout)
    return float(cast("nn.Dropout", owner.get_submodule(attribute)).p)


def drop_path(module: nn.Module) -> float:
    """Return the rate of stochastic depth of a module; 0 for an identity."""
    return float(getattr(module, "drop_prob", 0.0) or 0.0)
