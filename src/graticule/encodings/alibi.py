"""ALiBi: a penalty on the attention logits that grows with the distance, at a speed of its own in each head."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graticule.checks import checked
from graticule.encodings.base import register_encoding
from graticule.encodings.bias import BiasEncoding
from graticule.grid import Grid


@register_encoding("alibi")
class Alibi(BiasEncoding):
    r"""Subtracts one slope per head times the distance from the attention logits; nothing is learned.

    .. math:: b_{h, i, j} = -m_h |p_i - p_j|, \quad m_h = 2^{-8h / n}, \quad h = 1 \dots n

    for n heads, n a power of two. For another number of heads they are the slopes of the largest power of two below,
    then every other slope, from the first, of the power of two above, as in its code. The paper has it in one
    dimension, for tokens that see those before them; on a grid of height 1 that is |i - j|. In two dimensions the
    distance here is the Euclidean one between two patches, in patches, which is ours. Prefix tokens get no bias.
    It is computed at any grid.

    Reference: Train Short, Test Long (ALiBi, Press et al., 2022), section 3.

    Args:
        grid: the grid that the encoding is built for; nothing depends on it.
        num_heads: h.
    """

    shared = True
    crops = True

    @checked
    def __init__(self, grid: Grid, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"`num_heads` must be at least 1, got {num_heads}.")
        self.grid = grid
        self.num_heads = num_heads
        self.register_buffer("slopes", torch.tensor(slopes(num_heads)), persistent=False)
        self.slopes: Tensor

    def forward(self, grid: Grid) -> Tensor:
        """Return the bias for `grid`, (num_heads, N, N), nowhere positive."""
        wide = torch.promote_types(self.slopes.dtype, torch.float32)
        distances = grid.offsets(self.slopes.device).to(wide).norm(dim=-1)
        return grid.with_prefix_bias((-self.slopes[:, None, None] * distances).to(self.slopes.dtype))

    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that the encoding is built for; nothing depends on it."""
        self.grid = grid

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, num_heads={self.num_heads}"


def slopes(num_heads: int) -> list[float]:
    """Return m_h of every head, the steepest first for a power of two."""
    below = 2 ** math.floor(math.log2(num_heads))
    found = [2 ** (-8 * h / below) for h in range(1, below + 1)]
    return found + [2 ** (-4 * h / below) for h in range(1, 2 * (num_heads - below), 2)]
