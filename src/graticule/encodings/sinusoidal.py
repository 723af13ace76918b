"""Sinusoidal tables, in one and in two dimensions: nothing is learned."""

from __future__ import annotations

import torch
from torch import Tensor

from graticule.encodings.forms.absolute import FixedEncoding
from graticule.position.grid import Grid
from graticule.position.position import register_encoding


@register_encoding("sinusoidal_1d")
class Sinusoidal1d(FixedEncoding):
    r"""Encodes the index in the flattened sequence by sines and cosines, prefix tokens included.

    .. math:: w_{p, 2k} = \sin(p\, T^{-2k / D}), \quad w_{p, 2k+1} = \cos(p\, T^{-2k / D})

    Token p = 0 is the class token. The table is computed in float64 and rounded once; LaPE's released code rounds the
    angle to float32 first, which differs by up to 1e-5 at p = 196. A checkpoint contains its own table.

    Reference: Attention Is All You Need (Vaswani et al., 2017), section 3.5.

    Args:
        temperature: T; waves are 2 pi to 2 pi T tokens long.
        spread: standard deviation of the rows around their mean; None for that of the formula.
    """

    crops = True
    exempt = ("permutation: rows are of the order of patches",)

    def __init__(self, grid: Grid, dim: int, temperature: float = 10_000.0, spread: float | None = None) -> None:
        if dim % 2:
            raise ValueError(f"`dim` must be a multiple of 2 (a sine and a cosine per frequency), got {dim}.")
        super().__init__(grid, dim, temperature, spread)

    def formula(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        prefix = torch.arange(grid.prefix, device=device)
        place = torch.cat([prefix, grid.prefix + grid.order(device)]).double()
        return _waves(place, self.dim, self.temperature)


@register_encoding("sinusoidal_2d")
class Sinusoidal2d(FixedEncoding):
    r"""Encodes the column x in the first half of the channels, the row y in the second, by sines and cosines.

    .. math:: w_{(y, x)} = [s(x); s(y)], \quad s(t)_{2k} = \sin(t\, T^{-4k / D}),\ s(t)_{2k+1} = \cos(t\, T^{-4k / D})

    On other numbers of axes each has an equal part of the channels, the last axis the first. Rows of prefix tokens are
    zero. This is the order of LaPE's released code, with interleaved sines and cosines;
    timm's two-dimensional tables put all sines of an axis before its cosines, a known difference.

    Reference: Attention Is All You Need (Vaswani et al., 2017), applied to each axis.

    Args:
        temperature: T; waves are 2 pi to 2 pi T patches long.
        spread: standard deviation of the rows around their mean; None for that of the formula.
    """

    crops = True
    exempt = ("one_frame, permutation: channels are divided among the axes",)

    def __init__(self, grid: Grid, dim: int, temperature: float = 10_000.0, spread: float | None = None) -> None:
        if dim % (step := 2 * len(grid.shape)):
            axes = "two" if step == 4 else step // 2
            raise ValueError(f"`dim` must be a multiple of {step} (a sine and a cosine on {axes} axes), got {dim}.")
        super().__init__(grid, dim, temperature, spread)

    def formula(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        axes = grid.coordinates(device).double().unbind(-1)
        parts = [_waves(axis, self.dim // len(axes), self.temperature) for axis in axes[::-1]]
        return grid.with_prefix_rows(torch.cat(parts, -1))


def _waves(place: Tensor, dim: int, temperature: float) -> Tensor:
    """Interleave sin and cos of place * temperature^(-2k / dim); (n,) -> (n, dim)."""
    rate = temperature ** (-torch.arange(0, dim, 2, device=place.device, dtype=place.dtype) / dim)
    angle = place[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
