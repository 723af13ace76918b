"""Tasks that ask for the number of marks in a region: in the upper half of the image, or around another mark."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from graticule.studies.gym.answers import Classes
from graticule.studies.gym.base import TASKS, GymTask
from graticule.studies.gym.marks import A, B
from graticule.studies.gym.pairs import displacements


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
        dy, dx = displacements(center, torch.arange(self.cells)[None], self.grid, self.surface == "torus")
        return center, torch.maximum(dy.abs(), dx.abs()) == 1
