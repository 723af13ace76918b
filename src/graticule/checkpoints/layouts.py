"""Files of other programs: the part of a larger file that is of a model, and names that timm's filters know."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from graticule.checkpoints.read import GRIDS, read_metadata, unusable, with_metadata
from graticule.registry.checks import printable

Value = TypeVar("Value")

#: Of several networks of a training, the one that its authors evaluate.
_EVALUATED = ("teacher.", "target_encoder.", "base_encoder.", "model_ema.")
#: Names of the mask token and of the decoder of pretraining, beside an encoder without a prefix.
_PRETRAINING = re.compile(r"mask_token$|decoder_")
#: Names of tensors that published code saves, and that are computed here.
_COMPUTED = re.compile(r"relative_position_index|rel_indices|attn_mask|relative_coords_table|rope|\.periods|bias_mask")
#: Names that timm's filters drop although they join other tensors of the file: BEiT-3's other branch, EVA, DINOv3.
_DROPPED = re.compile(r"\.B\.|text_embed|mask_token|lm_head|local_cls_norm|projectors\.")


def rename_start(name: str, start: str, other: str) -> str:
    """Replace the first components of a name if they match `start`, in which * is any one component.

    >>> rename_start("blocks.3.mlp.fc1.weight", "blocks.*.mlp", "blocks.*.leff"), rename_start("mlps.0", "mlp", "leff")
    ('blocks.3.leff.fc1.weight', 'mlps.0')
    """
    parts, count = name.split("."), len(starts := start.split("."))
    if len(parts) < count or any(want not in ("*", part) for want, part in zip(starts, parts, strict=False)):
        return name
    free = (part for want, part in zip(starts, parts, strict=False) if want == "*")
    return ".".join([*(next(free) if part == "*" else part for part in other.split(".")), *parts[count:]])


def renamed(values: Mapping[str, Value], rename: Callable[[str], str]) -> dict[str, Value]:
    """Return values under new names.

    Raises:
        ValueError: if two of them have the same new name, so that one would be lost.
    """
    names: dict[str, str] = {}
    for name in values:
        if (other := names.setdefault(target := rename(name), name)) != name:
            raise ValueError(
                f"{printable(other)} and {printable(name)} are both {printable(target)} under other names."
            )
    return {target: values[name] for target, name in names.items()}


def rename_by_timm(
    model: Any, state: dict[str, Tensor], rename: Callable[[dict[str, Tensor], Any], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Rename tensors of a file by a filter of timm; our own names are unchanged, and nothing is resampled."""
    if any(name.startswith("position.") for name in state):
        return state
    kernels = {name: value for name, value in state.items() if name.endswith("patch_embed.proj.weight")}
    # a filter resamples what has another shape than in the model: here the kernel is the file's, and there is no table
    tables = {name: value for name, value in state.items() if name.endswith("relative_position_bias_table")}
    tables |= {name: value for name, value in kernels.items() if value.ndim < 4}
    parameters = dict(model.named_parameters())
    tables |= {name: value for name, value in state.items() if name in parameters and _PRETRAINING.match(name)}
    known = (*kernels.values(), *parameters.values(), torch.empty(1, 1, 1, 1))
    kernel = next(value.flatten(1, -3) for value in known if value.ndim > 3)
    as_in_file = SimpleNamespace(
        patch_embed=SimpleNamespace(proj=SimpleNamespace(weight=kernel)),
        pos_embed=None,
        head=model.get_classifier(),
        get_parameter=lambda name: model.get_parameter(model.own_name(name)),
    )
    with redirect_stdout(StringIO()):  # one prints what it tries
        renamed = rename({name: value for name, value in state.items() if name not in tables}, as_in_file) | tables
    return {name: value for name, value in renamed.items() if name in parameters or not _PRETRAINING.match(name)}


