"""Checks of the order of patches in position information: axes, and tokens before the patches."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from graticule.encodings.liere import LieRe
from graticule.testing.outputs import SAME, any_of, by, other_grid
from graticule.testing.readings import (
    COLUMNS,
    OPPOSITE,
    RIGHT,
    Relative,
    every_relative,
    relative,
    resampled_reading,
    roughness,
)
from graticule.testing.subject import Failed, NotApplicable, Size, Subject


def pair_layout(subject: Subject, original: Subject) -> str:
    """A rotation of queries keeps their length; it does not if its table has another layout of pairs."""
    rotated, reason = 0, NotApplicable("queries are not rotated")
    for seen in every_relative(subject):
        try:
            _check_lengths(subject, seen)
        except NotApplicable as error:
            reason = reason if seen.earlier else error
        else:
            rotated += 1
    if not rotated:
        raise reason
    return "rotations keep the length of queries" + (f", in {rotated} attentions" if rotated > 1 else "")


def _check_lengths(subject: Subject, seen: Relative) -> None:
    share, queries = length_differences(seen), seen.queries
    if share is None or queries is None:
        raise NotApplicable("the queries of its attention were not seen")
    if float((queries - queries.mean(1, keepdim=True)).abs().max()) <= 1e-6 * float(queries.abs().max()):
        raise NotApplicable("queries are not rotated")
    other = relative(subject, -2.0, seen.earlier).queries
    if other is not None:
        added = (queries - queries[:, :1]) - (other - other[:, :1])
        if float(added.abs().max()) <= 1e-6 * float(queries.abs().max()):
            raise NotApplicable("position is added to queries, which are not rotated")
    if share > SAME:
        raise Failed(
            f"a rotation must keep the length of queries, got lengths that differ by {100 * share:.0f} %{seen.where}: "
            "the table and its use disagree on which channels form a pair (neighbors, or i and i + d / 2)"
        )


def length_differences(seen: Relative) -> float | None:
    """Return the largest relative difference of the lengths of a head's queries; None if they were not seen."""
    if seen.queries is None:
        return None
    lengths = seen.queries.norm(dim=-1)
    return float(((lengths.amax(1) - lengths.amin(1)) / lengths.amax(1).clamp_min(1e-30)).max())


def axes(subject: Subject, original: Subject) -> str:
    """Position is ordered row by row, as the patches are, at a grid that is not square."""
    return any_of(
        lambda: _relative_axes(subject), lambda: _table_axes(subject, original), lambda: _resampled_axes(subject)
    )


def _relative_axes(subject: Subject) -> str:
    seen = every_relative(subject)
    said = [_axes_of(one, subject) for one in seen]
    return said[0] + (f", in {len(seen)} attentions" if seen[1:] else "")


def _axes_of(seen: Relative, subject: Subject) -> str:
    if seen.shape[0] == seen.shape[1]:
        raise NotApplicable(f"attention is within a square of {seen.shape[0]} x {seen.shape[1]} patches")
    reading = seen.reading()
    if reading in (COLUMNS, OPPOSITE):
        raise Failed(f"relative position must run row by row over {by(seen.shape)} patches, got {reading}{seen.where}")
    if reading is None:
        if _non_commuting(subject.model):
            raise NotApplicable("its rotations do not commute: attention is not a function of the displacement")
        if (share := length_differences(seen)) is not None and share > SAME:
            raise NotApplicable("the rotation of queries does not keep their length: see pair layout")
        raise Failed(
            f"attention between equal patches must depend on their displacement alone, got differences on a grid "
            f"of {by(seen.shape)}{seen.where}"
        )
    if reading != RIGHT:
        raise NotApplicable(f"position is {reading}: see prefix")
    return f"attention depends on the displacement in {by(seen.shape)} patches"


def _table_axes(subject: Subject, original: Subject) -> str:
    """Compare the smoothness of position in the tokens over the grid and over the grid with swapped axes."""
    if original.grid[0] == original.grid[1]:
        original = original.small()
    if original.grid[0] == original.grid[1]:
        raise NotApplicable("the grid is square")
    rows = original.rows()
    tokens = original.base.inputs[original.base.tokens][0, rows]
    values = tokens - tokens.mean(0)
    if float(values.abs().max()) <= 1e-6 * float(tokens.abs().max()):
        raise NotApplicable("no absolute position in the tokens")
    ratio = roughness(values, original.grid)
    if ratio > 1.25:
        raise Failed(
            f"absolute position must be smooth row by row over {by(original.grid)} patches, got steps "
            f"{ratio:.1f} times as large as column by column"
        )
    if ratio > 0.8:
        raise NotApplicable("its table is noise, which has no order")
    return f"absolute position is smooth over {by(original.grid)} patches"


