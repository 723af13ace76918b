"""Tables that are computed from parameters for any grid: nothing depends on one grid, and nothing is resampled."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from graticule.encodings.absolute import AbsoluteEncoding
from graticule.grid import Grid


class ComputedEncoding(AbsoluteEncoding):
    """Computes the rows of the patches of any grid from its parameters; the rows of prefix tokens are zero."""

    @abstractmethod
    def rows(self, grid: Grid) -> Tensor:
        """Compute the rows of the patches of `grid`, (H * W, D)."""

    def forward(self, grid: Grid) -> Tensor:
        """Return w for `grid`, (N, D)."""
        return self.at(grid)

    def at(self, grid: Grid) -> Tensor:
        """Return w for any grid, (N, D)."""
        return grid.with_prefix_rows(self.rows(grid))

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the encoding; no parameter depends on it."""
        self.grid = grid
