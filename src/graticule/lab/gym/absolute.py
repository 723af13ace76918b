"""Tasks on the absolute positions of marks: place, border, symmetry about the middle, order along a scan, a box."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from graticule.lab.gym.base import (
    TASKS,
    A,
    Arrangements,
    B,
    Classes,
    GymTask,
    ListedTask,
    Surface,
    Values,
    balance,
    displacements,
    equal,
    even,
)


@TASKS.register("place")
class Place(ListedTask):
    """In which of nine regions, thirds of the height by thirds of the width, is the mark?

    Needs: the absolute position along both axes. Chance: 1/9.

    Each region is drawn equally often, and every image has one mark A. On a torus, all shifts of an image together show
    each region equally often, so a model that is invariant to shifts is at chance, too.
    """

    knows = "absolute position"
    frame = "absolute"
    symbols = (A,)
    answer = Classes(tuple(f"{y} {x}" for y in ("top", "middle", "bottom") for x in ("left", "center", "right")))

    def arrangements(self) -> Arrangements:
        """List the cells of the mark."""
        y, x = self.coordinates()
        return balance(torch.arange(self.cells)[:, None], 3 * (3 * y // self.grid[0]) + 3 * x // self.grid[1])


@TASKS.register("border")
class Border(ListedTask):
    """Is the mark in the outermost rows or columns?

    Needs: nearness to the border, the part of the absolute position that a padded convolution sees. Chance: 1/2.

    Either answer is drawn equally often, and every image has one mark A.
    """

    knows = "border"
    frame = "absolute"
    surfaces = ("plane",)
    symbols = (A,)
    answer = Classes(("inside", "border"))

    def arrangements(self) -> Arrangements:
        """List the cells of the mark."""
        (y, x), (height, width) = self.coordinates(), self.grid
        label = ((y == 0) | (y == height - 1) | (x == 0) | (x == width - 1)).long()
        return balance(torch.arange(self.cells)[:, None], label)


@TASKS.register("symmetry")
class Symmetry(ListedTask):
    """Are two equal marks in one row mirror images of each other about the middle of the image?

    Needs: the middle of the image along one axis. The displacement of the marks does not help: among pairs of each
    distance, both answers are equally probable. Chance: 1/2.

    Either answer is drawn equally often, and every image has two marks A. On a torus, the same is true of all
    shifts of an image together.
    """

    knows = "symmetry"
    frame = "absolute"
    symbols = (A, A)
    answer = Classes(("no", "mirrored"))

    def arrangements(self) -> Arrangements:
        """List the pairs in a row at distances that both mirrored and other pairs have."""
        width = self.grid[1]
        pairs, dy, dx = self.pairs()
        distance = dx.abs()
        label = (pairs.remainder(width).sum(1) % width == width - 1).long()
        both = torch.zeros(2, width + 1, dtype=torch.bool)
        row = (dy == 0) & (pairs[:, 0] < pairs[:, 1])
        both[label[row], distance[row]] = True
        chosen = row & both.all(0)[distance]
        return Arrangements(pairs[chosen], label[chosen], even(label[chosen], within=distance[chosen]))


@TASKS.register("order")
class Order(ListedTask):
    """Which of two different marks comes first when the image is read row by row?

    Needs: the order along a scan. Chance: 1/2.

    Either answer is drawn equally often, and every image has one mark A and one B.
    """

    knows = "order along a scan"
    frame = "absolute"
    surfaces = ("plane",)
    symbols = (A, B)
    answer = Classes(("A first", "B first"))

    def arrangements(self) -> Arrangements:
        """List the pairs of different cells."""
        pairs, *_ = self.pairs()
        return balance(pairs, (pairs[:, 1] < pairs[:, 0]).long())


@TASKS.register("box")
class Box(ListedTask):
    """Which rows and columns bound the rectangle with four marks as corners?

    Needs: the absolute position of both corners, as numbers: top, left, bottom and right as shares of the image.
    Score: share of variance explained. Chance: 0.

    Each rectangle is drawn equally often, and every image has four marks A, so without position the best answer is the
    mean rectangle.
    """

    knows = "box"
    frame = "absolute"
    surfaces = ("plane",)
    symbols = (A, A, A, A)

    def __init__(self, grid: tuple[int, int], surface: Surface = "plane", density: float = 0.0) -> None:
        super().__init__(grid, surface, density)
        target = self.arrangements().target
        self.answer = Values(("top", "left", "bottom", "right"), target.var(0, correction=0))

    def arrangements(self) -> Arrangements:
        """List the rectangles of at least two rows and columns."""
        height, width = self.grid
        rows, columns = (torch.combinations(torch.arange(side)) for side in (height, width))
        top, bottom = rows.repeat_interleave(len(columns), 0).unbind(1)
        left, right = columns.repeat(len(rows), 1).unbind(1)
        cells = torch.stack([y * width + x for y in (top, bottom) for x in (left, right)], 1)
        return equal(cells, torch.stack([top, left, bottom, right], 1) / torch.tensor([height, width, height, width]))


class Counting(GymTask):
    """Draws the count first, each equally often, then as many cells of a region, and the other cells outside."""

    counted: int

    @abstractmethod
    def regions(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the cells of other marks, (count, others), and a mask of the cells of the region, (count, N)."""

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw counts, and marks in the region and outside, but not in cells of the other marks."""
        others, region = self.regions(count, generator)
        label = torch.randint(self.counted + 1, (count,), generator=generator)
        inside, outside = torch.rand(2, count, self.cells, generator=generator)
        inside = inside.masked_fill(~region, -1).scatter(1, others, -1)  # the highest are chosen
        outside = outside.masked_fill(region, -1).scatter(1, others, -1)
        chosen = torch.stack([scores.topk(self.counted, 1).indices for scores in (outside, inside)])
        from_inside = (torch.arange(self.counted) < label[:, None]).long()
        marks = torch.where(from_inside == 1, chosen[1], chosen[0])
        return torch.cat([marks, others], 1), label


@TASKS.register("region")
class Region(Counting):
    """How many of four marks lie in the upper half of the image?

    Needs: counting within a region that is given by absolute position. Chance: 1/5.

    Each count is drawn equally often, and every image has four marks A.
    """

    knows = "counting in the upper half"
    frame = "absolute"
    surfaces = ("plane",)
    symbols = (A, A, A, A)
    counted = 4
    answer = Classes(tuple(map(str, range(5))))

    def regions(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the upper half, without the middle row if there is one."""
        region = torch.arange(self.cells) // self.grid[1] < self.grid[0] // 2
        return torch.empty(count, 0, dtype=torch.long), region.expand(count, -1)


@TASKS.register("neighbors")
class Neighbors(Counting):
    """How many of three marks touch another one, at a side or a corner?

    Needs: counting within a region that is given by a mark, wherever the mark is. Chance: 1/4.

    Each count is drawn equally often, and every image has three marks A and one B.
    """

    knows = "counting around a mark"
    frame = "relative"
    symbols = (A, A, A, B)
    counted = 3
    answer = Classes(tuple(map(str, range(4))))

    def regions(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw a cell for B; the region is the cells around it."""
        center = torch.randint(self.cells, (count, 1), generator=generator)
        dy, dx = displacements(center, torch.arange(self.cells)[None], self.grid, self.torus)
        return center, torch.maximum(dy.abs(), dx.abs()) == 1
