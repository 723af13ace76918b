"""The attention of PVT: keys and values are on a coarser grid."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from graticule.checks import checked
from graticule.grid import Grid
from graticule.layer_position import LayerPosition


class SpatialReductionAttention(nn.Module):
    r"""Attention to the tokens of a coarser grid, which a convolution of stride R computes.

    .. math:: softmax(q k^T / \sqrt d) v, \quad k, v = W LN(conv_R(x))

    There are M = H * W / R^2 keys. With R = 1 keys and values come from all tokens, prefix tokens included. It accepts
    position information that acts on the tokens; a bias or a rotation would need the positions of the coarse keys.
    Names and the reduction's norm (eps is 1e-5, whatever the block's is) are those of PVT's code.

    Reference: Pyramid Vision Transformer (PVT, Wang et al., 2021), Eq. 2-4.

    Args:
        dim: D, a multiple of `num_heads`.
        num_heads: h.
        qkv_bias: whether the projections have a bias.
        attn_drop: dropout rate on the attention weights.
        proj_drop: dropout rate on the output.
        reduction: R.
    """

    @checked
    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        reduction: int = 1,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"`embed_dim` must be a multiple of `num_heads`, got {dim} with {num_heads} heads.")
        if reduction < 1:
            raise ValueError(f"`reduction` must be at least 1, got {reduction}.")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.attn_drop = attn_drop
        self.reduction = reduction
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.kv = nn.Linear(dim, dim * 2, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        if reduction > 1:
            self.sr = nn.Conv2d(dim, dim, reduction, reduction)
            self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, position: LayerPosition, grid: Grid) -> Tensor:
        """Mix the tokens x: (B, N, D) of `grid` into (B, N, D)."""
        q, k, v = self._project(x, grid)
        dropout = self.attn_drop if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        out: Tensor = self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))
        return out

    def seen_grids(self, grid: Grid) -> tuple[Grid, Grid]:
        """Return the grids of queries and of keys for tokens of `grid`."""
        if self.reduction == 1:
            return grid, grid
        return grid, Grid(grid.height // self.reduction, grid.width // self.reduction)

    def weights(self, x: Tensor, position: LayerPosition, grid: Grid) -> Tensor:
        """Compute the attention weights, which `forward` never stores, (B, h, N, M), rows summing to 1."""
        q, k, _ = self._project(x, grid)
        out: Tensor = (q * self.head_dim**-0.5 @ k.transpose(-2, -1)).softmax(-1)
        return out

    def _project(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        heads = (self.num_heads, self.head_dim)
        q = self.q(x).unflatten(-1, heads).transpose(1, 2)  # (B, h, N, d)
        if self.reduction > 1:
            if min(grid.shape) < self.reduction:
                raise ValueError(
                    f"`img_size` must give this stage at least {self.reduction} patches per side, which its attention "
                    f"reduces to one, got {grid.height} x {grid.width}."
                )
            x = self.norm(grid.from_map(self.sr(grid.to_map(x))))  # (B, M, D)
        k, v = self.kv(x).unflatten(-1, (2, *heads)).permute(2, 0, 3, 1, 4)  # (B, h, M, d)
        return q, k, v
