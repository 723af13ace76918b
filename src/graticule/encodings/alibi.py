"""ALiBi: a penalty on the attention logits that grows with the distance, with one slope per head."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from graticule.encodings.forms.bias import BiasEncoding, squared_distance_factors
from graticule.position.bias import LowRank
from graticule.position.grid import Grid
from graticule.position.position import register_encoding

Distance = Literal["euclidean", "manhattan", "squared", "axes"]


@register_encoding("alibi")
class Alibi(BiasEncoding):
    r"""Subtracts one slope per head times the distance from the attention logits; nothing is learned.

    .. math:: b_{h, i, j} = -m_h |p_i - p_j|, \quad m_h = 2^{-8h / n}, \quad h = 1 \dots n

    for n heads, n a power of two. For another number of heads the slopes are those of the largest power of two below,
    then every second slope, from the first, of the power of two above, as in its code. The paper defines it in one
    dimension, for causal attention; in a text all distances but the squared one are |i - j|. Prefix tokens
    get no bias. It is computed for any grid.

    Distances in two dimensions, and likewise in any other number, in patches:

    - 'euclidean': of CROMA (Fuller et al., 2023), whose 2D-ALiBi has the same slopes.
    - 'manhattan': |dy| + |dx|, so that the bias is the sum of one for rows and one for columns.
    - 'squared': dy^2 + dx^2, as in an ablation of LookHere (Fuller et al., 2024), here with the slopes of ALiBi. On
      large grids it needs four more channels per head instead of a table (`LowRank`).
    - 'axes': |dy| in the first half of the heads, rounded up, and |dx| in the others; the slopes of each are those of
      half the heads. More axes have equal parts of the heads. This form is ours.

    Reference: Train Short, Test Long (ALiBi, Press et al., 2022), section 3.

    Args:
        grid: the grid that the encoding is built for; nothing depends on it.
        num_heads: h, at least one per axis for 'axes'.
        distance: 'euclidean', 'manhattan', 'squared' or 'axes'.
    """

    shared = True
    crops = True

    def __init__(self, grid: Grid, num_heads: int, distance: Distance = "euclidean") -> None:
        super().__init__()
        axes = len(grid.shape)
        if num_heads < (axes if distance == "axes" else 1):
            least = f"at least {axes} where `distance` is 'axes'" if distance == "axes" else "at least 1"
            raise ValueError(f"`num_heads` must be {least}, got {num_heads}.")
        self.grid = grid
        self.num_heads = num_heads
        self.distance = distance
        self.heads = [(num_heads + axis) // axes for axis in reversed(range(axes))]  # heads of each axis, for 'axes'
        each = [m for heads in (self.heads if distance == "axes" else [num_heads]) for m in slopes(heads)]
        self.register_buffer("slopes", torch.tensor(each), persistent=False)
        self.slopes: Tensor

    def forward(self, grid: Grid) -> Tensor:
        """Return the bias for `grid`, (num_heads, N, N), nowhere positive."""
        wide = torch.promote_types(self.slopes.dtype, torch.float32)
        offsets = grid.offsets(self.slopes.device).to(wide)
        slope = -self.slopes[:, None, None]
        if self.distance == "euclidean":
            bias = slope * offsets.norm(dim=-1)
        elif self.distance == "squared":
            bias = slope * offsets.square().sum(-1)
        elif self.distance == "manhattan":
            bias = slope * offsets.abs().sum(-1)
        else:
            each = zip(slope.split(self.heads), offsets.abs().unbind(-1), strict=True)
            bias = torch.cat([own * distance for own, distance in each])
        return grid.with_prefix_bias(bias.to(self.slopes.dtype))

    def low_rank(self, grid: Grid) -> LowRank | None:
        """Return the bias of squared distances in two factors of four channels."""
        return squared_distance_factors(grid, -self.slopes) if self.distance == "squared" else None

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, num_heads={self.num_heads}, distance={self.distance!r}"


def slopes(num_heads: int) -> list[float]:
    """Return m_h of every head, the steepest first for a power of two."""
    below = 2 ** math.floor(math.log2(num_heads))
    found = [2 ** (-8 * h / below) for h in range(1, below + 1)]
    return found + [2 ** (-4 * h / below) for h in range(1, 2 * (num_heads - below), 2)]
