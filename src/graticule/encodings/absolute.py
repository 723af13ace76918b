"""Absolute encodings: a table w of (N, D), one row for each token of a grid."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import get_args

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from graticule.checks import checked
from graticule.grid import Grid, Interpolation


class AbsoluteEncoding(nn.Module, ABC):
    """Makes the table w for a grid; how w reaches the layers is a joining's affair.

    The table of the grid that the encoding is built for is the parameter `pos_embed`, (1, N, D), under the
    name and in the shape that published checkpoints give it; a fixed one takes no gradient. Papers count it
    as parameters either way (LaPE, Table 7: 38K for a fixed table as for a learnable one).
    """

    learnable: bool
    #: Whether another grid's table is resampled from the one that is held, not computed.
    resampled: bool = False
    pos_embed: nn.Parameter

    @checked
    def __init__(self, grid: Grid, dim: int) -> None:
        super().__init__()
        self.grid = grid
        self.dim = dim

    def forward(self, grid: Grid) -> Tensor:
        """Return w for `grid`, (N, D)."""
        if grid == self.grid:
            return self.pos_embed[0]
        return self.at(grid)

    @abstractmethod
    def at(self, grid: Grid) -> Tensor:
        """Return w for a grid other than the one it was built for, (N, D)."""

    def set_grid(self, grid: Grid) -> None:
        """Make `grid` the one that the encoding is built for, for good."""
        with torch.no_grad():
            table = self(grid)[None].clone()
        self.pos_embed = nn.Parameter(table, requires_grad=self.pos_embed.requires_grad)
        self.grid = grid

    def extra_repr(self) -> str:
        return f"grid={self.grid.shape}, prefix={self.grid.prefix}, dim={self.dim}"


class Learnable(AbsoluteEncoding):
    """A free row for each token, prefix tokens included; drawn from a normal of `std` 0.02, cut at 2 (absolute).

    At another grid the rows of the patches are resampled, bicubically with antialias unless `interpolation` says
    otherwise, and the prefix rows kept.

    Reference: An Image Is Worth 16x16 Words (Dosovitskiy et al., 2021); DeiT (Touvron et al., 2021).
    """

    learnable = True
    resampled = True

    @checked
    def __init__(self, grid: Grid, dim: int, std: float = 0.02, interpolation: Interpolation = "bicubic") -> None:
        super().__init__(grid, dim)
        if interpolation not in get_args(Interpolation):
            raise ValueError(
                f"`interpolation` must be one of {', '.join(get_args(Interpolation))}, got {interpolation!r}."
            )
        self.std = std
        self.interpolation: Interpolation = interpolation
        self.pos_embed = nn.Parameter(torch.empty(1, grid.tokens, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table anew."""
        trunc_normal_(self.pos_embed, std=self.std)

    def at(self, grid: Grid) -> Tensor:
        """Return the table resampled for `grid`, (N, D); the gradient reaches the original rows."""
        return self.grid.resize(self.pos_embed[0], grid, self.interpolation)


class FixedEncoding(AbsoluteEncoding):
    """A table given by a formula: nothing is learned, and another grid is computed, not resampled."""

    learnable = False

    @checked
    def __init__(self, grid: Grid, dim: int, temperature: float = 10_000.0) -> None:
        super().__init__(grid, dim)
        self.temperature = temperature
        table = self.formula(grid)[None].to(torch.get_default_dtype())
        self.pos_embed = nn.Parameter(table, requires_grad=False)

    @abstractmethod
    def formula(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """Compute the table of `grid` in float64, (N, D)."""

    def at(self, grid: Grid) -> Tensor:
        """Return the formula at `grid`, (N, D), in the dtype and on the device of the module."""
        return self.formula(grid, self.pos_embed.device).to(self.pos_embed.dtype)


class Sinusoidal1d(FixedEncoding):
    r"""Sines and cosines of the place in the flattened sequence, prefix tokens included.

    .. math:: w_{p, 2k} = \sin(p\, T^{-2k / D}), \quad w_{p, 2k+1} = \cos(p\, T^{-2k / D})

    Token p = 0 is the class token. Computed in float64 and rounded once; LaPE's released code rounds the
    angle to float32 first, which differs by up to 1e-5 at p = 196. A checkpoint brings its own table.

    Reference: Attention Is All You Need (Vaswani et al., 2017), section 3.5.
    """

    @checked
    def __init__(self, grid: Grid, dim: int, temperature: float = 10_000.0) -> None:
        if dim % 2:
            raise ValueError(f"`dim` must be a multiple of 2 (a sine and a cosine a frequency), got {dim}.")
        super().__init__(grid, dim, temperature)

    def formula(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """Compute the table of `grid` in float64, (N, D)."""
        place = torch.arange(grid.tokens, device=device, dtype=torch.float64)
        return _waves(place, self.dim, self.temperature)


class Sinusoidal2d(FixedEncoding):
    r"""The first half of the channels encodes the column x, the second half the row y.

    .. math:: w_{(y, x)} = [s(x); s(y)], \quad s(t)_{2k} = \sin(t\, T^{-4k / D}),\ s(t)_{2k+1} = \cos(t\, T^{-4k / D})

    Rows of prefix tokens are zero. This is the order of LaPE's released code, sines and cosines in turns;
    timm's two-dimensional tables put all sines of an axis before its cosines, a known difference.

    Reference: Attention Is All You Need (Vaswani et al., 2017), applied to each axis.
    """

    @checked
    def __init__(self, grid: Grid, dim: int, temperature: float = 10_000.0) -> None:
        if dim % 4:
            raise ValueError(f"`dim` must be a multiple of 4 (a sine and a cosine on two axes), got {dim}.")
        super().__init__(grid, dim, temperature)

    def formula(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """Compute the table of `grid` in float64, (N, D)."""
        y, x = grid.coordinates(device).double().unbind(-1)
        half = [_waves(axis, self.dim // 2, self.temperature) for axis in (x, y)]
        return grid.with_prefix_rows(torch.cat(half, -1))


def _waves(place: Tensor, dim: int, temperature: float) -> Tensor:
    """Interleave sin and cos of place * temperature^(-2k / dim); (n,) -> (n, dim)."""
    rate = temperature ** (-torch.arange(0, dim, 2, device=place.device, dtype=place.dtype) / dim)
    angle = place[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
