"""Token mixing by an MLP over the tokens, or by weights that depend only on the displacement of two tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.position.grid import Grid
from graticule.position.places import Shape
from graticule.system.symbolic import is_statically_true


class TokenMlp(NamedTuple):
    r"""An MLP over the tokens, the same for every channel; it is not a matrix of weights.

    .. math:: y = V\, GELU(U x + u)

    The bias of y is `LayerPosition.spatial_bias`.

    Args:
        first: U, (T, N).
        first_bias: u, (T,).
        second: V, (N, T).
    """

    first: Tensor
    first_bias: Tensor
    second: Tensor

    @property
    def groups(self) -> int:
        """Return the number of groups of channels that are mixed differently."""
        return 1

    def part(self, shape: Shape, *cuts: slice) -> TokenMlp:
        """Return the MLP over the tokens of a part of a grid of `shape`, as if the others were zero."""
        first = self.first.unflatten(1, shape)[:, *cuts].flatten(1)
        return TokenMlp(first, self.first_bias, self.second.unflatten(0, shape)[cuts].flatten(0, -2))

    def mix(self, x: Tensor) -> Tensor:
        """Mix the tokens x: (B, N, C)."""
        hidden = F.gelu(self.first.to(x.dtype) @ x + self.first_bias[:, None].to(x.dtype))
        return self.second.to(x.dtype) @ hidden


class Displacements(NamedTuple):
    r"""Weights (groups, N, N) that depend only on the displacement of j from i, and on the normalizer of row i.

    .. math:: W_{g, ij} = t_g[p_j - p_i] \quad or \quad softmax_j(t_g[p_j - p_i])

    Args:
        table: t, (groups, 2H - 1, 2W - 1), over (dy, dx) from (1 - H, 1 - W) on; or with any number of axes.
        softmax: whether the weights are the softmax of the table over each row.
        weights: the weights themselves, (groups, N, N); None if tokens are mixed by `mix`.
    """

    table: Tensor
    softmax: bool
    weights: Tensor | None = None

    @property
    def groups(self) -> int:
        """Return the number of groups of channels that are mixed differently."""
        return len(self.table)

    @property
    def grid(self) -> Grid:
        return Grid(*((side + 1) // 2 for side in self.table.shape[1:]))

    def matrix(self) -> Tensor:
        """Compute the weights, (groups, N, N)."""
        # a token's row is the H x W slice of the table from (H - 1 - y, W - 1 - x): no index of pairs is needed
        if isinstance(self.grid.patches, torch.SymInt):  # such a slice would have a fixed size in an exported program
            index = self.grid.offset_index(self.table.device).T
            pairs = self.table.flatten(1).index_select(1, index.flatten()).unflatten(1, index.shape)
        else:
            axes = tuple(range(1, self.table.ndim))
            pairs = _slices(self.table, self.grid).flip(axes).flatten(len(axes) + 1).flatten(1, -2)
        return pairs.softmax(-1) if self.softmax else pairs

    def with_weights(self) -> Displacements:
        """Return the same with computed weights, by which tokens are then mixed."""
        return self._replace(weights=self.matrix())

    def part(self, grid: Grid) -> Displacements:
        """Return the weights among the tokens of any part of the grid that has the shape of `grid`.

        The displacements within the part are a slice of the table. So a softmax is over the tokens of the part: the
        others are removed before it, and rows sum to 1.
        """
        sides = zip(self.grid.shape, grid.shape, strict=True)
        cuts = [slice(longer - side, longer + side - 1) for longer, side in sides]
        return Displacements(self.table[:, *cuts], self.softmax).with_weights()

    def mix(self, x: Tensor) -> Tensor:
        r"""Mix the tokens x: (B, N, C) by a periodic table without a softmax, whose weights need not be computed.

        .. math:: y_i = \sum_j t[p_j - p_i] x_j = F^{-1}(F(k) \odot F(x)), \quad k[p] = t[-p]
        """
        if is_statically_true(x.numel() == 0):  # which MKL does not transform
            return x
        shape, axes = self.grid.shape, tuple(range(-len(self.grid.shape), 0))
        wide = torch.promote_types(x.dtype, torch.float32)
        kernel = self.table[:, *(slice(side) for side in shape)].flip(axes).to(wide)
        maps = x.mT.unflatten(1, (self.groups, x.shape[2] // self.groups)).unflatten(-1, shape).to(wide)
        frequencies = torch.fft.rfftn(maps, dim=axes) * torch.fft.rfftn(kernel, dim=axes)[:, None]
        return torch.fft.irfftn(frequencies, shape, axes).flatten(3).flatten(1, 2).mT.to(x.dtype)


def _slices(table: Tensor, grid: Grid) -> Tensor:
    """Return all slices of the shape of `grid` of tables (groups, 2H - 1, 2W - 1), (groups, H, W, H, W), a view."""
    for axis, side in enumerate(grid.shape, 1):
        table = table.unfold(axis, side, 1)
    return table
