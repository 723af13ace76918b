"""Checks of the order of patches in position information: axes, pairs of channels, and tokens before the patches."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.encodings.liere import LieRe
from graticule.external.recorder import record
from graticule.position.grid import Grid
from graticule.position.places import by
from graticule.testing.model_under_test import (
    SAME,
    Failed,
    ModelUnderTest,
    NotApplicable,
    Size,
    any_of,
    are_alike,
    other_grid,
)

#: Tolerance of logits, relative to their range.
_TOLERANCE = 1e-3
RIGHT = "row by row"
COLUMNS = "column by column"
SHIFTED = "shifted by {:+d}"
OPPOSITE = "queries and keys rotated in opposite directions"


@dataclass(frozen=True)
class Relative:
    """Attention between the patches of one window of an image whose patches are all the same.

    logits: (h, m, m).
    queries: (h, m, d), or None if they were not seen.
    shape: (H, W) of the window, of m patches.
    outside: tokens of the window that are not patches.
    earlier: number of attentions before this one.
    """

    logits: Tensor
    queries: Tensor | None
    shape: Size
    outside: int
    earlier: int = 0

    @property
    def where(self) -> str:
        """An empty string for the first attention of a model, else " in attention 2"."""
        return f" in attention {self.earlier + 1}" if self.earlier else ""

    @property
    def range(self) -> float:
        """Largest minus smallest logit of a head, the maximum over heads."""
        heads = self.logits.flatten(1)
        return float((heads.amax(1) - heads.amin(1)).max())

    def reading(self) -> str | None:
        """Return the order in which logits depend only on the displacement of two patches; None if there is none."""
        height, width = self.shape
        rank = torch.arange(height * width)
        row_by_row = Grid(*self.shape).coordinates()
        readings = {RIGHT: (rank, row_by_row), COLUMNS: (rank, Grid(width, height).coordinates().flip(-1))}
        for shift in (1, -1, *range(2, self.outside + 1), *range(-2, -self.outside - 1, -1)):
            ranks = rank[(rank + shift >= 0) & (rank + shift < len(rank))]
            readings[SHIFTED.format(shift)] = ranks, row_by_row[ranks + shift]
        for name, (ranks, places) in readings.items():
            if self._depends_on(places[:, None] - places, ranks):
                return name
        return OPPOSITE if self._depends_on(row_by_row[:, None] + row_by_row, rank) else None

    def _depends_on(self, pairs: Tensor, chosen: Tensor) -> bool:
        logits = self.logits[:, chosen][:, :, chosen].flatten(1)
        kinds = pairs.flatten(0, 1).unique(dim=0, return_inverse=True)[1]
        mean = torch.zeros(len(logits), int(kinds.max()) + 1, dtype=logits.dtype)
        mean = mean.index_add(1, kinds, logits) / kinds.bincount()
        return float((logits - mean[:, kinds]).abs().max()) <= _TOLERANCE * self.range

    def by_displacement(self) -> dict[Size, Tensor]:
        """Map each displacement (dy, dx) to the logits of a pair with this displacement, (h,)."""
        height, width = self.shape
        logits = {}
        for dy, dx in itertools.product(range(-height + 1, height), range(-width + 1, width)):
            i, j = max(dy, 0), max(dx, 0)
            logits[dy, dx] = self.logits[:, i * width + j, (i - dy) * width + j - dx]
        return logits


def every_relative(subject: ModelUnderTest) -> list[Relative]:
    """Return all attentions between patches that differ only in their relative position, in order."""
    reasons, attentions = [], []
    for earlier in itertools.count():
        if earlier and subject.seen(earlier).logits is None:
            break
        try:
            attentions.append(relative(subject, earlier=earlier))
        except NotApplicable as error:
            reasons.append(error)
    if not attentions:
        raise reasons[0]
    return attentions


def relative(subject: ModelUnderTest, level: float = 1.0, earlier: int = 0) -> Relative:
    """Return the attention, after `earlier` others, between patches that differ only in their relative position.

    It is not applicable without relative position information that can be separated from absolute position. `level` is
    the value of the constant image.
    """
    bare = subject.without_tables
    rows = bare.rows(earlier=earlier)
    recording = bare.seen(earlier) if level == 1.0 else record(bare.model, bare.constant(level), earlier)
    if recording.logits is None:
        others = recording.others or "neither scaled_dot_product_attention nor softmax"
        raise NotApplicable(f"no attention between all patches was seen: {others}")
    if not are_alike(bare.tokens(recording, earlier)):
        raise NotApplicable("absolute position, computed or of a convolution, cannot be taken out of the tokens")
    logits = recording.logits[0]
    size = logits.shape[-1]
    inside = torch.nonzero(rows // size == rows[0] // size).flatten()  # the patches of the first patch's window
    places = Grid(*subject.grid).coordinates()[inside]
    height, width = (places.amax(0) - places.amin(0) + 1).tolist()
    if height * width != len(inside):
        raise NotApplicable("the patches that attend to each other are not a rectangle")
    window, here = int(rows[0] // size), rows[inside] % size
    finite = logits[window][:, here][:, :, here]
    if not bool(finite.isfinite().all()):
        raise NotApplicable("patches are masked")
    queries = None if recording.queries is None else recording.queries[0, window][:, here]
    attention = Relative(finite, queries, (height, width), size - len(inside), earlier)
    if attention.range <= 1e-6 * float(finite.abs().max()):
        raise NotApplicable("no relative position information: attention is the same between all patches")
    return attention


def roughness(values: Tensor, grid: Size) -> float:
    """Return the roughness of (N, D) over the grid row by row, relative to that column by column."""

    def steps(maps: Tensor) -> Tensor:
        return maps.diff(dim=0).square().mean() + maps.diff(dim=1).square().mean()

    height, width = grid
    columns = values.view(width, height, -1).transpose(0, 1)
    return float(steps(values.view(height, width, -1)) / steps(columns))


def resampled_reading(measured: Tensor, old: Size, new: Size) -> tuple[str, float]:
    """Infer the order in which a table of the (y, x) of each patch was resampled, from the result, (N', 2).

    Returns the nearest reading, and the largest distance from the right one, in patches of the old grid.
    """
    table = Grid(*old).coordinates().double()

    def resized(values: Tensor, shape: Size, target: Size) -> Tensor:
        maps = values.T.reshape(1, 2, *shape)
        return F.interpolate(maps, size=target, mode="bilinear", antialias=True)[0].flatten(1).T

    right = resized(table, old, new)
    error = float((measured - right).abs().max())
    if error <= 0.75:
        return RIGHT, error
    readings = [(RIGHT, right)]
    for shape, target in ((old[::-1], new[::-1]), (old, new[::-1]), (old[::-1], new)):
        readings.append((COLUMNS, resized(table, shape, target)))
    for shift in (1, -1):
        readings.append((SHIFTED.format(shift), resized(table.roll(-shift, 0), old, new)))
    nearest = min(readings, key=lambda reading: float((measured - reading[1]).abs().amax(-1).quantile(0.9)))
    return nearest[0], error


def pair_layout(subject: ModelUnderTest, original: ModelUnderTest) -> str:
    """A rotation of queries keeps their length; it does not if its table has another layout of pairs."""
    rotated, reason = 0, NotApplicable("queries are not rotated")
    for relation in every_relative(subject):
        try:
            _check_lengths(subject, relation)
        except NotApplicable as error:
            reason = reason if relation.earlier else error
        else:
            rotated += 1
    if not rotated:
        raise reason
    return "rotations keep the length of queries" + (f", in {rotated} attentions" if rotated > 1 else "")


def _check_lengths(subject: ModelUnderTest, relation: Relative) -> None:
    share, queries = length_differences(relation), relation.queries
    if share is None or queries is None:
        raise NotApplicable("the queries of its attention were not seen")
    largest = float(queries.abs().max())
    if float((queries - queries.mean(1, keepdim=True)).abs().max()) <= 1e-6 * largest:
        raise NotApplicable("queries are not rotated")
    other = relative(subject, -2.0, relation.earlier).queries
    if other is not None:
        added = (queries - queries[:, :1]) - (other - other[:, :1])
        if float(added.abs().max()) <= 1e-6 * largest:
            raise NotApplicable("position is added to queries, which are not rotated")
    if share > SAME:
        raise Failed(
            f"a rotation must keep the length of queries, got lengths differing by {100 * share:.0f} %{relation.where}"
            ": the table and its use disagree on which channels form a pair (neighbors, or i and i + d / 2)"
        )


def length_differences(relation: Relative) -> float | None:
    """Return the largest relative difference of the lengths of a head's queries; None if they were not seen."""
    if relation.queries is None:
        return None
    lengths = relation.queries.norm(dim=-1)
    return float(((lengths.amax(1) - lengths.amin(1)) / lengths.amax(1).clamp_min(1e-30)).max())


def axes(subject: ModelUnderTest, original: ModelUnderTest) -> str:
    """Position is ordered row by row, as the patches are, at a grid that is not square."""
    return any_of(
        lambda: _relative_axes(subject), lambda: _table_axes(subject, original), lambda: _resampled_axes(subject)
    )


def _relative_axes(subject: ModelUnderTest) -> str:
    details = [_axes_of(attention, subject) for attention in every_relative(subject)]
    return details[0] + (f", in {len(details)} attentions" if details[1:] else "")


def _axes_of(relation: Relative, subject: ModelUnderTest) -> str:
    if relation.shape[0] == relation.shape[1]:
        raise NotApplicable(f"attention is within a square of {relation.shape[0]} x {relation.shape[1]} patches")
    reading = relation.reading()
    if reading in (COLUMNS, OPPOSITE):
        raise Failed(f"position must run row by row over {by(relation.shape)} patches, got {reading}{relation.where}")
    if reading is None:
        if _non_commuting(subject.model):
            raise NotApplicable("its rotations do not commute: attention is not a function of the displacement")
        if (share := length_differences(relation)) is not None and share > SAME:
            raise NotApplicable("the rotation of queries does not keep their length: see pair layout")
        raise Failed(
            f"attention between equal patches must depend on their displacement alone, got differences on a grid "
            f"of {by(relation.shape)}{relation.where}"
        )
    if reading != RIGHT:
        raise NotApplicable(f"position is {reading}: see prefix")
    return f"attention depends on the displacement in {by(relation.shape)} patches"


def _table_axes(subject: ModelUnderTest, original: ModelUnderTest) -> str:
    """Compare the smoothness of position in the tokens over the grid and over the grid with swapped axes."""
    original = original.small() if original.grid[0] == original.grid[1] else original
    if original.grid[0] == original.grid[1]:
        raise NotApplicable("the grid is square")
    tokens = original.tokens()
    if are_alike(tokens):
        raise NotApplicable("no absolute position in the tokens")
    ratio = roughness(tokens - tokens.mean(0), original.grid)
    if ratio > 1.5:  # at most 1.41 in 600 random convolutions, whose padding makes positions
        raise Failed(
            f"absolute position must be smooth row by row over {by(original.grid)} patches, got steps "
            f"{ratio:.1f} times as large as column by column"
        )
    if ratio > 0.8:
        raise NotApplicable("its table is noise, which has no order")
    return f"absolute position is smooth over {by(original.grid)} patches"


def _resampled_axes(subject: ModelUnderTest) -> str:
    reading, error, new = _resampled(subject)
    if reading == COLUMNS:
        raise Failed(
            f"a table resampled for {by(new)} patches must run row by row, got {COLUMNS}, {error:.1f} patches off"
        )
    if reading != RIGHT:
        raise NotApplicable(f"a resampled table is {reading}: see prefix")
    return f"a table keeps its axes when it is resampled for {by(new)} patches"


def _resampled(subject: ModelUnderTest) -> tuple[str, float, Size]:
    """Write the coordinates of patches into the table, and read them at another grid."""
    if not subject.tables:
        raise NotApplicable("no absolute position table (a parameter or buffer that is added to tokens)")
    subject = subject.at(subject.home)
    if subject.grid[0] == subject.grid[1] and hasattr(subject.model, "set_input_size"):
        raise NotApplicable("the table is of a square grid and refuses others")
    plain, places = subject.without_tables, Grid(*subject.grid).coordinates().double()
    filled = {}
    for name, value in subject.values().items():
        ahead = torch.full((len(value) - subject.patches, 2), 50.0, dtype=value.dtype)
        filled[name] = torch.cat([ahead, places]).repeat(1, math.ceil(value.shape[1] / 2))[:, : value.shape[1]]
    with_places = subject.with_tables(filled)
    if (error := float((_entered(with_places, plain) - places).abs().max())) > 1e-6:
        raise NotApplicable(f"the table is changed before it enters the tokens ({error:.1f} off)")
    new = other_grid(subject)
    reading, error = resampled_reading(_entered(with_places.at(new), plain.at(new)), subject.grid, new)
    return reading, error, new


def _entered(filled: ModelUnderTest, plain: ModelUnderTest) -> Tensor:
    """Return the first two channels of the contribution of the table to each patch, (N, 2)."""
    for at, (with_table, without) in enumerate(zip(filled.seen().inputs, plain.seen().inputs, strict=False)):
        if with_table.shape != without.shape or with_table.shape[1] < plain.patches:
            continue
        if not torch.equal(with_table, without):
            return (with_table - without)[0, plain.rows(at), :2]
    raise NotApplicable("the table does not enter the tokens")


def prefix(subject: ModelUnderTest, original: ModelUnderTest) -> str:
    """Class and register tokens do not count as positions of patches."""
    try:
        rows = subject.rows()
        outside = subject.seen().inputs[subject.seen().tokens].shape[1] - len(rows)
    except NotApplicable:
        outside = 0
    if outside <= 0 and not any(len(subject.split(value)[0]) for value in subject.values().values()):
        raise NotApplicable("no tokens besides the patches")
    return any_of(lambda: _relative_prefix(subject), lambda: _resampled_prefix(subject))


def _relative_prefix(subject: ModelUnderTest) -> str:
    for relation in every_relative(subject):
        reading = relation.reading()
        if reading is not None and reading.startswith("shifted"):
            raise Failed(
                f"the first patch must be at the first position, got positions {reading} of {by(relation.shape)}"
                f"{relation.where}"
            )
        if reading != RIGHT:
            raise NotApplicable("attention is not a function of the displacement: see axes and pair layout")
    return f"attention between patches is correct with {relation.outside} other token{'s' * (relation.outside != 1)}"


def _resampled_prefix(subject: ModelUnderTest) -> str:
    reading, error, new = _resampled(subject)
    if reading not in (RIGHT, COLUMNS):
        raise Failed(
            f"rows of tokens that are not patches must not be resampled, got a table that is {reading} for {by(new)} "
            f"patches, up to {error:.0f} patches off"
        )
    if reading == COLUMNS:
        raise NotApplicable("a resampled table has other axes: see axes")
    return f"their rows stay out of a table resampled for {by(new)} patches"


def _non_commuting(model: nn.Module) -> bool:
    """Return whether a model of this library rotates blocks of channels, which do not commute."""
    position = getattr(model, "position", None)
    return isinstance(position, nn.Module) and any(isinstance(module, LieRe) for module in position.modules())
