"""Conversion of parameters between the names and layout of PosMLP's released code and ours.

The code differs from ours in the names and order of the numbers, not in the function that is computed:

- The first half of the hidden channels is mixed and the second multiplies; in ours (as in timm) they are swapped.
- Its groups are interleaved: channel c belongs to group c mod s; ours are contiguous, as printed in the paper.
- Its displacements count y upwards, (x_j - x_i, y_i - y_j), and its tables are indexed by p_i - p_j; ours are by
  p_j - p_i.

So its weights are permuted and their signs changed when they are loaded, exactly, and the forward pass needs no
conversion.

Reference: https://github.com/Zhicaiwww/PosMLP (the paper prints another address).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from graticule.checkpoints.layouts import renamed
from graticule.checkpoints.read import read_metadata, with_metadata
from graticule.encodings.forms.mixing import MixingEncoding, MixingPosition
from graticule.encodings.gqpe import QuadraticMixing
from graticule.encodings.learnable import Learnable
from graticule.encodings.lrpe import LearnableMixing, MixingSum
from graticule.encodings.sgu import DenseMixing

Change = Callable[[Tensor], Tensor]


class _Layout(NamedTuple):
    """Number of dimensions of a parameter there (None if its layout is ours), and the conversions of its values."""

    ndim: int | None
    to_own: Change
    to_released: Change


def _signs(ndim: int, signs: list[Any]) -> _Layout:
    """Return the layout of a parameter that has other signs there."""

    def change(value: Tensor) -> Tensor:
        return value * value.new_tensor(signs)

    return _Layout(ndim, change, change)


def _rows(ndim: int, groups: int, halves: int = 1) -> _Layout:
    """Return the layout of rows of hidden channels: halves are swapped, and groups become contiguous."""

    def to_own(value: Tensor) -> Tensor:
        size, rest = divmod(len(value), halves * groups)
        if rest:
            return value
        return value.reshape(halves, size, groups, *value.shape[1:]).flip(0).transpose(1, 2).flatten(0, 2)

    def to_released(value: Tensor) -> Tensor:
        return value.reshape(halves, groups, -1, *value.shape[1:]).flip(0).transpose(1, 2).flatten(0, 2)

    return _Layout(ndim, to_own, to_released)


def _columns(groups: int) -> _Layout:
    """Return the layout of columns of gated channels."""
    _, to_own, to_released = _rows(2, groups)
    return _Layout(2, lambda value: to_own(value.T).T.contiguous(), lambda value: to_released(value.T).T.contiguous())


_SAME = _Layout(None, lambda value: value, lambda value: value)
_CONVOLUTION = _Layout(4, lambda weight: weight.flatten(1), lambda weight: weight[:, :, None, None])
_BIAS = _Layout(3, lambda bias: bias.flatten(), lambda bias: bias[None, :, None])
_FIRST = _Layout(3, lambda weight: weight.flatten(0, 1), lambda weight: weight[None])
_TABLE = _Layout(2, lambda table: table.flip(0).T.contiguous(), lambda table: table.flip(1).T.contiguous())
#: The released code reads the memory of a table (1, N, D) as (D, N).
_MEMORY = _Layout(
    3,
    lambda table: table.reshape(len(table), table.shape[2], -1).transpose(1, 2).contiguous(),
    lambda table: table.transpose(1, 2).reshape(table.shape),
)
_CENTER = _signs(2, [1, -1])
#: Form of a quadratic encoding -> layout of its matrices; numbers are the same.
_MATRIX = {
    "gamma_gamma_t": _signs(3, [[1], [-1]]),
    **dict.fromkeys(("gamma", "gamma_released"), _signs(3, [[1, -1], [-1, 1]])),
}


def to_own(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `state` under our names and in our layout if it is of the released code, else unchanged."""
    marks = (".gate.pos.", ".gate.proj_list.", ".gate_unit.")  # of its PosMLP, or its gMLP
    if not any(mark in name for name in state for mark in marks):
        return state
    known = {released: (name, layout) for name, released, layout in _parameters(model, state)}
    converted = {}
    for released, value in state.items():
        _, layout = known.get(released, (released, _SAME))  # another shape is refused later, with name and shape
        converted[released] = layout.to_own(value) if value.ndim == layout.ndim else value
    return with_metadata(renamed(converted, lambda name: known.get(name, (name,))[0]), read_metadata(state))


