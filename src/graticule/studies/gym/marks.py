"""Pictures of the gym: every cell of a grid shows a mark, or nothing."""

from __future__ import annotations

import torch
from scipy.linalg import hadamard
from torch import Tensor

#: Symbols of a cell: nothing, the two marks of the tasks, and distractors without information.
BLANK, A, B, DISTRACTORS = 0, 1, 2, (3, 4, 5)
#: Side of a cell in pixels, which is the patch size of a model.
CELL = 4
#: Rows of the Hadamard matrix that are the pictures of the symbols 1 to 5.
_ROWS = (5, 10, 3, 12, 6)


def glyphs() -> Tensor:
    """Return pictures of the symbols, (6, 4, 4): a blank cell is 0, the others are 1 and -1, orthogonal, of mean 0."""
    matrix = torch.from_numpy(hadamard(CELL * CELL)).float()
    found: Tensor = torch.cat([torch.zeros(1, CELL * CELL), matrix[list(_ROWS)]]).unflatten(1, (CELL, CELL))
    return found


def paint(symbols: Tensor) -> Tensor:
    """Return the images (count, 1, 4 H, 4 W) of symbols (count, H, W)."""
    painted: Tensor = glyphs()[symbols].permute(0, 1, 3, 2, 4).flatten(3, 4).flatten(1, 2).unsqueeze(1)
    return painted