#: Patterns of names in torchvision's ViT and Swin -> names in timm's, tried in turn.
_OF_TORCHVISION: tuple[tuple[str, Any], ...] = (
    (r"^(?:conv_proj|features\.0\.0)\.", "patch_embed.proj."),
    (r"^features\.0\.2\.", "patch_embed.norm."),
    (r"^class_token$", "cls_token"),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.ln\.", "norm."),
    (r"^heads\.head\.", "head."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.ln_", r"blocks.\1.norm"),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"^features\.(\d+)\.(\d+)\.", lambda match: f"layers.{int(match[1]) // 2}.blocks.{match[2]}."),
    (r"^features\.(\d+)\.", lambda match: f"layers.{int(match[1]) // 2}.downsample."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.(?:0|linear_1)\.", ".mlp.fc1."),
    (r"\.mlp\.(?:3|linear_2)\.", ".mlp.fc2."),
)


#: The same for mmpretrain's ViT and DeiT.
_OF_MMPRETRAIN: tuple[tuple[str, Any], ...] = (
    (r"^backbone\.", ""),
    (r"^patch_embed\.projection\.", "patch_embed.proj."),
    (r"^ln1\.", "norm."),
    (r"^head\.layers\.head", "head"),
    (r"^layers\.(\d+)\.ln", r"layers.\1.norm"),
    (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
    (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
    (r"^layers\.", "blocks."),
)


def rename_library(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of torchvision's ViT or Swin, or mmpretrain's ViT, under timm's names, others unchanged."""
    if state.keys() & {"conv_proj.weight", "features.0.0.weight"}:
        patterns = _OF_TORCHVISION
    elif state.keys() & {"layers.0.ffn.layers.0.0.weight", "backbone.layers.0.ffn.layers.0.0.weight"}:
        patterns = _OF_MMPRETRAIN
    else:
        return state

    def rename(name: str) -> str:
        for pattern, other in patterns:
            name = re.sub(pattern, other, name)
        return name

    state = with_metadata(renamed(state, rename), read_metadata(state))
    for name in [
        name for name in state if name.endswith("attn.qkv.bias") and name.replace("qkv.bias", "logit_scale") in state
    ]:
        start = name.removesuffix("qkv.bias")  # of Swin V2, which sets the biases of the keys to zero
        bias = state.pop(name)
        state[f"{start}q_bias"], _, state[f"{start}v_bias"] = bias.chunk(3)
    return state


class FileTensors(NamedTuple):
    """Tensors of a file under the names of a model, their names in the file, and those that are outside of the model.

    `metadata` comes from the file, with the names of the model; `prefix` is the name of the model in a larger file.
    """

    tensors: dict[str, Any]
    sources: dict[str, str]
    unused: list[str]
    metadata: dict[str, Any]
    prefix: str


def own_tensors(model: Any, state: dict[str, Any], source: object, **tables: str) -> FileTensors:
    """Return the part of a file that is of `model`, under our names; nothing is resampled.

    `tables` are position parameters by further published names.
    """
    prefix, part, layout = _part_of(model, state, source)
    published = {**tables, **model.position.published_names()}
    names = {_place(value): name for name, value in part.items()}
    in_order = dict(zip(layout, part, strict=True)) if len(layout) == len(part) else {}
    layout = _bias_of_each_block(layout, published)
    sources = {
        name: name if part.get(name) is value else names.get(_place(value), in_order.get(name, name))
        for name, value in layout.items()  # several names may have one tensor
    }
    metadata = read_metadata(part)
    maps = {name: tuple(value.shape[1:3]) for name, value in part.items() if name == "pos_embed" and value.ndim == 4}
    metadata[GRIDS] = {**maps, **metadata[GRIDS]}  # SAM's table is a map (1, H, W, D)

    def rename(name: str) -> str:
        name = model.own_name(name)
        return f"position.{published[name]}" if name in published else name

    used = {*sources.values()}
    is_renamed = all(name in part for name in used if not name.endswith("reference"))  # others are joined
    left = [n for n in part if n not in used and not _COMPUTED.search(n) and (is_renamed or _DROPPED.search(n))]
    unused = [name for name in state if not name.startswith(prefix)] + [prefix + name for name in left]
    sources = {name: prefix + source for name, source in renamed(sources, rename).items()}
    metadata |= {GRIDS: renamed(metadata[GRIDS], rename)}
    return FileTensors(renamed(layout, rename), sources, unused, metadata, prefix)


#: Names in BEiT and timm: a relative bias shared by all blocks, and the bias of a block.
SHARED_BIAS = re.compile(r"(?:rel_pos_bias|shared_rel_pos)\.(.+)")
_BLOCK_BIAS = re.compile(r"blocks\.\d+\.attn\.(?:rel_pos\.)?(.+)")


def _bias_of_each_block(layout: dict[str, Any], published: Mapping[str, str]) -> dict[str, Any]:
    """Give a relative bias that a file has once to every block, where the model has one in each, as BEiT's code."""
    names = {name: match[1] for name in layout if name not in published and (match := SHARED_BIAS.fullmatch(name))}
    shared = {leaf: layout[name] for name, leaf in names.items()}
    known = {published.get(name, name.removeprefix("position.")) for name in layout}
    blocks = {target: match for name, target in published.items() if (match := _BLOCK_BIAS.fullmatch(name))}
    of_blocks = {
        match[0]: shared[match[1]] for target, match in blocks.items() if target not in known and match[1] in shared
    }
    used = {match[1] for match in blocks.values()} if of_blocks else ()
    return {name: value for name, value in layout.items() if names.get(name) not in used} | of_blocks


def _part_of(model: Any, state: dict[str, Any], source: object) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the prefix of `model` in the file of a larger one, its tensors without it, and these in our layout."""
    layout, weights = model.own_layout(state), model.named_parameters()
    stem = next((name for name, value in weights if value.ndim > 3 and not name.startswith("position.")), "")
    if stem in {"", *map(model.own_name, layout)}:
        return "", state, layout
    splits = [(name[: dot.end()], name[dot.end() :]) for name in state for dot in re.finditer(r"\.", name)]
    prefixes = [prefix for prefix, name in splits if model.own_name(name) == stem]
    if not prefixes:
        return "", state, layout
    evaluated = [prefix for prefix in prefixes if any(word in prefix for word in _EVALUATED)]
    if len(prefixes) > 1 and len(evaluated) != 1:
        raise ValueError(
            f"{_name(source)} has {len(prefixes)} networks for which {type(model).__name__} may be: "
            f"{', '.join(prefixes)}; save the tensors of one in a file of their own."
        )
    prefix = (evaluated or prefixes)[0]
    part = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return prefix, with_metadata(part, read_metadata(state)), model.own_layout(part)


def _place(value: Tensor) -> int:
    """Return the place of the first value in memory, which renaming and reshaping keep."""
    is_plain = type(value) in (Tensor, nn.Parameter) and not unusable(value) and value.numel()
    return value.data_ptr() if is_plain else id(value)


def say_unused(source: object, names: list[str], why: str = "outside of the model") -> None:
    """Warn that tensors of a file are not used, with their number and the first names."""
    if names:
        first = ", ".join(printable(name[:100]) for name in names[:3]) + (", ..." if len(names) > 3 else ".")
        count = f"{len(names):,} tensor{'s' if len(names) > 1 else ''}"
        warnings.warn(f"{_name(source)} has {count} {why}, not used: {first}", stacklevel=3)


def _name(source: object) -> str:
    return "the checkpoint" if isinstance(source, Mapping) else str(source)
