"""Rotary encodings: what turns the queries and keys of each layer."""

from __future__ import annotations

from graticule.encodings import FixedRotary, MixedRotary
from graticule.grid import Grid
from graticule.joining import LayerPosition
from graticule.position.base import Position


class RotaryPosition(Position):
    """A rotary encoding: one table for all layers, or one a layer and head.

    Args:
        encoding: built for the grid, or for a window of it.
        depth: number of layers.
        layers: only the first ones are told; all by default.
        window: side of the windows within which tokens attend; the encoding's grid stays that of a window, whatever
            grid is asked about, until `set_grid`.
    """

    def __init__(
        self, encoding: FixedRotary | MixedRotary, depth: int, layers: int | None = None, window: int | None = None
    ) -> None:
        super().__init__()
        self.encoding = encoding
        self.depth = depth
        self.layers = depth if layers is None else layers
        self.window = window

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Say what each layer gets for `grid`: (N, 2d) or (heads, N, 2d) as `rotary`."""
        table = self.encoding(grid if self.window is None else self.encoding.grid)
        tables = [table] * self.layers if table.ndim == 2 else list(table)
        return [LayerPosition(rotary=one) for one in tables] + [LayerPosition()] * (self.depth - self.layers)

    def set_grid(self, grid: Grid) -> None:
        """Compute everything for `grid`, or for its windows."""
        self.encoding.set_grid(grid.window(self.window))

    def published_names(self) -> dict[str, str]:
        """`rope.freqs`, as timm has learned frequencies."""
        return {"rope.freqs": "encoding.freqs"} if isinstance(self.encoding, MixedRotary) else {}
