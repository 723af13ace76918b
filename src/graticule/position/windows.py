"""Windows of a grid, which never reach beyond its border, and windows of a rolled map."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.position.grid import Grid
from graticule.system.symbolic import ceiling, is_statically_true


class Tile(NamedTuple):
    """A rectangle of a grid with windows of one kind: whole windows, or the same part of each window.

    rows, columns: its slices of the grid.
    window_rows, window_columns: the part of a whole window that its windows cover.
    """

    rows: slice
    columns: slice
    window_rows: slice
    window_columns: slice

    @property
    def part(self) -> Grid:
        return Grid(*(cut.stop - cut.start for cut in (self.window_rows, self.window_columns)))

    @property
    def repeats(self) -> tuple[int, int]:
        rows, columns = (cut.stop - cut.start for cut in (self.rows, self.columns))
        return rows // self.part.height, columns // self.part.width


@dataclass(frozen=True)
class Windows:
    """Non-overlapping windows of a grid that never reach beyond its border.

    If windows do not tile the grid, or are shifted, those at the border are parts of a window. So the map is neither
    rolled nor padded, and tokens of opposite borders do not attend to each other. There are at most nine kinds of
    windows, one per tile.

    Args:
        grid: the grid of the windows.
        window: the grid of a whole window, no larger than `grid`.
        shift: shift of the windows, (rows, columns), less than a window; the window at 0 then begins at `shift`, and a
            part of a window precedes it. The rolled map may have other axes, such as frames, rows and columns.
        rolled: whether tokens are mixed in the windows of the rolled map instead (`kinds`), where the windows of the
            last row and column contain tokens of opposite borders.
        masks: those that were computed already for blocks with these windows.
    """

    grid: Grid
    window: Grid
    shift: tuple[int, ...] = (0, 0)
    rolled: bool = False
    masks: dict[Any, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def tiles(self) -> list[list[Tile]]:
        """Return the tiles: one list per strip of rows, from the top, each from left to right."""
        rows, columns = (
            _cuts(side, step, shift)
            for side, step, shift in zip(self.grid.shape, self.window.shape, self.shift, strict=True)
        )
        return [[Tile(at, across, part, part_across) for across, part_across in columns] for at, part in rows]

    def rolled_map(self, x: Tensor) -> Tensor:
        """Roll the map of tokens x: (B, N, D) by the shift, and pad it with zeros to whole windows, (B, H, W, D)."""
        y = x.unflatten(1, self.grid.shape)
        if any(self.shift):
            y = y.roll([-by for by in self.shift], self._axes)
        more = [-side % step for side, step in zip(self.grid.shape, self.window.shape, strict=True)]
        return F.pad(y, (0, 0, *(pad for count in reversed(more) for pad in (0, count)))) if any(more) else y

    @property
    def _axes(self) -> list[int]:
        """The axes of the grid in a map, (B, H, W, D)."""
        return [*range(1, len(self.grid.shape) + 1)]

    def cut(self, x: Tensor) -> Tensor:
        """Cut tokens x: (B, N, D) into the tokens of each window of the rolled map, (B * windows, M, D), row by row."""
        return _cut(self.rolled_map(x), self.window)

    def join(self, y: Tensor, samples: int) -> Tensor:
        """Join the tokens of the rolled map's windows, (B * windows, M, D), to the grid's tokens, (B, N, D)."""
        counts = [ceiling(side, step) for side, step in zip(self.grid.shape, self.window.shape, strict=True)]
        y = y.unflatten(1, self.window.shape).unflatten(0, (samples, *counts))
        axes = self._axes  # of the windows; those within a window follow
        y = y.permute(0, *(dim for axis in axes for dim in (axis, axis + len(axes))), -1).contiguous()
        for axis in reversed(axes):
            y = y.flatten(2 * axis - 1, 2 * axis)
        for axis, side in zip(axes, self.grid.shape, strict=True):
            y = y.narrow(axis, 0, side)
        return (y.roll(self.shift, axes) if any(self.shift) else y).flatten(1, -2)

    def tokens(self, device: torch.device | None = None) -> Tensor:
        """Return the tokens of each window of the rolled map, (windows, M); -1 for padding."""
        numbers = torch.arange(1, self.grid.patches + 1, device=device)[None, :, None]
        return self.cut(numbers)[..., 0] - 1

    def strangers(self, device: torch.device) -> Tensor:
        """Return the pairs of tokens of each window that were not neighbors in the map, (windows, M, M)."""
        kind = torch.zeros((), dtype=torch.long, device=device)
        for side, step, shift in zip(self.grid.shape, self.window.shape, self.shift, strict=True):
            padded = ceiling(side, step) * step
            kind = 2 * kind[..., None] + (torch.arange(padded, device=device) >= padded - shift)  # of all axes so far
        kind = _cut(kind[None, ..., None], self.window)  # (windows, M, 1)
        return kind != kind.mT

    def kinds(self, x: Tensor) -> list[list[tuple[Tensor, Tensor | None]]]:
        """Cut the rolled map of tokens x: (B, N, D) into rectangles (B, H, W, D) of one kind of window each.

        Each comes with its mask, (M, M), True for tokens of a window that were neighbors before the map was rolled; it
        is None if all were. A map that windows do not tile is padded with zeros at the bottom and on the right.
        """
        y, window = self.rolled_map(x), self.window
        lower, upper = (
            [(0, side, 0)] if not shift else [(0, side - step, 0), (side - step, side, shift)]
            for side, step, shift in zip(y.shape[1:3], window.shape, self.shift, strict=True)
        )
        return [
            [
                (y[:, top:end, left:right], _near(window, down, across, x.device))
                for left, right, across in upper
                if right
            ]
            for top, end, down in lower
            if end
        ]


def _cut(y: Tensor, window: Grid) -> Tensor:
    """Cut a map of whole windows, (B, H, W, D), into the tokens of each window, (B * windows, M, D)."""
    count = len(window.shape)
    for axis, side in reversed([*enumerate(window.shape, start=1)]):
        y = y.unflatten(axis, (y.shape[axis] // side, side))
    y = y.permute(0, *range(1, 2 * count, 2), *range(2, 2 * count + 1, 2), -1)
    # copied here instead of by `flatten`, whose search for a view takes minutes with symbolic sizes
    return y.contiguous().flatten(count + 1, 2 * count).flatten(0, count)


def _near(window: Grid, down: int, across: int, device: torch.device) -> Tensor | None:
    """Return the mask of a window whose last `down` rows and `across` columns come from the opposite edge."""
    if not down and not across:
        return None
    y = torch.arange(window.height, device=device) >= window.height - down
    x = torch.arange(window.width, device=device) >= window.width - across
    kind = (2 * y[:, None] + x).flatten()
    return kind[:, None] == kind


def _cuts(side: int, step: int, shift: int) -> list[tuple[slice, slice]]:
    """Cut an axis into the part before the first whole window, the whole windows, and the rest.

    Each comes with the part of a window that it covers.
    """
    length = (side - shift) // step * step
    if is_statically_true(side % step == 0):  # the same cuts, from which the sizes of the parts can be inferred
        length = side - step if shift else side
    end = shift + length
    cuts = [
        (slice(0, shift), slice(step - shift, step)),
        (slice(shift, end), slice(0, step)),
        (slice(end, side), slice(0, side - end)),
    ]
    return [(at, part) for at, part in cuts if at.stop > at.start]
