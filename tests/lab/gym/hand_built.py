"""A model without weights: it recognizes the marks in the patches, and computes answers from their coordinates."""

import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.lab.gym.base import CELL, A, B, glyphs


def read_marks(images: Tensor) -> dict[int, Tensor]:
    """Return the cells of each mark, symbol -> (count, N), 0 or 1, by correlation of the patches with its glyph."""
    patches = F.unfold(images, CELL, stride=CELL)  # (count, 16, N)
    return {
        mark: torch.einsum("bpn,p->bn", patches, glyphs()[mark].flatten().to(images.dtype)) / CELL**2 for mark in (A, B)
    }


class HandBuilt:
    """Answers each task from the coordinates of the cells, independent of the code of the task."""

    def __init__(self, task: str, grid: tuple[int, int], torus: bool) -> None:
        self.answer = getattr(self, task)
        self.grid, self.torus = grid, torus
        self.y, self.x = (axis.flatten().double() for axis in torch.meshgrid(*map(torch.arange, grid), indexing="ij"))

    def __call__(self, images: Tensor) -> Tensor:
        marks = read_marks(images.double())
        return self.answer(marks[A].round(), marks[B].round())

    def mean(self, mark: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coordinates of the single cell of a mark."""
        return mark @ self.y, mark @ self.x

    def between(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the displacement from the cell of one mark to that of another, the shortest on a torus."""
        ways = [end - start for start, end in zip(self.mean(a), self.mean(b), strict=True)]
        if self.torus:
            ways = [
                torch.where(way > side / 2, way - side, torch.where(way < -(side - 1) / 2, way + side, way))
                for way, side in zip(ways, self.grid, strict=True)
            ]
        return ways[0], ways[1]

    def place(self, a, b):
        y, x = self.mean(a)
        logits = [
            -(torch.floor(3 * y / self.grid[0]) - row).abs() - (torch.floor(3 * x / self.grid[1]) - column).abs()
            for row in range(3)
            for column in range(3)
        ]
        return torch.stack(logits, 1)

    def border(self, a, b):
        (y, x), (height, width) = self.mean(a), self.grid
        inside = torch.stack([y, x, height - 1 - y, width - 1 - x]).amin(0)
        return torch.stack([inside, 0.5 * torch.ones_like(inside)], 1)

    def symmetry(self, a, b):
        mirrored = a.unflatten(1, self.grid).flip(2).flatten(1)
        same = (a - mirrored).abs().sum(1)
        return torch.stack([same, 0.5 * torch.ones_like(same)], 1)

    def order(self, a, b):
        scan = self.y * self.grid[1] + self.x
        return torch.stack([b @ scan, a @ scan], 1)

    def box(self, a, b):
        edges = []
        for axis, side in ((self.y, self.grid[0]), (self.x, self.grid[1])):
            at = torch.where(a == 1, axis, torch.nan)
            edges.append((at.nan_to_num(side).amin(1) / side, at.nan_to_num(-1).amax(1) / side))
        (top, bottom), (left, right) = edges
        return torch.stack([top, left, bottom, right], 1)

    def region(self, a, b):
        return one_hot(a @ (self.y < self.grid[0] // 2).double(), 5)

    def neighbors(self, a, b):
        shape = (-1, 1, *self.grid)
        around = F.pad(b.view(shape), (1, 1, 1, 1), mode="circular" if self.torus else "constant")
        near = F.conv2d(around, torch.ones(1, 1, 3, 3, dtype=torch.float64)).flatten(1)
        return one_hot((a * near).sum(1), 4)

    def displacement(self, a, b):
        dy, dx = self.between(a, b)
        ways = [(steps * down, steps * right) for down, right in ((-1, 0), (0, -1), (0, 1), (1, 0)) for steps in (1, 2)]
        return torch.stack([-(dy - down).abs() - (dx - right).abs() for down, right in ways], 1)

    def direction(self, a, b):
        dy, dx = self.between(a, b)
        return torch.stack([-dy, -dx, dx, dy], 1)

    def distance(self, a, b):
        dy, dx = self.between(a, b)
        return one_hot(torch.maximum(dy.abs(), dx.abs()).clamp(max=3) - 1, 3)

    def scale(self, a, b):
        cells = a.view(-1, *self.grid)
        logits = []
        for side in (1, 2, 3):  # rolling also finds squares across the seams
            corners = [cells.roll((-down, -right), (1, 2)) for down in (0, side) for right in (0, side)]
            logits.append(torch.stack(corners).prod(0).flatten(1).amax(1))
        return torch.stack(logits, 1)

    def shift(self, a, b):
        return a.view(-1, *self.grid).roll(2, 2).flatten(1)

    def column(self, a, b):
        return 100 * (((a @ self.x)[:, None] == self.x).double() - 0.5)


def one_hot(number: Tensor, classes: int) -> Tensor:
    """Return logits for a number that is the class."""
    return F.one_hot(number.long(), classes).double()