def _resampled_axes(subject: Subject) -> str:
    reading, error, new = _resampled(subject)
    if reading == COLUMNS:
        raise Failed(
            f"a table resampled for {by(new)} patches must run row by row, got {COLUMNS}, {error:.1f} patches off"
        )
    if reading != RIGHT:
        raise NotApplicable(f"a resampled table is {reading}: see prefix")
    return f"a table keeps its axes when it is resampled for {by(new)} patches"


def _resampled(subject: Subject) -> tuple[str, float, Size]:
    """Write the coordinates of patches into the table, and read them at another grid."""
    if not subject.tables:
        raise NotApplicable("no absolute position table (a parameter or buffer that is added to tokens)")
    subject = subject.at(subject.home)
    if subject.grid[0] == subject.grid[1] and hasattr(subject.model, "set_input_size"):
        raise NotApplicable("the table is of a square grid and refuses others")
    plain = subject.without_tables
    width = subject.grid[1]
    rank = torch.arange(subject.patches)
    coordinates = torch.stack([rank // width, rank % width], -1).double()
    held = {}
    for name, value in subject.values().items():
        ahead = len(value) - subject.patches
        row = torch.cat([torch.full((ahead, 2), 50.0, dtype=value.dtype), coordinates])
        held[name] = row.repeat(1, math.ceil(value.shape[1] / 2))[:, : value.shape[1]]
    filled = subject.with_tables(held)
    if (error := _off(filled, plain, coordinates)) > 1e-6:
        raise NotApplicable(f"the table is changed before it enters the tokens ({error:.1f} off)")
    new = other_grid(subject)
    rows, values = _entered(filled.at(new), plain.at(new))
    reading, error = resampled_reading(values[rows][:, :2], subject.grid, new)
    return reading, error, new


def _off(filled: Subject, plain: Subject, expected: Tensor) -> float:
    rows, values = _entered(filled, plain)
    return float((values[rows][:, :2] - expected).abs().max())


def _entered(filled: Subject, plain: Subject) -> tuple[Tensor, Tensor]:
    """Return the row of each patch, and the contribution of the table to each row, (rows, D)."""
    for at, (one, other) in enumerate(zip(filled.base.inputs, plain.base.inputs, strict=False)):
        if one.shape == other.shape and one.shape[1] >= plain.patches and not torch.equal(one, other):
            return plain.rows(at), one[0] - other[0]
    raise NotApplicable("the table does not enter the tokens")


def prefix(subject: Subject, original: Subject) -> str:
    """Class and register tokens do not count as positions of patches."""
    try:
        rows = subject.rows()
        outside = subject.base.inputs[subject.base.tokens].shape[1] - len(rows)
    except NotApplicable:
        outside = 0
    tables = [len(value) - subject.home[0] * subject.home[1] for value in subject.values().values()]
    if outside <= 0 and not any(tables):
        raise NotApplicable("no tokens besides the patches")
    return any_of(lambda: _relative_prefix(subject), lambda: _resampled_prefix(subject))


def _relative_prefix(subject: Subject) -> str:
    for seen in every_relative(subject):
        reading = seen.reading()
        if reading is not None and reading.startswith("shifted"):
            raise Failed(
                f"the first patch must be at the first position, got positions {reading} of {by(seen.shape)}"
                f"{seen.where}"
            )
        if reading != RIGHT:
            raise NotApplicable("attention is not a function of the displacement: see axes and pair layout")
    return f"attention between patches is correct with {_tokens(seen.outside)}"


def _resampled_prefix(subject: Subject) -> str:
    reading, error, new = _resampled(subject)
    if reading not in (RIGHT, COLUMNS):
        raise Failed(
            f"rows of tokens that are not patches must not be resampled, got a table that is {reading} for {by(new)} "
            f"patches, up to {error:.0f} patches off"
        )
    if reading == COLUMNS:
        raise NotApplicable("a resampled table has other axes: see axes")
    return f"their rows stay out of a table resampled for {by(new)} patches"


def _tokens(count: int) -> str:
    return f"{count} other token{'s' * (count != 1)}"


def _non_commuting(model: nn.Module) -> bool:
    """Return whether a model of this library rotates blocks of channels, which do not commute."""
    position = getattr(model, "position", None)
    return isinstance(position, nn.Module) and any(isinstance(one, LieRe) for one in position.modules())