def to_released(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of `model` under the names and in the layout of the released code."""
    known = {name: (released, layout) for name, released, layout in _parameters(model, {})}
    state: Any = model.state_dict()
    values = {name: known.get(name, (name, _SAME))[1].to_released(value) for name, value in state.items()}
    return with_metadata(renamed(values, lambda name: known.get(name, (name,))[0]), state._metadata[""])


def _groups(state: Mapping[str, Tensor], unit: str) -> int | None:
    """Return the number of groups of a gating unit in a checkpoint, if it states it."""
    if (centers := state.get(f"{unit}pos.attention_centers")) is not None:
        return len(centers)
    table = state.get(f"{unit}pos.window_relative_position_bias_table")
    return None if table is None or table.ndim != 2 else table.shape[1]


def _parameters(model: Any, state: Mapping[str, Tensor]) -> Iterator[tuple[str, str, _Layout]]:
    """Yield our name, the released name and the layout of parameters; `state` is the checkpoint, if there is one."""
    pyramid = hasattr(model, "downsamples")
    for stage, sampling in enumerate(model.downsamples if pyramid else ()):
        for name in sampling.state_dict():
            layout = _CONVOLUTION if name == "reduction.weight" else _SAME
            yield f"downsamples.{stage}.{name}", (f"levels.{stage}.pool." if stage else "patch_embed.") + name, layout
    for stage in range(len(model.depths)):
        position = model.position.get_submodule(f"stages.{stage}")
        modules = dict(position.named_modules(prefix=f"position.stages.{stage}"))
        tables = [name for name, module in modules.items() if isinstance(module, Learnable)]
        if stage == 0 and len(tables) == 1:  # the released code has no name for more
            yield f"{tables[0]}.pos_embed", "absolute_pos_embed", _MEMORY
        for name, module in modules.items():
            if isinstance(module, MixingPosition):
                encodings = cast("Iterable[MixingEncoding]", module.encodings)
                for index, encoding in zip(module.layer_indices, encodings, strict=True):
                    released = f"levels.{stage}.encoder.{index}." if pyramid else f"blocks.{index}."
                    unit = released + ("gate_unit." if pyramid else "mlp_channels.gate.")
                    block = f"blocks.{stage}.{index}." if pyramid else released
                    norm = unit + ("norm_list.0" if isinstance(encoding, DenseMixing) else "norm")
                    expand, shrink = ("proj_c_e", "proj_c_s") if pyramid else ("mlp_channels.fc1", "mlp_channels.fc2")
                    groups = _groups(state, unit) or encoding.groups
                    halves = 1 if model.block(stage, index).mlp_channels.gate.combine == "nonsplit" else 2
                    for leaf, ndim in (("weight", 2), ("bias", 1)):
                        yield f"{block}norm.{leaf}", f"{released}norm.{leaf}", _SAME
                        yield (
                            f"{block}mlp_channels.fc1.{leaf}",
                            f"{released}{expand}.{leaf}",
                            _rows(ndim, groups, halves),
                        )
                        yield f"{block}mlp_channels.gate.norm.{leaf}", f"{norm}.{leaf}", _rows(1, groups)
                    yield f"{block}mlp_channels.fc2.weight", f"{released}{shrink}.weight", _columns(groups)
                    yield f"{block}mlp_channels.fc2.bias", f"{released}{shrink}.bias", _SAME
                    for tensor, other, layout in _mixing(index, encoding):
                        yield f"{name}.{tensor}", unit + other, layout


def _mixing(index: int, encoding: nn.Module) -> Iterator[tuple[str, str, _Layout]]:
    """Yield the same of the mixing of a layer, in its position and in its gating unit."""
    prefix, bias = f"encodings.{index}.", f"biases.{index}"
    if isinstance(encoding, DenseMixing):
        yield f"{prefix}weight", "proj_list.0.weight", _SAME
        yield bias, "proj_list.0.bias", _SAME
        return
    yield bias, "pos.token_proj_n_bias", _BIAS
    if isinstance(encoding, QuadraticMixing):
        yield f"{prefix}center", "pos.attention_centers", _CENTER
        yield f"{prefix}matrix", "pos.attention_spreads", _MATRIX.get(encoding.form, _SAME)
    if isinstance(encoding, MixingSum):
        yield f"{prefix}first.weight", "token_proj_n_weight", _FIRST
        prefix += "second."
    if isinstance(encoding, LearnableMixing | MixingSum):
        yield f"{prefix}relative_position_table", "pos.window_relative_position_bias_table", _TABLE
