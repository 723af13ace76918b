"""Tables with a grid of their own, which are resampled for the grid of every image, also in training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graticule.encodings.forms.absolute import ComputedEncoding
from graticule.encodings.forms.coordinates import Factor
from graticule.position.grid import Grid
from graticule.position.position import init_table, register_encoding
from graticule.position.resampling import Bilinear, Tiled, build_resampler
from graticule.registry.fields import Channels, NotNegative, ShareAboveZero

_LINEAR, _TILED = Bilinear(), Tiled()
#: The sides of a table in patches, or its side on each axis.
TableSize = int | tuple[int, ...]


class OwnGrid(ComputedEncoding):
    """Learns a map of its own size, `table` (1, D, h, w); the rows of prefix tokens are zero."""

    crops = True
    has_own_grid = True

    def __init__(self, grid: Grid, dim: Channels, size: TableSize, std: NotNegative, resampler: str) -> None:
        super().__init__(grid, dim)
        self.size, self.std = size, std
        self.resampler = build_resampler(resampler)
        self.table = nn.Parameter(torch.empty(1, dim, *_on_axes("size", size, grid)))

    def reset_parameters(self) -> None:
        for table in self.parameters():
            init_table(table, self.std)

    def rows(self, grid: Grid) -> Tensor:
        image = self.map(grid.image_grid)  # refuses points
        return grid.cut(image).flatten(1).T

    def map(self, grid: Grid) -> Tensor:
        """Return the map for `grid`, (D, H, W)."""
        return self.resampler(self.table[0], grid.shape)


@register_encoding("windowed")
class Windowed(OwnGrid):
    r"""Adds a coarse table, resampled for the grid, and a table of one window, repeated over the grid.

    .. math:: w_{(y, x)} = resample(P)_{(y, x)} + W_{(y \bmod s,\; x \bmod s)}

    So a patch has the same position within its window of attention at every size. The windows begin at the top left;
    the last ones are cut off where sides are not multiples of s, for which the released code fails.

    Reference: Window Attention Is Bugged: How Not to Interpolate Position Embeddings (Bolya et al., 2024). The defaults
    are SAM 2's; timm's Hiera (`abs_win_pos_embed`) has `resampler="bicubic"`. The tables are theirs, (1, D, h, w).

    Args:
        size: sides of the coarse table.
        window: s, the sides of the window.
        std: standard deviation of the initial values, a normal truncated at 2 (absolute).
        resampler: resampler of the coarse table.
    """

    def __init__(
        self,
        grid: Grid,
        dim: Channels,
        size: TableSize = 7,
        window: TableSize = 8,
        std: NotNegative = 0.02,
        resampler: str = "bicubic(antialias=False)",
    ) -> None:
        super().__init__(grid, dim, size, std, resampler)
        self.window = window
        self.window_table = nn.Parameter(torch.empty(1, dim, *_on_axes("window", window, grid)))
        self.reset_parameters()

    def map(self, grid: Grid) -> Tensor:
        return super().map(grid) + _TILED(self.window_table[0], grid.shape)


@register_encoding("cropped")
class Cropped(OwnGrid):
    r"""Resamples a large table whole in evaluation, and a random part of it in training.

    In training the part has the sides :math:`\min(s a, 1)` and :math:`\min(s / a, 1)` of the table's width and height,
    with s uniform in [:math:`\sqrt{0.1}`, 1] and a in [3/4, 4/3], uniform in its logarithm; its place is uniform. It is
    sampled linearly at H x W points, from border to border. So a table is trained for images of
    many sizes and shapes at once. In evaluation the square that covers the image is resampled and cut at the top left,
    which keeps the aspect ratio. PyTorch's generator of the device draws, in each process its own.

    Reference: the cropped position embeddings (CPE) of RADIO (Heinrich et al., 2025) and C-RADIO, released code, whose
    tables have 128 x 128 entries. There each image has its own part; here one draw is for all images of a forward pass,
    which share a table. RADIO's code takes the table as it is for images of its size, also in training, and starts it
    with `std` = 1 / sqrt(D).

    Args:
        size: sides of the table, which are the sides of the largest images, in patches.
        least: the smallest area of a part, as a share of the table; 0.1 in RADIO.
        aspect: the largest a; 1 for parts of the shape of the table.
        std: standard deviation of the initial values, a normal truncated at 2 (absolute).
        resampler: resampler of the whole table in evaluation.
    """

    def __init__(
        self,
        grid: Grid,
        dim: Channels,
        size: TableSize = 28,
        least: ShareAboveZero = 0.1,
        aspect: Factor = 4 / 3,
        std: NotNegative = 0.02,
        resampler: str = "crop(mode='bilinear', antialias=False)",
    ) -> None:
        super().__init__(grid, dim, size, std, resampler)
        self.least, self.aspect = least, aspect
        self.reset_parameters()

    def map(self, grid: Grid) -> Tensor:
        if not self.training:
            return super().map(grid)
        wide = torch.promote_types(self.table.dtype, torch.float32)
        image = self.table[0].to(wide)
        for axis, (start, side) in enumerate(zip(*self.draw(grid.ndim), strict=True), 1):
            old, new = image.shape[axis], grid.shape[axis - 1]
            steps = torch.arange(new, device=image.device, dtype=torch.float64) / max(new - 1, 1)
            matrix = _LINEAR.at((start + steps * side) * (old - 1), old).to(wide)
            image = (matrix @ image.movedim(axis, -2)).movedim(-2, axis)
        return image.to(self.table.dtype)

    def draw(self, axes: int) -> tuple[Tensor, Tensor]:
        """Draw the first coordinates of a part and its sides on each axis, as shares of the table's, float64."""
        scale, ratio, *places = torch.rand(2 + axes, device=self.table.device).double()
        scale = self.least**0.5 + (1 - self.least**0.5) * scale
        ratio = self.aspect ** (2 * ratio - 1)
        factors = [torch.ones_like(ratio)] * (axes - 2) + [1 / ratio, ratio]
        sides = (scale * torch.stack(factors[:axes])).clamp(max=1)
        return torch.stack(places) * (1 - sides), sides


def _on_axes(name: str, sides: TableSize, grid: Grid) -> tuple[int, ...]:
    """Return the sides on each axis of `grid`."""
    shape = (sides,) * grid.ndim if isinstance(sides, int) else tuple(sides)
    if len(shape) != grid.ndim or not 1 <= min(shape) <= max(shape) <= 65_536:
        raise ValueError(
            f"`{name}` must be a side of 1 to 65,536 for all or for each of {grid.ndim} axes, got {sides}."
        )
    return shape
