"""Tasks on the relative positions of marks: displacement, direction, distance, scale."""

from __future__ import annotations

import torch

from graticule.lab.gym.base import (
    TASKS,
    A,
    Arrangements,
    B,
    CellAnswer,
    Classes,
    ListedTask,
    Mask,
    Surface,
    balance,
    equal,
)


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
        self.answer = CellAnswer(self.cells)

    def arrangements(self) -> Arrangements:
        """List the cells of the mark."""
        (y, x), width = self.coordinates(), self.grid[1]
        chosen = (x + self.steps < width) | self.torus
        target = y * width + (x + self.steps) % width
        return equal(torch.arange(self.cells)[chosen, None], target[chosen])


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
        _, x = self.coordinates()
        target = (x[:, None] == x).long().fill_diagonal_(-1)
        return equal(torch.arange(self.cells)[:, None], target)


_WAYS = {"above": (-1, 0), "left": (0, -1), "right": (0, 1), "below": (1, 0)}


@TASKS.register("displacement")
class Displacement(ListedTask):
    """Where does B lie from A: one or two cells above, left, right or below?

    Needs: the displacement, that is direction and distance. Chance: 1/8.

    Each of the eight displacements is drawn equally often, and every image has one mark A and one B.
    """

    knows = "displacement"
    frame = "relative"
    symbols = (A, B)
    answer = Classes(tuple(f"{steps} {way}" for way in _WAYS for steps in (1, 2)))

    def arrangements(self) -> Arrangements:
        """List the pairs with one of the eight displacements."""
        pairs, dy, dx = self.pairs()
        label = torch.full_like(dy, -1)
        for number, (way, steps) in enumerate((way, steps) for way in _WAYS.values() for steps in (1, 2)):
            label[(dy == steps * way[0]) & (dx == steps * way[1])] = number
        return balance(pairs, label, label >= 0)


@TASKS.register("direction")
class Direction(ListedTask):
    """Does B lie above, left, right or below A, at any distance?

    Needs: the direction. Pairs that are as far apart in rows as in columns are left out, and so are those on a torus
    that are equally far apart both ways. Chance: 1/4.

    Each direction is drawn equally often, and every image has one mark A and one B.
    """

    knows = "direction"
    frame = "relative"
    symbols = (A, B)
    answer = Classes(tuple(_WAYS))

    def arrangements(self) -> Arrangements:
        """List the pairs with a clear direction."""
        pairs, dy, dx = self.pairs()
        down = dy.abs() > dx.abs()
        label = torch.where(down, torch.where(dy < 0, 0, 3), torch.where(dx < 0, 1, 2))
        along = torch.where(down, dy, dx).abs()
        clear = dy.abs() != dx.abs()
        if self.torus:
            clear &= 2 * along != torch.where(down, *self.grid)
        return balance(pairs, label, clear)


@TASKS.register("distance")
class Distance(ListedTask):
    """How far does B lie from A, in rows or columns, whichever is more: one, two, or more cells?

    Needs: the distance, whatever the direction. Chance: 1/3.

    Each answer is drawn equally often, and every image has one mark A and one B.
    """

    knows = "distance"
    frame = "relative"
    symbols = (A, B)
    answer = Classes(("1", "2", "3 or more"))

    def arrangements(self) -> Arrangements:
        """List the pairs."""
        pairs, dy, dx = self.pairs()
        return balance(pairs, torch.maximum(dy.abs(), dx.abs()).clamp(max=3) - 1)


@TASKS.register("scale")
class RelativeScale(ListedTask):
    """How large is the square with four marks as corners: one, two or three cells per side?

    Needs: the scale of a figure, wherever it is. Chance: 1/3.

    Each size is drawn equally often, and every image has four marks A.
    """

    knows = "scale"
    frame = "relative"
    symbols = (A, A, A, A)
    answer = Classes(("1", "2", "3"))

    def arrangements(self) -> Arrangements:
        """List the squares, on a torus also those across its seams."""
        (y, x), (height, width) = self.coordinates(), self.grid
        squares, labels = [], []
        for side in (1, 2, 3):
            inside = (y + side < height) & (x + side < width) | self.torus
            corners = [(y + down) % height * width + (x + right) % width for down in (0, side) for right in (0, side)]
            squares.append(torch.stack(corners, 1)[inside])
            labels += [side - 1] * int(inside.sum())
        return balance(torch.cat(squares), torch.tensor(labels))
