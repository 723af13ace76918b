"""Swin's relative bias: a learnable table over the offsets of two patches."""

from __future__ import annotations

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from graticule.checks import checked
from graticule.encodings.base import register_encoding
from graticule.encodings.bias import PatchBias
from graticule.grid import Grid, resize_map


@register_encoding("relative_bias")
class RelativeBias(PatchBias):
    r"""Adds one learned number per head and offset of two patches, (2H-1)(2W-1) of them, to the logits.

    .. math:: b_{h, i, j} = T_h[p_i - p_j]

    Prefix tokens get no bias, neither as queries nor as keys. At another grid the table is resampled
    bicubically over the offsets.

    Reference: Swin Transformer (Liu et al., 2021), Eq. 4; in a ViT as in LaPE's released code (2D_RPE).
    """

    resampled = True

    @checked
    def __init__(self, grid: Grid, num_heads: int) -> None:
        super().__init__()
        self.grid = grid
        self.num_heads = num_heads
        rows = (2 * grid.height - 1) * (2 * grid.width - 1)
        self.relative_position_bias_table = nn.Parameter(torch.empty(rows, num_heads))
        self.register_buffer("index", grid.offset_index(), persistent=False)
        self.index: Tensor
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table anew, as Swin does: a normal of std 0.02, cut at 2 (absolute)."""
        trunc_normal_(self.relative_position_bias_table, std=0.02)

    def patch_bias(self, grid: Grid) -> Tensor:
        """Return the bias between the patches of `grid` alone, (num_heads, H * W, H * W)."""
        if grid.shape == self.grid.shape:
            table, index = self.relative_position_bias_table.view(-1, self.num_heads), self.index
        else:
            table, index = self._table_at(grid), grid.offset_index(self.index.device)
        # index_select and its backward pass are several times as fast here as indexing
        return table.T.index_select(1, index.flatten()).unflatten(1, index.shape)

    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that the encoding is built for, for good."""
        learned = self.relative_position_bias_table.requires_grad
        table = self._table_at(grid).detach().clone()
        self.relative_position_bias_table = nn.Parameter(table, requires_grad=learned)
        self.index = grid.offset_index(self.index.device)
        self.grid = grid

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Resample a table of another grid or window, ((2H'-1)(2W'-1), heads), for this one."""
        if not name.endswith("relative_position_bias_table") or value.ndim != 2 or value.shape[1] != self.num_heads:
            return value
        height, width = self.grid.shape
        displacements = Grid(2 * height - 1, 2 * width - 1, sequence=self.grid.sequence)
        old = displacements.alike(value.shape[0], shape and (2 * shape[0] - 1, 2 * shape[1] - 1))
        if old is None or old.shape == displacements.shape or not (old.height % 2 and old.width % 2):
            return value
        return resize_map(value.T.unflatten(1, old.shape), displacements.shape).flatten(1).T

    def _table_at(self, grid: Grid) -> Tensor:
        old, new = ((2 * g.height - 1, 2 * g.width - 1) for g in (self.grid, grid))
        return resize_map(self.relative_position_bias_table.T.unflatten(-1, old), new).flatten(1).T

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, num_heads={self.num_heads}"


@register_encoding("shared_relative_bias")
class SharedRelativeBias(RelativeBias):
    """Shares one table of `relative_bias` among all layers, as CPVT's Table 8 counts: 37,824 + 3 * 27 * 27 = 40,011."""

    joined = None
    shared = True
