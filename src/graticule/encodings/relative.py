"""Relative encodings: a bias on the attention logits that depends on the offset of two patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from graticule.grid import Grid, resize_map


class RelativeBias(nn.Module):
    r"""One learnable number a head for each of the (2H-1)(2W-1) offsets of two patches.

    .. math:: b_{h, i, j} = T_h[p_i - p_j]

    Prefix tokens get no bias, neither as queries nor as keys. At another grid the table is resampled
    bicubically over the offsets.

    Reference: Swin Transformer (Liu et al., 2021), Eq. 4; in a ViT as in LaPE's released code (2D_RPE).
    """

    def __init__(self, grid: Grid, num_heads: int) -> None:
        super().__init__()
        self.grid = grid
        self.num_heads = num_heads
        rows = (2 * grid.height - 1) * (2 * grid.width - 1)
        self.relative_position_bias_table = nn.Parameter(torch.empty(rows, num_heads))
        self.register_buffer("index", _offset_index(grid), persistent=False)
        self.index: Tensor
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table anew, as Swin does: a normal of std 0.02, cut at 2 (absolute)."""
        trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, grid: Grid) -> Tensor:
        """Return the bias for `grid`, (num_heads, N, N)."""
        return grid.with_prefix_bias(self.patch_bias(grid))

    def patch_bias(self, grid: Grid) -> Tensor:
        """Return the bias between the patches of `grid` alone, (num_heads, H * W, H * W)."""
        if grid.shape == self.grid.shape:
            table, index = self.relative_position_bias_table.view(-1, self.num_heads), self.index
        else:
            table, index = self._table_at(grid), _offset_index(grid, self.index.device)
        return table[index].permute(2, 0, 1)

    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that the encoding is built for, for good."""
        learned = self.relative_position_bias_table.requires_grad
        table = self._table_at(grid).detach().clone()
        self.relative_position_bias_table = nn.Parameter(table, requires_grad=learned)
        self.index = _offset_index(grid, self.index.device)
        self.grid = grid

    def _table_at(self, grid: Grid) -> Tensor:
        old, new = ((2 * g.height - 1, 2 * g.width - 1) for g in (self.grid, grid))
        return resize_map(self.relative_position_bias_table.T.unflatten(-1, old), new).flatten(1).T

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, num_heads={self.num_heads}"


class NormalizedBias(nn.Module):
    """LaPE for a relative bias: a LayerNorm of its own over the keys of every query.

    Its scale and shift have one entry for each key patch; at another grid they are resampled as maps.

    Reference: Position Embedding Needs an Independent Layer Normalization (Yu et al., 2022), appendix B.
    """

    def __init__(self, bias: RelativeBias, eps: float = 1e-5) -> None:
        super().__init__()
        self.bias = bias
        self.norm = nn.LayerNorm(bias.grid.patches, eps)

    @property
    def grid(self) -> Grid:
        """The grid that the encoding is built for."""
        return self.bias.grid

    def forward(self, grid: Grid) -> Tensor:
        """Return the normalised bias for `grid`, (num_heads, N, N); prefix rows and columns are zero."""
        weight, shift = (self._map_at(p, grid) for p in (self.norm.weight, self.norm.bias))
        bias = F.layer_norm(self.bias.patch_bias(grid), (grid.patches,), weight, shift, self.norm.eps)
        return grid.with_prefix_bias(bias)

    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that the encoding is built for, for good."""
        norm = nn.LayerNorm(grid.patches, self.norm.eps).to(self.norm.weight)
        with torch.no_grad():
            norm.weight.copy_(self._map_at(self.norm.weight, grid))
            norm.bias.copy_(self._map_at(self.norm.bias, grid))
        norm.weight.requires_grad_(self.norm.weight.requires_grad)
        norm.bias.requires_grad_(self.norm.bias.requires_grad)
        self.norm = norm
        self.bias.set_grid(grid)

    def _map_at(self, values: Tensor, grid: Grid) -> Tensor:
        if grid.shape == self.grid.shape:
            return values
        return resize_map(values.view(1, *self.grid.shape), grid.shape).flatten()


def _offset_index(grid: Grid, device: torch.device | None = None) -> Tensor:
    """Row of the table for every pair of patches, (H * W, H * W), int64."""
    dy, dx = grid.offsets(device).unbind(-1)
    return (dy + grid.height - 1) * (2 * grid.width - 1) + dx + grid.width - 1
