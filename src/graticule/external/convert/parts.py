"""Convert parts of timm's models (norms, activations, MLPs, attention, LayerScale) to arguments of our ViT.

The functions that read or check a part raise `ValueError` for one that this library lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from timm.layers import GluMlp, LayerNorm, LayerScale, Mlp, RmsNorm, SwiGLU
from timm.layers.activations import GELU
from torch import nn

from graticule.backbones.base import Backbone
from graticule.checkpoints.obstacles import check_intact
from graticule.layers.parts import ACTIVATIONS, act_layer_of
from graticule.registry.checks import format_value
from graticule.registry.registry import NameTable

Reader = Callable[[Any], "Conversion"]


@dataclass(frozen=True)
class Conversion:
    """Description of a model of timm or transformers as one of ours, read from its attributes.

    backbone: the class of our model.
    arguments: those of its constructor except `position`, as plain values, which can be written to a file.
    encoding: the encoding of the model, as text.
    names: name of a tensor in the model -> its name in timm's layout or ours, for those that `own_name` of the
        backbone and `published_names` of the position do not give; several names if the rows of the tensor are split
        among several tensors here; none if it has no effect on the tokens of an image, as a mask token.
    """

    backbone: type[Backbone]
    arguments: Mapping[str, Any]
    encoding: str
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


def _reader(model: nn.Module) -> Reader | None:
    kind = type(model)
    by_name = kind.__module__.startswith("transformers.models.")
    return CONVERSIONS.get(f"transformers.{kind.__name__}" if by_name else kind)


def can_convert(model: nn.Module) -> bool:
    """Return whether `convert` takes models of the class of `model`."""
    return _reader(model) is not None


def read(model: nn.Module) -> Conversion:
    """Describe a model of timm or transformers as one of ours."""
    if isinstance(model, Backbone):
        raise ValueError(
            f"`model` must be a model of timm or transformers, got {type(model).__name__}, which is one of ours "
            "already; graticule.change_position gives it another position."
        )
    reader, kind = _reader(model), type(model)
    if reader is None:
        timms = ", ".join(sorted(known.__name__ for known in CONVERSIONS if isinstance(known, type)))
        others = ", ".join(sorted(known.rpartition(".")[2] for known in CONVERSIONS if isinstance(known, str)))
        raise ValueError(
            f"`model` must be of one of timm's classes {timms}, or of transformers' {others}, got {kind.__name__} of "
            f"{kind.__module__}; graticule.attach gives a transformer of any library a position, if its blocks share "
            "one grid, and docs/backbones.md has the operations that take other classes."
        )
    check_intact(model, "changed", values=False)
    return reader(model)


def refuse(model: nn.Module, attribute: str, value: Any, rule: str) -> ValueError:
    """Return the error for a part of a model that cannot be converted.

    Args:
        model: the model, or a module of it.
        attribute: the name of the part that cannot be converted.
        value: its value; for a module, its class is named.
        rule: the rule that it violates, such as 'must be False'.
    """
    value_text = type(value).__name__ if isinstance(value, nn.Module) else format_value(value)
    return ValueError(f"`{attribute}` of {type(model).__name__} {rule} to be converted, got {value_text}.")


def check_kind(model: nn.Module, attribute: str, *kinds: type[nn.Module]) -> None:
    """Check that an attribute of a module, given as a path, is exactly of one of these classes."""
    part = model.get_submodule(attribute)
    if type(part) not in kinds:
        names = " or ".join(dict.fromkeys(kind.__name__ for kind in kinds))
        raise refuse(model, attribute, part, f"must be {names}")


def check_values(part: nn.Module, **values: Any) -> None:
    """Check that those attributes of a module that it has are of these values."""
    for attribute, value in values.items():
        if getattr(part, attribute, value) != value:
            raise refuse(part, attribute, getattr(part, attribute), f"must be {value!r}")


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


def same_norm(owner: nn.Module, attributes: Iterable[str]) -> str | None:
    """Return the name of the norm that is common to those attributes of a module that are norms; None if none is."""
    first: str | None = None
    for attribute in attributes:
        text = norm_text(owner, attribute)
        if first is not None and text not in (None, first):
            raise refuse(owner, attribute, text, f"must be {first} as the other norms")
        first = first or text
    return first


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
    return {
        "img_size": tuple(patches.img_size),
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
    """Return an MLP of timm as arguments of our ViT, with 'norm' for the norm of its hidden channels."""
    mlp: Any = block.get_submodule("mlp")
    kinds: dict[type[nn.Module], str] = {Mlp: "mlp", SwiGLU: "swiglu", GluMlp: "swiglu_packed"}
    check_kind(block, "mlp", *kinds)
    check_values(mlp, gate_last=False)
    first = mlp.fc1_g if isinstance(mlp, SwiGLU) else mlp.fc1
    if not isinstance(first, nn.Linear):
        raise refuse(mlp, "fc1", first, "must be Linear")
    if mlp.fc2.out_features != first.in_features:
        raise refuse(mlp, "fc2.out_features", mlp.fc2.out_features, f"must be {first.in_features}")
    biases = [layer.bias is not None for layer in mlp.modules() if isinstance(layer, nn.Linear)]
    if len(set(biases)) > 1:
        raise refuse(mlp, "fc2.bias", mlp.fc2.bias, "must exist if that of the first layer does")
    rate = rate_of(mlp, "drop1")
    if rate != rate_of(mlp, "drop2"):
        raise refuse(mlp, "drop1.p", rate, "must be that of drop2")
    return {
        "mlp_layer": kinds[type(mlp)],
        "mlp_ratio": ratio_of(mlp.fc2.in_features, first.in_features),
        "act_layer": act_text(mlp, "act"),
        "proj_bias": biases[0],
        "proj_drop_rate": rate,
        "norm": norm_text(mlp, "norm"),
    }


def read_attention(block: nn.Module) -> dict[str, Any]:
    """Return an attention of timm as arguments of our ViT, with 'qk' and 'inner' for its norms."""
    attn: Any = block.get_submodule("attn")
    check_values(attn, gate=None, num_kv_groups=1)  # as many heads of keys as of queries
    if getattr(attn, "k_bias", None) is not None and torch.any(attn.k_bias != 0):
        raise refuse(attn, "k_bias", "a bias", "must be zero")
    width, default = attn.proj.in_features, (attn.proj.in_features // attn.num_heads) ** -0.5
    if width != attn.proj.out_features:
        raise refuse(attn, "proj.in_features", width, f"must be {attn.proj.out_features}")
    return {
        **_read_projection(attn),
        "num_heads": attn.num_heads,
        "attn_drop_rate": rate_of(attn, "attn_drop"),
        "proj_drop_rate": rate_of(attn, "proj_drop"),
        "proj_bias": attn.proj.bias is not None,
        # timm's fused attention does not read it
        "qk_scale": None if attn.scale == default or getattr(attn, "fused_attn", False) else attn.scale,
        "qk": same_norm(attn, [name for name in ("q_norm", "k_norm") if hasattr(attn, name)]),
        "inner": norm_text(attn, "norm") if hasattr(attn, "norm") else None,
    }


def _read_projection(attn: Any) -> dict[str, Any]:
    """Return the arguments for the projections to queries, keys and values."""
    if attn.qkv is not None:
        if getattr(attn, "q_bias", None) is not None:
            return {"qkv_layer": "no_key_bias", "qkv_bias": True}
        return {"qkv_layer": "fused", "qkv_bias": attn.qkv.bias is not None}
    bias, key_bias = attn.q_proj.bias is not None, attn.k_proj.bias is not None
    if key_bias and not bias:
        raise refuse(attn, "k_proj.bias", "a bias", "must be None as that of the queries")
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


def layer_norm_text(model: nn.Module, fixed: Collection[str] = ()) -> str:
    """Return the LayerNorm of a model as text, with its eps; in and below the modules `fixed` it must be PyTorch's."""
    eps: float | None = None
    for name, module in model.named_modules():
        if not isinstance(module, nn.LayerNorm):
            continue
        expected = 1e-5 if any(f"{name}.".startswith(f"{start}.") for start in fixed) else eps
        if expected is not None and module.eps != expected:
            raise refuse(model, f"{name}.eps", module.eps, f"must be {expected}")
        eps = module.eps if expected is None else eps
    return f"layernorm(eps={1e-5 if eps is None else eps!r})"


def check_gelu(model: nn.Module) -> None:
    """Check that all activations of the MLPs are the exact GELU."""
    for name, module in model.named_modules():
        exact = type(module) is GELU or (type(module) is nn.GELU and module.approximate == "none")
        if name.endswith(".act") and not exact:
            raise refuse(model, name, module, "must be the exact GELU")
