"""Relative encodings: a bias on the attention logits that depends on the offset of two patches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from graticule.checks import checked
from graticule.encodings.continuous import ContinuousBias
from graticule.grid import Grid, resize_map


class RelativeBias(nn.Module):
    r"""One learnable number a head for each of the (2H-1)(2W-1) offsets of two patches.

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
        # index_select and its backward pass are several times as fast here as indexing
        return table.T.index_select(1, index.flatten()).unflatten(1, index.shape)

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


#: A bias that depends on parameters and grid alone.
PatchBias = RelativeBias | ContinuousBias


class NormalizedBias(nn.Module):
    """LaPE for a relative bias: a LayerNorm of its own over the keys of every query.

    Its scale and shift have one entry for each key patch; at another grid they are resampled as maps.

    Reference: Position Embedding Needs an Independent Layer Normalization (Yu et al., 2022), appendix B.
    """

    resampled = True

    @checked
    def __init__(self, bias: PatchBias, eps: float = 1e-5) -> None:
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


class HeadNormalizedBias(nn.Module):
    """A variant of `NormalizedBias`: a LayerNorm over the heads of every pair of patches.

    The papers norm over the keys. Over the heads the norm is, as for a table w, over the channels of one place;
    its parameters, 2h, do not depend on the grid, and a bias stays a function of the displacement, which a norm over
    the keys of a query is not. What is the same for all heads is lost.
    """

    @checked
    def __init__(self, bias: PatchBias, eps: float = 1e-5) -> None:
        super().__init__()
        if bias.num_heads < 2:
            raise ValueError("`bias_norm` must be 'keys' where there is one head: its norm over the heads is constant.")
        self.bias = bias
        self.norm = nn.LayerNorm(bias.num_heads, eps)

    @property
    def grid(self) -> Grid:
        """The grid that the encoding is built for."""
        return self.bias.grid

    def forward(self, grid: Grid) -> Tensor:
        """Return the normalised bias for `grid`, (num_heads, N, N); prefix rows and columns are zero."""
        return grid.with_prefix_bias(self.norm(self.bias.patch_bias(grid).permute(1, 2, 0)).permute(2, 0, 1))

    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that the encoding is built for, for good."""
        self.bias.set_grid(grid)


class ShawBias(nn.Module):
    r"""Shaw's relative position on the keys, in two dimensions: what is added depends on the query's content.

    .. math:: b_{h, i, j} = \frac{q_{h, i} \cdot (u_{clip(y_j - y_i)} + v_{clip(x_j - x_i)})}{\sqrt d}, \quad
              clip(t) = \max(-K, \min(K, t))

    A table of 2K + 1 vectors of d an axis, which all heads of the layer share. Prefix tokens get no bias. Nothing
    is resampled at another grid: offsets beyond K count as K. But on a grid of fewer than K + 1 patches a side
    the vectors of the largest offsets are never trained, and a larger grid would meet them as they were drawn.

    Reference: Self-Attention with Relative Position Representations (Shaw et al., 2018), Eq. 4-5, on the keys
    alone, an axis each as in Attention Augmented Convolutional Networks (Bello et al., 2019), section 3.1. CPVT
    (Chu et al., 2023, section 5.3) takes K = 8 and does not say how it goes to two dimensions. Its Table 8
    counts 40,011 positional parameters with a learnable embedding (37,824): the other 2,187 = 3 * 27 * 27 are
    those of a bias table as Swin's, once for all layers (encoding 'learnable+shared_relative_bias'), and not of any
    form of Shaw's; the text says otherwise.

    Args:
        grid: the grid that the encoding is built for.
        num_heads: h.
        head_dim: d.
        clip: K, in patches.
    """

    @checked
    def __init__(self, grid: Grid, num_heads: int, head_dim: int, clip: int = 8) -> None:
        super().__init__()
        if clip < 1:
            raise ValueError(f"`shaw_clip` must be at least 1, got {clip}.")
        self.grid = grid
        self.num_heads, self.head_dim, self.clip = num_heads, head_dim, clip
        self.relative_position_y = nn.Parameter(torch.empty(2 * clip + 1, head_dim))
        self.relative_position_x = nn.Parameter(torch.empty(2 * clip + 1, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw both tables anew: a normal of std 0.02, cut at 2 (absolute)."""
        trunc_normal_(self.relative_position_y, std=0.02)
        trunc_normal_(self.relative_position_x, std=0.02)

    def forward(self, grid: Grid) -> Callable[[Tensor], Tensor]:
        """Return what makes the bias on `grid` from scaled queries, (B, h, N, d) -> (B, h, N, N)."""
        return partial(self.bias, grid=grid)

    def bias(self, queries: Tensor, grid: Grid, start: int = 0, stop: int | None = None) -> Tensor:
        """Make the bias, (B, h, n, M), from scaled queries, (B, h, n, d), of n tokens from `start` on.

        M keys: those of the tokens before `stop`, or of all N.
        """
        stop = grid.tokens if stop is None else stop
        if (queries.shape[-2], stop) != (grid.tokens, grid.tokens):
            return self._part(queries, grid, start, stop)
        patches = grid.split(queries)[1].unflatten(-2, grid.shape)  # (B, h, H, W, d)
        rows, columns = (
            table[_clipped_offsets(side, self.clip, table.device)].to(queries.dtype)  # (H, H, d) and (W, W, d)
            for side, table in zip(grid.shape, (self.relative_position_y, self.relative_position_x), strict=True)
        )
        by_row = torch.einsum("bhyxd,yjd->bhyxj", patches, rows)  # a key's row and column add up
        by_column = torch.einsum("bhyxd,xjd->bhyxj", patches, columns)
        bias = by_row[..., :, None] + by_column[..., None, :]  # (B, h, H, W, H, W)
        return grid.with_prefix_bias(bias.flatten(-2).flatten(2, 3))

    def _part(self, queries: Tensor, grid: Grid, start: int, stop: int) -> Tensor:
        """Make rows and columns of the bias, pair by pair: nothing is computed for the others."""
        place = grid.coordinates(queries.device)
        first, last = (max(token - grid.prefix, 0) for token in (start, start + queries.shape[-2]))
        offset = place[None, : max(stop - grid.prefix, 0)] - place[first:last, None]  # (n, M, 2), key - query
        offset = offset.clamp(-self.clip, self.clip) + self.clip
        own = queries[..., queries.shape[-2] - (last - first) :, :]
        bias = queries.new_zeros(())
        for axis, table in enumerate((self.relative_position_y, self.relative_position_x)):
            scores = own @ table.to(queries.dtype).T  # (B, h, n, 2K + 1)
            bias = bias + scores.gather(-1, offset[..., axis].expand(*scores.shape[:2], -1, -1))
        return F.pad(bias, (stop - bias.shape[-1], 0, queries.shape[-2] - bias.shape[-2], 0))

    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that the encoding is built for; no parameter depends on it."""
        self.grid = grid

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, clip={self.clip}"


def _clipped_offsets(side: int, clip: int, device: torch.device) -> Tensor:
    """Row of the table for query i and key j of an axis, clip(j - i) + K; (side, side), int64."""
    place = torch.arange(side, device=device)
    return (place[None, :] - place[:, None]).clamp(-clip, clip) + clip


def _offset_index(grid: Grid, device: torch.device | None = None) -> Tensor:
    """Row of the table for every pair of patches, (H * W, H * W), int64."""
    dy, dx = grid.offsets(device).unbind(-1)
    return (dy + grid.height - 1) * (2 * grid.width - 1) + dx + grid.width - 1
