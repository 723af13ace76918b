"""Sinusoidal tables, in one and in two dimensions: nothing is learned."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from graticule.encodings.forms.absolute import FixedEncoding
from graticule.position.grid import Grid
from graticule.position.position import register_encoding
from graticule.registry.fields import Channels, Positive

#: Order of the channels of `sinusoidal_2d`, by the code that has it.
Order = Literal["lape", "mae", "detr", "moco_v3", "timm"]


@register_encoding("sinusoidal_1d")
class Sinusoidal1d(FixedEncoding):
    r"""Encodes the index in the flattened sequence by sines and cosines, prefix tokens included.

    .. math:: w_{p, 2k} = \sin(p\, T^{-2k / D}), \quad w_{p, 2k+1} = \cos(p\, T^{-2k / D})

    Token p = 0 is the class token. The table is computed in float64 and rounded once; LaPE's released code rounds the
    angle to float32 first, which differs by up to 1e-5 at p = 196. The code of T2T-ViT resamples the table for another
    size: `learnable` does so with the table of a file.

    Reference: Attention Is All You Need (Vaswani et al., 2017), section 3.5.

    Args:
        temperature: T; waves are 2 pi to 2 pi T tokens long.
        spread: standard deviation of the rows around their mean; None for the formula's.
    """

    crops = True
    exempt = ("permutation: rows are of the order of patches",)

    def __init__(
        self, grid: Grid, dim: Channels, temperature: Positive = 10_000.0, spread: float | None = None
    ) -> None:
        if dim % 2:
            raise ValueError(f"`dim` must be a multiple of 2 (a sine and a cosine per frequency), got {dim}.")
        super().__init__(grid, dim, temperature, spread)

    def formula(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        prefix = torch.arange(grid.prefix, device=device)
        place = torch.cat([prefix, grid.prefix + grid.order(device)]).double()
        return _waves(place, self.dim, self.temperature).flatten(1)


@register_encoding("sinusoidal_2d")
class Sinusoidal2d(FixedEncoding):
    r"""Encodes the column x in the first half of the channels, the row y in the second, by sines and cosines.

    .. math:: w_{(y, x)} = [s(x); s(y)], \quad s(t)_{2k} = \sin(t\, T^{-4k / D}),\ s(t)_{2k+1} = \cos(t\, T^{-4k / D})

    On other numbers of axes each has an equal part of the channels, the last axis the first. Rows of prefix tokens are
    zero. Released codes differ in the `order` of the channels, which weights depend on.

    Reference: Attention Is All You Need (Vaswani et al., 2017), applied to each axis.

    Args:
        temperature: T; waves are 2 pi to 2 pi T patches long.
        spread: standard deviation of the rows around their mean; None for the formula's.
        order: 'lape', columns first, sines and cosines interleaved; 'mae', columns first, of each axis the sines, then
            the cosines; 'detr' and 'moco_v3', the same two with rows first; 'timm', the sines of rows and of columns,
            then the cosines.
    """

    crops = True
    exempt = ("permutation: channels are divided among the axes",)
    variants: ClassVar = [{"order": order} for order in get_args(Order)]

    def __init__(
        self,
        grid: Grid,
        dim: Channels,
        temperature: Positive = 10_000.0,
        spread: float | None = None,
        order: Order = "lape",
    ) -> None:
        self.order = order
        if dim % (step := 2 * len(grid.shape)):
            axes = "two" if step == 4 else step // 2
            raise ValueError(f"`dim` must be a multiple of {step} (a sine and a cosine on {axes} axes), got {dim}.")
        super().__init__(grid, dim, temperature, spread)

    def formula(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        columns_first, order = _ORDERS[self.order]
        axes = grid.coordinates(device).double()
        waves = _waves(axes.flip(-1) if columns_first else axes, self.dim // axes.shape[-1], self.temperature)
        return grid.with_prefix_rows(waves.permute(0, *order).flatten(1))


#: Order -> whether columns are before rows, and the axes of the waves of a token: axis, frequency, sine or cosine.
_ORDERS = {
    "lape": (True, (1, 2, 3)),
    "mae": (True, (1, 3, 2)),
    "detr": (False, (1, 2, 3)),
    "moco_v3": (False, (1, 3, 2)),
    "timm": (False, (3, 1, 2)),
}


def _waves(place: Tensor, dim: int, temperature: float) -> Tensor:
    """Compute sin and cos of place * temperature^(-2k / dim); (n, ...) -> (n, ..., dim / 2, 2)."""
    rate = temperature ** (-torch.arange(0, dim, 2, device=place.device, dtype=place.dtype) / dim)
    angle = place[..., None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1)
