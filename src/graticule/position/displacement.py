"""Token mixing by displacement: the product with a matrix of all pairs of tokens, computed as a convolution."""

from __future__ import annotations

from typing import Any, NamedTuple

import scipy
import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.position.grid import Grid
from graticule.position.places import Shape, by
from graticule.system.symbolic import without_autocast


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


#: Number of tokens from which the convolution is as fast as the matrix, and on a GPU (`benchmarks/gpu.py`).
LARGE, LARGE_ON_GPU = 1024, 9216

#: Maximum size of an intermediate result, in numbers, so that it fits the cache; more work is done in pieces.
_WORKSPACE = 1 << 20


class Displacements(NamedTuple):
    r"""Weights (groups, N, N) that depend only on the displacement of j from i, and on the normalizer of row i.

    .. math:: W_{g, ij} = t_g[p_j - p_i] \quad or \quad softmax_j(t_g[p_j - p_i])

    Args:
        table: t, (groups, 2H - 1, 2W - 1), over (dy, dx) from (1 - H, 1 - W) on; or with any number of axes.
        softmax: whether the weights are the softmax of the table over each row.
        weights: the weights themselves, (groups, N, N), if tokens are mixed by a matrix product; None if by `mix`.
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
        """The grid of the tokens."""
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
        part = Displacements(self.table[:, *cuts], self.softmax)
        return part if self.weights is None else part.with_weights()

    def mix(self, x: Tensor) -> Tensor:
        r"""Return the product of the weights with x: (B, N, C), without computing the weights.

        .. math:: y_i = \sum_j t[p_j - p_i] x_j

        is a convolution with a kernel of all displacements, computed by Fourier transform: O(C N log N) time and O(C N)
        memory instead of O(C N^2) and O(groups N^2). It is exact, not truncated: the transform is computed in float64
        whatever the dtype of x. There is a backward pass, but no double backward.

        Raises:
            ValueError: if x does not fit the table, or the weights are a softmax.
        """
        groups = len(self.table)
        if self.softmax:
            raise ValueError("`softmax` must be False for the product without weights, got True.")
        if x.ndim != 3 or x.shape[1] != self.grid.patches or x.shape[2] % groups:
            raise ValueError(
                f"`x` must be (B, {self.grid.patches}, C), C a multiple of {groups}, for a table of {groups} groups on "
                f"{by(self.grid.shape)} tokens, got {tuple(x.shape)}."
            )
        wide = torch.promote_types(x.dtype, torch.float32)
        mixed: Tensor = _mix(x.to(wide), self.table.to(wide))
        return mixed.to(x.dtype)


# One operator forward and one backward, which keeps no transforms for it and is opaque to the compiler.


@torch.library.custom_op("graticule::mix_by_displacement", mutates_args=())
def _mix(x: Tensor, table: Tensor) -> Tensor:
    with without_autocast(x):
        grid, maps = _to_maps(x, table)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        _, mixed = _to_maps(y, table)
        sides, axes, middle = _transform(grid)
        spectrum = torch.fft.rfftn(table.double().flip(axes), sides, axes)[:, None]
        for piece in _pieces(maps):
            tokens = torch.fft.rfftn(maps[piece].double(), sides, axes).mul_(spectrum)
            mixed[piece] = torch.fft.irfftn(tokens, sides, axes)[middle]
    return y


@_mix.register_fake
def _(x: Tensor, table: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("graticule::mix_by_displacement_backward", mutates_args=())
def _mix_backward(grad: Tensor, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    with without_autocast(x):
        grid, maps = _to_maps(x, table)
        _, gradients = _to_maps(grad, table)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        _, grad_maps = _to_maps(grad_x, table)
        sides, axes, middle = _transform(grid)
        spectrum = torch.fft.rfftn(table.double(), sides, axes)[:, None]
        products = torch.zeros_like(spectrum[:, 0])
        for piece in _pieces(maps):
            tokens, of_grad = (torch.fft.rfftn(part[piece].double(), sides, axes) for part in (maps, gradients))
            # not the lazy conj(), which is lost within a compiled graph
            products += torch.conj_physical(of_grad).mul_(tokens).sum((0, 2))
            grad_maps[piece] = torch.fft.irfftn(of_grad.mul_(spectrum), sides, axes)[middle]
        # sum_i of gradient_i times token_{i + displacement}, for all displacements
        sums = torch.fft.irfftn(products, sides, axes).roll([side - 1 for side in grid.shape], axes)
    return grad_x, sums[:, *(slice(side) for side in grid.table)].contiguous().to(table.dtype)


@_mix_backward.register_fake
def _(grad: Tensor, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(table)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_mix.register_autograd(lambda ctx, grad: _mix_backward(grad, *ctx.saved_tensors), setup_context=_save)


def _to_maps(x: Tensor, table: Tensor) -> tuple[Grid, Tensor]:
    """Return the grid, and tokens (B, N, C) as maps, (B, groups, C / groups, H, W), a view."""
    grid = Displacements(table, False).grid
    return grid, x.transpose(1, 2).view(len(x), len(table), x.shape[2] // len(table), *grid.shape)


def _transform(grid: Grid) -> tuple[Shape, Shape, tuple[Any, ...]]:
    """Return the sides and the axes of the transform, and the slices of its middle part, H x W, which is the result.

    A side of 2H - 1 is enough, since only entries outside of that part wrap around.
    """
    sides = tuple(scipy.fft.next_fast_len(side, real=True) for side in grid.table)
    return sides, tuple(range(-len(sides), 0)), (..., *(slice(side - 1, 2 * side - 1) for side in grid.shape))


def _pieces(x: Tensor) -> list[tuple[slice, slice, slice]]:
    """Cut x: (B, groups, c, H, W) over samples and channels into pieces that fit the workspace after padding."""
    if not x.numel():
        return []
    count = max(_WORKSPACE // max(4 * x[0, :, 0].numel(), 1), 1)  # maps of every group
    channels = min(count, x.shape[2])
    samples = max(count // channels, 1)
    return [
        (slice(b, b + samples), slice(None), slice(c, c + channels))
        for b in range(0, x.shape[0], samples)
        for c in range(0, x.shape[2], channels)
    ]


def _slices(table: Tensor, grid: Grid) -> Tensor:
    """Return all slices of the shape of `grid` of tables (groups, 2H - 1, 2W - 1), (groups, H, W, H, W), a view."""
    for axis, side in enumerate(grid.shape, 1):
        table = table.unfold(axis, side, 1)
    return table
