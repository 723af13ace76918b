"""Factorized tables: the sum of one table for the rows of the grid and one for its columns."""

from __future__ import annotations

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from graticule.encodings.forms.absolute import AbsoluteEncoding
from graticule.position.grid import Grid
from graticule.position.position import register_encoding
from graticule.position.resampling import build_resampler
from graticule.registry.checks import checked
from graticule.system.symbolic import holds

Size = tuple[int, int]


@register_encoding("factorized")
class Factorized(AbsoluteEncoding):
    r"""Learns a table for the rows of the grid and one for its columns, and adds or multiplies them.

    .. math:: w_{(y, x)} = Y_y + X_x

    This needs (H + W) D numbers instead of H W D. At another grid each table is resampled along its axis. Rows of
    prefix tokens are zero.

    Reference: Patch n' Pack: NaViT (Dehghani et al., 2023), section 2.1, which compares sums and products; names,
    sum and linear resampling are those of timm's NaFlexVit, whose `pos_embed_ar_preserving` is
    `resampler="crop(mode='bilinear', antialias=False)"`.

    Args:
        grid: the grid that the tables are built for.
        dim: D.
        std: standard deviation of the initial values, a normal truncated at 2 (absolute).
        product: multiply the tables instead of adding them.
        resampler: resampler of the tables for another grid.
    """

    resampled = True
    crops = True

    @checked
    def __init__(
        self,
        grid: Grid,
        dim: int,
        std: float = 0.02,
        product: bool = False,
        resampler: str = "bilinear(antialias=False)",
    ) -> None:
        super().__init__(grid, dim)
        self.std, self.product = std, product
        self.resampler = build_resampler(resampler)
        self.pos_embed_y = nn.Parameter(torch.empty(1, grid.height, dim))
        self.pos_embed_x = nn.Parameter(torch.empty(1, grid.width, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the tables."""
        for table in (self.pos_embed_y, self.pos_embed_x):
            trunc_normal_(table, std=self.std)

    def forward(self, grid: Grid) -> Tensor:
        """Return w for `grid`, (N, D)."""
        return self.at(grid)

    def at(self, grid: Grid) -> Tensor:
        """Return w for any grid, (N, D)."""
        whole = grid.whole.shape
        y, x = (self._axis(table, axis, self.grid.shape, whole) for axis, table in enumerate(self._tables()))
        if grid.crop is not None:
            y, x = (
                axis.sample(table.mT, side).mT for axis, table, side in zip(grid.axes, (y, x), grid.shape, strict=True)
            )
        rows = y[0, :, None] * x[0, None] if self.product else y[0, :, None] + x[0, None]  # (H, W, D)
        return grid.with_prefix_rows(rows.flatten(0, 1))

    def set_grid(self, grid: Grid) -> None:
        """Resample both tables for `grid`, and replace them."""
        for axis, (name, table) in enumerate(zip(("pos_embed_y", "pos_embed_x"), self._tables(), strict=True)):
            resized = self._axis(table.detach(), axis, self.grid.shape, grid.shape).clone()
            setattr(self, name, nn.Parameter(resized, requires_grad=table.requires_grad))
        self.grid = grid

    def fit_parameter(self, name: str, value: Tensor, shape: Size | None = None) -> Tensor:
        """Resample the table of an axis, (1, n, D), for this grid; without `shape` from a square grid."""
        axis = ("pos_embed_y", "pos_embed_x").index(name)
        if value.ndim != 3 or value.shape[::2] != (1, self.dim) or not value.shape[1]:
            return value
        length = value.shape[1]
        if shape is None or shape[axis] != length:
            if length == self.grid.shape[axis]:
                return value
            shape = (length, length)
        return self._axis(value, axis, shape, self.grid.shape)

    def _tables(self) -> tuple[Tensor, Tensor]:
        return self.pos_embed_y, self.pos_embed_x

    def _axis(self, table: Tensor, axis: int, old: Size, new: Size) -> Tensor:
        """Resample the table of an axis, (1, n, D) -> (1, n', D), in float32 at least."""
        if holds(old[0] == new[0]) and holds(old[1] == new[1]):
            return table
        wide = torch.promote_types(table.dtype, torch.float32)
        matrix = self.resampler.matrices(old, new, table.device)[axis].to(wide)
        return (matrix @ table.to(wide)).to(table.dtype)
