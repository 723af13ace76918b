"""Orders of patches in position information: the correct one, and those of common mistakes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.external.recorder import record
from graticule.testing.subject import NotApplicable, Size, Subject

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
        row_by_row = torch.stack([rank // width, rank % width], -1)
        readings = {RIGHT: row_by_row, COLUMNS: torch.stack([rank % height, rank // height], -1)}
        kept = {}
        for shift in (1, -1, *range(2, self.outside + 1), *range(-2, -self.outside - 1, -1)):
            inside = (rank + shift >= 0) & (rank + shift < len(rank))
            name = SHIFTED.format(shift)
            kept[name] = rank[inside]
            readings[name] = row_by_row[rank[inside] + shift]
        for name, place in readings.items():
            chosen = kept.get(name, rank)
            if self._depends_on(place[:, None] - place[None, :], chosen):
                return name
        total = row_by_row[:, None] + row_by_row[None, :]
        return OPPOSITE if self._depends_on(total, rank) else None

    def _depends_on(self, pairs: Tensor, chosen: Tensor) -> bool:
        logits = self.logits[:, chosen][:, :, chosen].flatten(1)
        kinds = pairs.flatten(0, 1).unique(dim=0, return_inverse=True)[1]
        mean = torch.zeros(len(logits), int(kinds.max()) + 1, dtype=logits.dtype)
        mean = mean.index_add(1, kinds, logits) / kinds.bincount()
        return float((logits - mean[:, kinds]).abs().max()) <= _TOLERANCE * self.range

    def by_displacement(self) -> dict[Size, Tensor]:
        """Map each displacement (dy, dx) to the logits of a pair with this displacement, (h,)."""
        height, width = self.shape
        found = {}
        for dy in range(-height + 1, height):
            for dx in range(-width + 1, width):
                i, j = max(dy, 0), max(dx, 0)
                found[dy, dx] = self.logits[:, i * width + j, (i - dy) * width + j - dx]
        return found


def every_relative(subject: Subject) -> list[Relative]:
    """Return all attentions between patches that differ only in their relative position, in order.

    Raises:
        NotApplicable: if there is none, with the reason of the first.
    """
    reasons: list[NotApplicable] = []
    found = []
    earlier = 0
    while not earlier or subject.seen(earlier).logits is not None:
        try:
            found.append(relative(subject, earlier=earlier))
        except NotApplicable as error:
            reasons.append(error)
        earlier += 1
    if not found:
        raise reasons[0]
    return found


def relative(subject: Subject, level: float = 1.0, earlier: int = 0) -> Relative:
    """Return the attention between patches that differ only in their relative position.

    Args:
        level: value of the constant image.
        earlier: number of attentions before the inspected one.

    Raises:
        NotApplicable: if the model has no relative position information, or it cannot be separated from absolute
            position.
    """
    bare = subject.without_tables
    rows = bare.rows(earlier=earlier)
    seen = bare.seen(earlier) if level == 1.0 else record(bare.model, bare.constant(level), earlier)
    if seen.logits is None:
        raise NotApplicable("no attention between all patches was seen (scaled_dot_product_attention or softmax)")
    tokens = seen.inputs[seen.tokens][0, rows]
    if float((tokens - tokens.mean(0)).abs().max()) > 1e-6 * float(tokens.abs().max()):
        raise NotApplicable("absolute position, computed or of a convolution, cannot be taken out of the tokens")
    logits = seen.logits[0]
    size = logits.shape[-1]
    inside = torch.nonzero(rows // size == rows[0] // size).flatten()  # the patches of the first patch's window
    place = torch.stack([inside // subject.grid[1], inside % subject.grid[1]], -1)
    shape = int(place[:, 0].max() - place[:, 0].min()) + 1, int(place[:, 1].max() - place[:, 1].min()) + 1
    if shape[0] * shape[1] != len(inside):
        raise NotApplicable("the patches that attend to each other are not a rectangle")
    window, here = int(rows[0] // size), rows[inside] % size
    finite = logits[window][:, here][:, :, here]
    if not bool(finite.isfinite().all()):
        raise NotApplicable("patches are masked")
    queries = None if seen.queries is None else seen.queries[0, window][:, here]
    found = Relative(finite, queries, shape, size - len(inside), earlier)
    if found.range <= 1e-6 * float(finite.abs().max()):
        raise NotApplicable("no relative position information: attention is the same between all patches")
    return found


def roughness(values: Tensor, grid: Size) -> float:
    """Return the roughness of (N, D) over the grid row by row, relative to that column by column."""

    def steps(maps: Tensor) -> Tensor:
        return maps.diff(dim=0).square().mean() + maps.diff(dim=1).square().mean()

    height, width = grid
    columns = values.view(width, height, -1).transpose(0, 1)
    return float(steps(values.view(height, width, -1)) / steps(columns))


def resampled_reading(measured: Tensor, old: Size, new: Size) -> tuple[str, float]:
    """Infer the order in which a table of the (y, x) of each patch was resampled.

    Args:
        measured: the (y, x) of each patch of the new grid, (N', 2).
        old, new: (H, W).

    Returns:
        The nearest reading, and the largest distance from it, in patches of the old grid.
    """
    rank = torch.arange(old[0] * old[1])
    table = torch.stack([rank // old[1], rank % old[1]], -1).double()

    def resized(values: Tensor, shape: Size, target: Size) -> Tensor:
        maps = values.T.reshape(1, 2, *shape)
        return F.interpolate(maps, size=target, mode="bilinear", antialias=True)[0].flatten(1).T

    found = {RIGHT: resized(table, old, new)}
    for shape, target in ((old[::-1], new[::-1]), (old, new[::-1]), (old[::-1], new)):
        found[f"{COLUMNS} {shape} {target}"] = resized(table, (shape[0], shape[1]), (target[0], target[1]))
    for shift in (1, -1):
        found[SHIFTED.format(shift)] = resized(table.roll(-shift, 0), old, new)
    errors = {name: float((measured - one).abs().amax(-1).quantile(0.9)) for name, one in found.items()}
    right = float((measured - found[RIGHT]).abs().max())
    if right <= 0.75:
        return RIGHT, right
    nearest = min(errors, key=errors.__getitem__)
    return nearest.partition(" (")[0], right
