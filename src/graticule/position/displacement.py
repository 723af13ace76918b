"""Token mixing by displacement: the product with a matrix of all pairs of tokens, computed as a convolution."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from scipy.fft import next_fast_len
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


#: A row whose normalizer is less than this share of the kernel's norm is computed pair by pair: the rounding errors of
#: the transform, about 1e-16 of that norm and of the norm of a channel, would be visible in it.
_SAFE = 1e-4

#: Number of tokens from which the convolution is faster than the matrix (`benchmarks/layers.py`).
LARGE = 1024

#: Maximum size of an intermediate result, in numbers, so that it fits the cache; more work is done in parts.
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
            index = displacement_index(self.grid).to(self.table.device)
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
        each = zip(self.grid.shape, grid.shape, strict=True)
        cuts = [slice(whole - side, whole + side - 1) for whole, side in each]
        part = Displacements(self.table[:, *cuts], self.softmax)
        return part if self.weights is None else part.with_weights()

    def mix(self, x: Tensor) -> Tensor:
        r"""Return the product of the weights with x: (B, N, C), without computing the weights.

        .. math:: y_i = \frac{\sum_j K[p_j - p_i] x_j}{\sum_j K[p_j - p_i]}, \quad K = e^{t - \max t}

        (or the numerator alone, with K = t) are convolutions with a kernel of all displacements, computed
        by Fourier transform: O(C N log N) time and O(C N) memory instead of O(C N^2) and O(groups N^2). The convolution
        is exact, not truncated. Its rounding error is the same for all rows, whatever their values: about 1e-15
        times the norm of the kernel, over the row's normalizer, and the norm of a channel of x, since the transform is
        computed in float64 whatever the dtype of x. So tokens of very different norms do not disturb each other in
        float32, and a gradient that vanishes, as that of a saturated softmax, is zero up to 1e-15 of its terms.

        Rows for which this is not exact enough, since K almost vanishes on all their displacements, are computed pair
        by pair, a few at a time; if there are so many of them that this is faster, all rows are. If a number of a
        channel of a sample is infinite or NaN, all tokens of that channel become NaN. There is a backward pass, but no
        double backward.

        Raises:
            ValueError: if x does not fit the table.
        """
        groups = len(self.table)
        if x.ndim != 3 or x.shape[1] != self.grid.patches or x.shape[2] % groups:
            raise ValueError(
                f"`x` must be (B, {self.grid.patches}, C), C a multiple of {groups}, for a table of {groups} groups on "
                f"{by(self.grid.shape)} tokens, got {tuple(x.shape)}."
            )
        wide = torch.promote_types(x.dtype, torch.float32)
        mixed: Tensor = _mix(x.to(wide), self.table.to(wide), self.softmax)
        return mixed.to(x.dtype)


def displacement_index(grid: Grid, rows: Tensor | None = None) -> Tensor:
    """Return the index of p_j - p_i in a flattened table, for every j and the tokens i in `rows` (all by default).

    (rows, N), int64.
    """
    index, middle = grid.table_rows(None if rows is None else rows.device)
    start = (index if rows is None else index[rows]) - middle
    return index[None] - start[:, None]


# One operator forward and one backward, opaque to the compiler: which rows are unsafe depends on the data.


@torch.library.custom_op("graticule::mix_by_displacement", mutates_args=())
def _mix(x: Tensor, table: Tensor, softmax: bool) -> Tensor:
    with without_autocast(x):
        grid, maps = _laid_out(x, table)
        kernel, inverse, unsafe = _kernel(table, grid, softmax)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        _, mixed = _laid_out(y, table)
        if unsafe is None or not unsafe.all():
            sides, axes, middle = _transform(grid)
            spectrum = torch.fft.rfftn(kernel.flip(axes), sides, axes)[:, None]
            for piece in _pieces(maps):
                whole = torch.fft.rfftn(maps[piece].double(), sides, axes).mul_(spectrum)
                mixed[piece] = torch.fft.irfftn(whole, sides, axes)[middle] * inverse
        for group, rows in _parts(unsafe, grid):
            weights = _rows(table[group], rows, grid).softmax(-1)  # (rows, N)
            _channels(y, group, len(table))[:, rows] = weights @ _channels(x, group, len(table))
    return y


@_mix.register_fake
def _(x: Tensor, table: Tensor, softmax: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("graticule::mix_by_displacement_backward", mutates_args=())
def _mix_backward(grad: Tensor, x: Tensor, table: Tensor, softmax: bool) -> tuple[Tensor, Tensor]:
    with without_autocast(x):
        grid, maps = _laid_out(x, table)
        kernel, inverse, unsafe = _kernel(table, grid, softmax)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_table = torch.zeros_like(kernel)
        if unsafe is None or not unsafe.all():
            _, given = _laid_out(grad, table)
            _, taken = _laid_out(grad_x, table)
            sides, axes, middle = _transform(grid)
            spectrum = torch.fft.rfftn(kernel.flip(axes), sides, axes)[:, None]
            backward = torch.fft.rfftn(kernel, sides, axes)[:, None]
            products = torch.zeros_like(spectrum[:, 0])
            shift = kernel.new_zeros(len(kernel), *grid.shape)  # (groups, H, W)
            for piece in _pieces(maps):
                out = given[piece] * inverse
                tokens, gradients = (torch.fft.rfftn(part.double(), sides, axes) for part in (maps[piece], out))
                # not the lazy conj(), which is lost within a compiled graph
                products += torch.conj_physical(gradients).mul_(tokens).sum((0, 2))
                taken[piece] = torch.fft.irfftn(gradients.mul_(backward), sides, axes)[middle]
                if softmax:
                    # y = numerator * inverse, and d inverse / d K = -inverse^2: the gradient of every K in the row's
                    # sum. y is computed again, because rounded to float32 it would not cancel exactly
                    y = torch.fft.irfftn(tokens.mul_(spectrum), sides, axes)[middle] * inverse
                    shift -= (out * y).sum((0, 2))
            if softmax:
                ones = torch.fft.rfftn(torch.ones_like(shift), sides, axes)
                products += torch.conj_physical(torch.fft.rfftn(shift, sides, axes)).mul_(ones)
            # sum_i of given_i times tokens_{i + displacement}, for all displacements
            every = torch.fft.irfftn(products, sides, axes).roll([side - 1 for side in grid.shape], axes)
            grad_table += every[:, *(slice(side) for side in grid.table)]
            grad_table *= kernel if softmax else 1
        else:
            grad_x.zero_()
        for group, rows in _parts(unsafe, grid):
            weights = _rows(table[group], rows, grid).softmax(-1)  # (rows, N)
            given, taken = _channels(grad, group, len(table))[:, rows], _channels(x, group, len(table))
            _channels(grad_x, group, len(table)).add_(weights.T @ given)
            pairs = torch.einsum("bic,bjc->ij", given, taken)
            pairs = weights * (pairs - (weights * pairs).sum(-1, keepdim=True))
            index = displacement_index(grid, rows).flatten()
            grad_table[group].view(-1).index_add_(0, index, pairs.flatten().double())
    return grad_x, grad_table.to(table.dtype)


@_mix_backward.register_fake
def _(grad: Tensor, x: Tensor, table: Tensor, softmax: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(table)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    x, table, ctx.softmax = inputs
    ctx.save_for_backward(x, table)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_mix_backward(grad, *ctx.saved_tensors, ctx.softmax), None


_mix.register_autograd(_backward, setup_context=_save)


def _laid_out(x: Tensor, table: Tensor) -> tuple[Grid, Tensor]:
    """Return the grid, and tokens (B, N, C) as maps, (B, groups, C / groups, H, W), a view."""
    grid = Displacements(table, False).grid
    return grid, x.transpose(1, 2).view(len(x), len(table), x.shape[2] // len(table), *grid.shape)


def _channels(x: Tensor, group: int, groups: int) -> Tensor:
    """Return the channels of a group, a view of x: (B, N, C)."""
    return x.view(*x.shape[:-1], groups, x.shape[-1] // groups)[..., group, :]


def _kernel(table: Tensor, grid: Grid, softmax: bool) -> tuple[Tensor, Tensor | int, Tensor | None]:
    """Return K, (groups, 2H - 1, 2W - 1), 1 / sum_j K, (groups, 1, H, W), and a mask of unsafe rows, (groups, H, W).

    In float64. The inverse is 0 where a row is unsafe; without a softmax it is 1, and no row is unsafe.
    """
    table = table.double()
    if not softmax:
        return table, 1, None
    axes = tuple(range(1, table.ndim))
    kernel = (table - table.amax(axes, keepdim=True)).exp()
    # row i reaches H x W of the displacements; sums of positive numbers lose no precision
    reach = kernel
    for axis, side in zip(axes, grid.shape, strict=True):
        reach = reach.unfold(axis, side, 1).sum(-1)
    reach = reach.flip(axes)
    unsafe = reach < _SAFE * kernel.square().sum(axes, keepdim=True).sqrt()
    # with so many unsafe rows, the transform, LARGE / N of the time of all rows, would take longer than the other rows
    if unsafe.double().mean() > max(1 - LARGE / grid.patches, 0.5):
        unsafe = torch.ones_like(unsafe)
    return kernel, torch.where(unsafe, 0, 1 / reach)[:, None], unsafe


def _transform(grid: Grid) -> tuple[Shape, Shape, tuple[Any, ...]]:
    """Return the sides and the axes of the transform, and the slices of its middle part, H x W, which is the result.

    A side of 2H - 1 is enough, since only entries outside of that part wrap around.
    """
    sides = tuple(next_fast_len(side, real=True) for side in grid.table)
    return sides, tuple(range(-len(sides), 0)), (..., *(slice(side - 1, 2 * side - 1) for side in grid.shape))


def _pieces(x: Tensor) -> list[tuple[slice, slice, slice]]:
    """Cut x: (B, groups, c, H, W) over samples and channels into pieces that fit the workspace after padding."""
    if not x.numel():
        return []
    few = max(_WORKSPACE // max(4 * x[0, :, 0].numel(), 1), 1)  # maps of every group
    channels = min(few, x.shape[2])
    samples = max(few // max(channels, 1), 1)
    return [
        (slice(b, b + samples), slice(None), slice(c, c + channels))
        for b in range(0, x.shape[0], samples)
        for c in range(0, x.shape[2], max(channels, 1))
    ]


def _parts(unsafe: Tensor | None, grid: Grid) -> list[tuple[int, Tensor]]:
    """Split the unsafe rows into parts, a group and some of its rows each, whose pairs fit the workspace."""
    if unsafe is None or not unsafe.any():
        return []
    few = max(_WORKSPACE // grid.patches, 1)
    rows = [group.nonzero()[:, 0] for group in unsafe.flatten(1)]
    return [(group, part) for group, found in enumerate(rows) if len(found) for part in found.split(few)]


def _rows(table: Tensor, rows: Tensor, grid: Grid) -> Tensor:
    """Return the logits of some tokens to all tokens, (rows, N), from the table of a group."""
    each = zip(grid.shape, torch.unravel_index(rows, grid.shape), strict=True)
    return _slices(table[None], grid)[0][tuple(side - 1 - place for side, place in each)].flatten(1)


def _slices(table: Tensor, grid: Grid) -> Tensor:
    """Return all slices of the shape of `grid` of tables (groups, 2H - 1, 2W - 1), (groups, H, W, H, W), a view."""
    for axis, side in enumerate(grid.shape, 1):
        table = table.unfold(axis, side, 1)
    return table
