"""Pairs of cells on a plane and on a torus."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_and_columns(cells: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return row and column of cells, which are indices in row-major order."""
    return cells // grid[1], cells % grid[1]


def ordered_pairs(cells: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second cell of all ordered pairs of different cells."""
    first, second = torch.meshgrid(torch.arange(cells), torch.arange(cells), indexing="ij")
    different = first != second
    return first[different], second[different]


def displacements(first: Tensor, second: Tensor, grid: tuple[int, int], torus: bool) -> tuple[Tensor, Tensor]:
    """Return the displacement from `first` to `second`, in rows and columns.

    On a torus it is the shortest one, from -(side - 1) // 2 to side // 2.
    """
    found = []
    starts, ends = rows_and_columns(first, grid), rows_and_columns(second, grid)
    for start, end, side in zip(starts, ends, grid, strict=True):
        way = end - start
        found.append((way + (side - 1) // 2) % side - (side - 1) // 2 if torus else way)
    return found[0], found[1]


def shifted(cells: Tensor, by: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Return the cells shifted by `by` = (rows, columns), around the torus."""
    y, x = rows_and_columns(cells, grid)
    return (y + by[0]) % grid[0] * grid[1] + (x + by[1]) % grid[1]
