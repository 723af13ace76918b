"""Files of other programs: the part of a larger file that is of a model, and names that timm's filters know."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from graticule.checkpoints.read import read_metadata, unusable, with_metadata
from graticule.registry.checks import printable

#: Of several networks of a training, the one that its authors evaluate.
_EVALUATED = ("teacher.", "target_encoder.", "base_encoder.", "model_ema.")
#: Names of tensors that published code saves, and that are computed here.
_COMPUTED = re.compile(r"relative_position_index|rel_indices|attn_mask|relative_coords_table|rope|\.periods|bias_mask")


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
    known = (*kernels.values(), *model.parameters(), torch.empty(1, 1, 1, 1))
    kernel = next(value.flatten(1, -3) for value in known if value.ndim > 3)
    as_in_file = SimpleNamespace(
        patch_embed=SimpleNamespace(proj=SimpleNamespace(weight=kernel)),
        pos_embed=None,
        head=model.get_classifier(),
        get_parameter=lambda name: model.get_parameter(model.own_name(name)),
    )
    with redirect_stdout(StringIO()):  # one prints what it tries
        renamed = rename({name: value for name, value in state.items() if name not in tables}, as_in_file) | tables
    renamed.pop("mask_token", None)  # of pretraining
    return renamed


def part_of(model: Any, state: dict[str, Tensor], source: object) -> tuple[str, dict[str, Tensor]]:
    """Return the prefix that the names of `model` have in the file of a larger one, and its tensors without it."""
    stem = next((n for n, value in model.state_dict().items() if value.ndim > 3 and not n.startswith("position.")), "")
    if stem in {"", *map(model.own_name, model.own_layout(state))}:
        return "", state
    splits = [(name[: dot.end()], name[dot.end() :]) for name in state for dot in re.finditer(r"\.", name)]
    prefixes = [prefix for prefix, name in splits if model.own_name(name) == stem]
    evaluated = [prefix for prefix in prefixes if any(word in prefix for word in _EVALUATED)]
    if len(prefixes) > 1 and len(evaluated) != 1:
        raise ValueError(
            f"{_name(source)} has {len(prefixes)} networks for which {type(model).__name__} may be: "
            f"{', '.join(prefixes)}; save the tensors of one in a file of their own."
        )
    prefix = (evaluated or prefixes or [""])[0]
    part = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return prefix, with_metadata(part, read_metadata(state))


def source_names(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the name in a file, `before`, of each tensor of `after`, where these are renamed or in another layout."""
    names = {_place(value): name for name, value in before.items()}
    in_order = dict(zip(after, before, strict=True)) if len(after) == len(before) else {}
    return {name: names.get(_place(value), in_order.get(name, name)) for name, value in after.items()}


def unused_names(before: Mapping[str, Tensor], sources: Mapping[str, str]) -> list[str]:
    """Return the names in a file that `sources`, our names -> those, leave out, except of tensors that are computed."""
    is_renamed = all(source in before for name, source in sources.items() if not name.endswith("reference"))
    used = {*sources.values()} if is_renamed else before.keys()  # others are joined
    return [name for name in before if name not in used and not _COMPUTED.search(name)]


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
