"""Tasks that ask for cells: the cell two to the right of a mark, and the cells of its column."""

from __future__ import annotations

import torch

from graticule.studies.gym.answers import Cell, Mask
from graticule.studies.gym.base import TASKS, Arrangements, ListedTask, Surface
from graticule.studies.gym.marks import A
from graticule.studies.gym.pairs import rows_and_columns


@TASKS.register("shift")
class Shift(ListedTask):
    """Which cell lies two (`steps`) to the right of the mark? Every token answers for its own cell.

    Needs: a displacement, from the token that answers. Chance: 1/(N - 1).

    Each cell that has a cell `steps` to its right is drawn equally often, and every image has one mark A. Without
    position, all other cells with the same symbol get the same logit, and the right one may be any of them.
    """

    knows = "a shift, per token"
    frame = "relative"
    symbols = (A,)

    def __init__(self, grid: tuple[int, int], surface: Surface = "plane", density: float = 0.0, steps: int = 2) -> None:
        super().__init__(grid, surface, density)
        if not 1 <= steps < grid[1]:
            raise ValueError(f"`steps` must be from 1 to {grid[1] - 1}, below the width, got {steps}.")
        self.steps = steps
        self.answer = Cell(self.cells)

    def arrangements(self) -> Arrangements:
        """List the cells of the mark."""
        width = self.grid[1]
        cells = torch.arange(self.cells)
        y, x = rows_and_columns(cells, self.grid)
        kept = torch.full_like(x, self.surface == "torus", dtype=torch.bool) | (x + self.steps < width)
        target = y * width + (x + self.steps) % width
        count = int(kept.sum())
        return Arrangements(cells[kept, None], target[kept], torch.full((count,), 1 / count, dtype=torch.float64))


@TASKS.register("column")
class Column(ListedTask):
    """Which cells lie in the column of the mark? Every token answers for its own cell.

    Needs: a direction, from the token that answers, at any distance. Score: share of variance explained. Chance: 0.

    Each cell is drawn equally often, and every image has one mark A, whose own cell is not asked for.
    """

    knows = "a column, per token"
    frame = "relative"
    symbols = (A,)

    def __init__(self, grid: tuple[int, int], surface: Surface = "plane", density: float = 0.0) -> None:
        super().__init__(grid, surface, density)
        self.answer = Mask((grid[0] - 1) / (self.cells - 1))

    def arrangements(self) -> Arrangements:
        """List the cells of the mark."""
        cells = torch.arange(self.cells)
        _, x = rows_and_columns(cells, self.grid)
        target = (x[:, None] == x).long()
        target.fill_diagonal_(-1)
        return Arrangements(cells[:, None], target, torch.full((self.cells,), 1 / self.cells, dtype=torch.float64))
