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
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from graticule.checkpoints.read import read_metadata, with_metadata
from graticule.encodings.forms.mixing import MixingEncoding, MixingPosition
from graticule.encodings.gqpe import QuadraticMixing
from graticule.encodings.learnable import Learnable
from graticule.encodings.lrpe import LearnableMixing, MixingSum
from graticule.encodings.sgu import DenseMixing

Change = Callable[[Tensor], Tensor]
#: Number of groups of a gating unit, by the prefix of its names in the released code.
GroupsOf = Callable[[str], int | None]


@dataclass(frozen=True)
class _Parameter:
    """One parameter: its names, its number of dimensions there (None for any), and the conversions of its values."""

    own: str
    theirs: str
    ndim: int | None
    to_own: Change
    to_theirs: Change


def is_released(state: Mapping[str, Any]) -> bool:
    """Return True if names are those of the released code, of its PosMLP or its gMLP."""
    marks = (".gate.pos.", ".gate.proj_list.", ".gate_unit.")
    return any(mark in name for name in state for mark in marks)


def to_own(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `state` under our names and in our layout if it is of the released code, else unchanged."""
    if not is_released(state):
        return state
    known = {parameter.theirs: parameter for parameter in _parameters(model, lambda unit: _groups(state, unit))}
    converted = {}
    for name, value in state.items():
        if parameter := known.get(name):
            fits = parameter.ndim in (None, value.ndim)  # others are refused later, with name and shape
            name, value = parameter.own, parameter.to_own(value) if fits else value
        converted[name] = value
    return with_metadata(converted, read_metadata(state))


def to_released(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of `model` under the names and in the layout of the released code."""
    state: dict[str, Tensor] = model.state_dict()
    for parameter in _parameters(model, lambda unit: None):
        if parameter.own in state:
            state[parameter.theirs] = parameter.to_theirs(state.pop(parameter.own))
    return state


def _groups(state: Mapping[str, Tensor], unit: str) -> int | None:
    centers = state.get(f"{unit}pos.attention_centers")
    if centers is not None:
        return len(centers)
    table = state.get(f"{unit}pos.window_relative_position_bias_table")
    return None if table is None or table.ndim != 2 else table.shape[1]


def _parameters(model: Any, groups_of: GroupsOf) -> Iterator[_Parameter]:
    """Yield the parameters with another name or layout there; `groups_of` may return the groups of a checkpoint."""
    pyramid = hasattr(model, "downsamples")
    if pyramid:
        for stage, sampling in enumerate(model.downsamples):
            theirs = f"levels.{stage}.pool." if stage else "patch_embed."
            for name in sampling.state_dict():
                if name == "reduction.weight":
                    yield _Parameter(f"downsamples.{stage}.{name}", theirs + name, 4, _flat, _as_convolution)
                else:
                    yield _same(f"downsamples.{stage}.{name}", theirs + name)
    for stage in range(len(model.depths)):
        position = model.position.get_submodule(f"stages.{stage}")
        for name, module in position.named_modules(prefix=f"position.stages.{stage}"):
            if isinstance(module, Learnable) and stage == 0:
                yield _Parameter(f"{name}.pos_embed", "absolute_pos_embed", 3, _from_memory, _to_memory)
            elif isinstance(module, MixingPosition):
                encodings = cast("Iterable[MixingEncoding]", module.encodings)
                for index, encoding in zip(module.joined, encodings, strict=True):
                    block = f"levels.{stage}.encoder.{index}." if pyramid else f"blocks.{index}."
                    unit = block + ("gate_unit." if pyramid else "mlp_channels.gate.")
                    groups = groups_of(unit) or encoding.groups
                    own = f"blocks.{stage}.{index}." if pyramid else block
                    yield from _block(own, block, pyramid, model.block(stage, index), encoding, groups)
                    yield from _mixing(name, index, unit, encoding)


def _block(
    own: str, theirs: str, pyramid: bool, block: nn.Module, encoding: nn.Module, groups: int
) -> Iterator[_Parameter]:
    split = block.get_submodule("mlp_channels.gate").combine != "nonsplit"
    expand, shrink, unit = (
        ("proj_c_e", "proj_c_s", "gate_unit.")
        if pyramid
        else ("mlp_channels.fc1", "mlp_channels.fc2", "mlp_channels.gate.")
    )
    for kind, ndim in (("weight", 2), ("bias", 1)):
        yield _same(f"{own}norm.{kind}", f"{theirs}norm.{kind}")
        yield _Parameter(
            f"{own}mlp_channels.fc1.{kind}", f"{theirs}{expand}.{kind}", ndim, *_rows(groups, 2 if split else 1)
        )
        norm = "norm_list.0" if isinstance(encoding, DenseMixing) else "norm"
        yield _Parameter(f"{own}mlp_channels.gate.norm.{kind}", f"{theirs}{unit}{norm}.{kind}", 1, *_rows(groups, 1))
    yield _Parameter(f"{own}mlp_channels.fc2.weight", f"{theirs}{shrink}.weight", 2, *_columns(groups))
    yield _same(f"{own}mlp_channels.fc2.bias", f"{theirs}{shrink}.bias")


def _mixing(position: str, index: int, unit: str, encoding: nn.Module) -> Iterator[_Parameter]:
    own, bias = f"{position}.encodings.{index}.", f"{position}.biases.{index}"
    if isinstance(encoding, DenseMixing):
        yield _same(f"{own}weight", f"{unit}proj_list.0.weight")
        yield _same(bias, f"{unit}proj_list.0.bias")
        return
    yield _Parameter(bias, f"{unit}pos.token_proj_n_bias", 3, lambda b: b.flatten(), lambda b: b[None, :, None])
    if isinstance(encoding, QuadraticMixing):
        yield _Parameter(f"{own}center", f"{unit}pos.attention_centers", 2, _upwards, _upwards)
        turn = {"gamma_gamma_t": _mirrored_rows, "gamma": _mirrored, "gamma_released": _mirrored}.get(encoding.form)
        ndim = 1 if turn is None else 3
        yield _Parameter(f"{own}matrix", f"{unit}pos.attention_spreads", ndim, turn or _as_is, turn or _as_is)
    elif isinstance(encoding, MixingSum):
        yield _Parameter(
            f"{own}first.weight", f"{unit}token_proj_n_weight", 3, lambda w: w.flatten(0, 1), lambda w: w[None]
        )
        own += "second."
    if isinstance(encoding, LearnableMixing | MixingSum):
        yield _Parameter(
            f"{own}relative_position_table",
            f"{unit}pos.window_relative_position_bias_table",
            2,
            lambda table: table.flip(0).T.contiguous(),
            lambda table: table.flip(1).T.contiguous(),
        )


# Conversions of values


def _same(own: str, theirs: str) -> _Parameter:
    return _Parameter(own, theirs, None, _as_is, _as_is)


def _as_is(value: Tensor) -> Tensor:
    return value


def _flat(value: Tensor) -> Tensor:
    return value.flatten(1)


def _as_convolution(value: Tensor) -> Tensor:
    return value[:, :, None, None]


def _from_memory(table: Tensor) -> Tensor:
    """Read the memory of a table (1, N, D) as (D, N), as the released code does."""
    return table.reshape(len(table), table.shape[2], -1).transpose(1, 2).contiguous()


def _to_memory(table: Tensor) -> Tensor:
    return table.transpose(1, 2).reshape(table.shape)


def _upwards(center: Tensor) -> Tensor:
    return center * center.new_tensor([1, -1])


def _mirrored_rows(matrix: Tensor) -> Tensor:
    return matrix * matrix.new_tensor([[1], [-1]])


def _mirrored(matrix: Tensor) -> Tensor:
    return matrix * matrix.new_tensor([[1, -1], [-1, 1]])


def _rows(groups: int, halves: int) -> tuple[Change, Change]:
    """Return the conversions of the rows of hidden channels: halves are swapped, and groups become contiguous."""

    def to_own(value: Tensor) -> Tensor:
        size, rest = divmod(len(value), halves * groups)
        if rest:
            return value
        return value.reshape(halves, size, groups, *value.shape[1:]).flip(0).transpose(1, 2).flatten(0, 2)

    def to_theirs(value: Tensor) -> Tensor:
        return value.reshape(halves, groups, -1, *value.shape[1:]).flip(0).transpose(1, 2).flatten(0, 2)

    return to_own, to_theirs


def _columns(groups: int) -> tuple[Change, Change]:
    """Return the conversions of the columns of gated channels."""
    to_own, to_theirs = _rows(groups, 1)
    return lambda value: to_own(value.T).T.contiguous(), lambda value: to_theirs(value.T).T.contiguous()
