"""iRPE's contextual encoding: a vector on the keys for every bucket of displacements."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from graticule.checks import checked
from graticule.encodings.base import register_encoding
from graticule.encodings.bias import BiasEncoding
from graticule.grid import Grid


@register_encoding("contextual_product")
class ContextualProduct(BiasEncoding):
    r"""Adds the product of the query with a learned vector per bucket of displacements (iRPE, contextual product).

    .. math:: b_{h, i, j} = \frac{q_{h, i} \cdot r_{h, g(y_i - y_j),\, g(x_i - x_j)}}{\sqrt d}, \quad
              g(t) = \begin{cases} [t] & |t| \le \alpha \\
                     sign(t) \min(\beta, [\alpha + \frac{\ln(|t| / \alpha)}{\ln(\gamma / \alpha)}
                     (\beta - \alpha)]) & |t| > \alpha \end{cases}

    with alpha, beta, gamma = ratio, 2 ratio, 8 ratio and the bucket cut to whole numbers: 49 of them at the ratio of
    1.9. Pairs with a prefix token have a bucket of their own, as in its code. All vectors start at zero; nothing is
    resampled at another grid.

    Reference: Rethinking and Improving Relative Position Encoding for Vision Transformer (iRPE, Wu et al., 2021),
    Eq. 11, 14, 18 and section 4; on the keys, shared by the heads unless said otherwise, as its code recommends.

    Args:
        grid: the grid that the encoding is built for.
        num_heads: h.
        head_dim: d.
        ratio: alpha.
        shared_heads: whether all heads have the same vectors.
    """

    @checked
    def __init__(
        self, grid: Grid, num_heads: int, head_dim: int, ratio: float = 1.9, shared_heads: bool = True
    ) -> None:
        super().__init__()
        if ratio <= 0:
            raise ValueError(f"`ratio` must be positive, got {ratio}.")
        self.grid = grid
        self.num_heads, self.head_dim, self.ratio = num_heads, head_dim, ratio
        self.side = 2 * int(2 * ratio) + 1
        buckets = self.side**2 + bool(grid.prefix)
        self.lookup_table_weight = nn.Parameter(torch.zeros(1 if shared_heads else num_heads, head_dim, buckets))
        self.register_buffer("index", self._buckets(grid), persistent=False)
        self.index: Tensor

    def forward(self, grid: Grid) -> Callable[[Tensor], Tensor]:
        """Return what makes the bias on `grid` from scaled queries, (B, h, N, d) -> (B, h, N, N)."""
        return partial(self.bias, grid=grid)

    def bias(self, queries: Tensor, grid: Grid, start: int = 0, stop: int | None = None) -> Tensor:
        """Make the bias, (B, h, n, M), from scaled queries, (B, h, n, d), of n tokens from `start` on.

        M keys: those of the tokens before `stop`, or of all N.
        """
        index = self.index if grid == self.grid else self._buckets(grid, self.index.device)
        index = index[start : start + queries.shape[-2], :stop]
        scores = queries @ self.lookup_table_weight.to(queries.dtype)  # (B, h, N, buckets)
        return scores.gather(-1, index.expand(*scores.shape[:2], -1, -1))

    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that the encoding is built for; no parameter depends on it."""
        self.index = self._buckets(grid, self.index.device)
        self.grid = grid

    def _buckets(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """Bucket of every pair of tokens, (N, N), int64."""
        dy, dx = (self._bucket(t) for t in grid.offsets(device).unbind(-1))
        patches = dy * self.side + dx
        if not grid.prefix:
            return patches
        index = patches.new_full((grid.tokens, grid.tokens), self.side**2)
        index[grid.prefix :, grid.prefix :] = patches
        return index

    def _bucket(self, offset: Tensor) -> Tensor:
        alpha, beta, gamma = self.ratio, 2 * self.ratio, 8 * self.ratio
        t = offset.double()
        far = alpha + torch.log(t.abs().clamp(min=alpha) / alpha) / math.log(gamma / alpha) * (beta - alpha)
        found = torch.where(t.abs() <= alpha, t.round(), t.sign() * far.round().clamp(max=beta))
        return found.long() + int(beta)  # towards zero, then from 0 on

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, ratio={self.ratio}"
