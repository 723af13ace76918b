"""Windows of a grid, which never reach beyond its border, and those of a rolled map."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.position.grid import Grid
from graticule.system.symbolic import ceiling, holds


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
        """The grid of one of its windows."""
        return Grid(*(cut.stop - cut.start for cut in (self.window_rows, self.window_columns)))

    @property
    def repeats(self) -> tuple[int, int]:
        """Return the number of windows per axis."""
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
            part of a window precedes it.
        rolled: whether tokens are mixed in the windows of the rolled map instead (`kinds`), where those of the last row
            and column contain tokens of opposite borders.
        masks: those that were computed already for blocks with these windows.
    """

    grid: Grid
    window: Grid
    shift: tuple[int, int] = (0, 0)
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
            y = y.roll([-by for by in self.shift], (1, 2))
        below, beside = (-side % step for side, step in zip(self.grid.shape, self.window.shape, strict=True))
        return F.pad(y, (0, 0, 0, beside, 0, below)) if below or beside else y

    def cut(self, x: Tensor) -> Tensor:
        """Cut tokens x: (B, N, D) into those of each window of the rolled map, (B * windows, M, D), row by row."""
        return _cut(self.rolled_map(x), self.window)

    def join(self, y: Tensor, samples: int) -> Tensor:
        """Join the tokens of windows of the rolled map, (B * windows, M, D), to those of the grid, (B, N, D)."""
        rows, columns = (ceiling(side, step) for side, step in zip(self.grid.shape, self.window.shape, strict=True))
        y = y.unflatten(1, self.window.shape).unflatten(0, (samples, rows, columns)).transpose(2, 3).contiguous()
        y = y.flatten(3, 4).flatten(1, 2)[:, : self.grid.height, : self.grid.width]
        return (y.roll(self.shift, (1, 2)) if any(self.shift) else y).flatten(1, 2)

    def tokens(self, device: torch.device | None = None) -> Tensor:
        """Return the tokens of each window of the rolled map, (windows, M); -1 for padding."""
        numbers = torch.arange(1, self.grid.patches + 1, device=device)[None, :, None]
        return self.cut(numbers)[..., 0] - 1

    def strangers(self, device: torch.device) -> Tensor:
        """Return the pairs of tokens of each window that were not neighbors in the map, (windows, M, M)."""
        padded = [ceiling(side, step) * step for side, step in zip(self.grid.shape, self.window.shape, strict=True)]
        rows, columns = (
            torch.arange(side, device=device) >= side - shift for side, shift in zip(padded, self.shift, strict=True)
        )
        kind = _cut((2 * rows[:, None] + columns)[None, ..., None], self.window)  # (windows, M, 1)
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
    rows, columns = y.shape[1] // window.height, y.shape[2] // window.width
    y = y.unflatten(2, (columns, window.width)).unflatten(1, (rows, window.height)).transpose(2, 3)
    # copied here instead of by `flatten`, whose search for a view takes minutes with symbolic sizes
    return y.contiguous().flatten(3, 4).flatten(0, 2)


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
    whole = (side - shift) // step * step
    if holds(side % step == 0):  # the same cuts, from which the sizes of the parts can be inferred
        whole = side - step if shift else side
    end = shift + whole
    cuts = [
        (slice(0, shift), slice(step - shift, step)),
        (slice(shift, end), slice(0, step)),
        (slice(end, side), slice(0, side - end)),
    ]
    return [(at, part) for at, part in cuts if at.stop > at.start]
