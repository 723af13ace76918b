"""GFNet's global filter: one learned complex number per frequency of the grid."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.encodings.forms.mixing import MixingEncoding, TokenMixing
from graticule.position.displacement import Displacements
from graticule.position.grid import Grid
from graticule.position.places import Shape
from graticule.position.position import register_encoding
from graticule.position.resampling import Bicubic
from graticule.registry.fields import NotNegative, SmallCount

#: As `F.interpolate` resamples in its code, on any number of axes.
_BICUBIC = Bicubic(antialias=False, align_corners=True)


class GlobalFilter(MixingEncoding):
    r"""Multiplies each frequency of the grid by a learned complex number: GFNet's global filter.

    .. math:: y = F^{-1}(K \odot F(x)), \quad W_{g, ij} = k_g[(p_i - p_j) \bmod (H, W)], \quad k = F^{-1}(K)

    This is a circular convolution whose kernel has the size of the grid: the weights depend on the displacement, and
    opposite borders are neighbors. There are H (W // 2 + 1) complex numbers per group of channels, more with more axes;
    in GFNet each channel is a group. At another grid their real and imaginary parts are resampled bicubically over the
    indices of the frequencies, with aligned corners, as in its code. Within a part of a window the weights are sliced.

    Reference: Global Filter Networks for Image Classification (GFNet, Rao et al., 2021), Eq. 5-6, and its code.

    Args:
        groups: number of groups s.
        std: standard deviation of the initial real and imaginary parts.
    """

    resampled = True
    spectral = True

    def __init__(self, grid: Grid, groups: SmallCount = 1, std: NotNegative = 0.02) -> None:
        super().__init__(grid, groups)
        self.std = std
        self.complex_weight = nn.Parameter(torch.empty(*_frequencies(grid), groups, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.complex_weight, std=self.std)

    def forward(self, grid: Grid) -> Tensor:
        return self.displacements(grid).matrix()

    def displacements(self, grid: Grid) -> Displacements:
        """Return the kernel for `grid` by displacement, periodic."""
        weight = self.at_grid("complex_weight", grid)
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        axes = tuple(range(1, len(grid.shape) + 1))
        kernel = torch.fft.irfftn(torch.view_as_complex(wide.contiguous()).movedim(-1, 0), grid.shape, axes)
        table = kernel.flip(axes)  # k[-d] for the displacements d from (1 - H, 1 - W) to (0, 0)
        for axis in axes:
            # no slice of H - 1 rows, which would fix H in an exported program if it is 1
            table = torch.cat([table, table], axis)[:, *[slice(None)] * (axis - 1), :-1]
        return Displacements(table.to(weight.dtype), softmax=False)

    def grid_of(self, name: str, value: Tensor, shape: tuple[int, int] | None) -> Grid | None:
        """Infer the grid of filters, (H', W' // 2 + 1, groups, 2); without `shape` it is a square."""
        axes = len(self.grid.shape)
        if value.ndim != axes + 2 or value.shape[axes:] != self.complex_weight.shape[axes:]:
            return None
        old = Grid(*[value.shape[0]] * axes) if shape is None or axes == 1 else Grid(*shape)
        return old if value.shape[:axes] == _frequencies(old) else None

    def published_names(self) -> dict[str, str]:
        return {"filter.complex_weight": "complex_weight", **super().published_names()}

    def resample(self, name: str, value: Tensor, old: Grid, new: Grid) -> Tensor:
        """Resample filters (H, W // 2 + 1, groups, 2)."""
        maps = value.flatten(-2).movedim(-1, 0).to(torch.promote_types(value.dtype, torch.float32))
        size = _frequencies(new)
        if len(size) == 2:  # the same up to rounding, and bit for bit as in its code
            maps = F.interpolate(maps[None], size=size, mode="bicubic", align_corners=True)[0]
        else:
            maps = _BICUBIC(maps, size)
        return maps.to(value.dtype).movedim(0, -1).unflatten(-1, (-1, 2)).contiguous()


def _frequencies(grid: Grid) -> Shape:
    """Return the number of frequencies on each axis, half of them on the last."""
    return (*grid.shape[:-1], grid.shape[-1] // 2 + 1)


@register_encoding("global_filter")
class GlobalFilters(TokenMixing, GlobalFilter):
    """Mixes tokens by a circular convolution: one learned filter of the frequencies per group of channels."""

    grouped = True
    exempt = ("permutation: half of the frequencies of the last axis are stored",)
