"""Factorized tables: the sum of one table for the rows of the grid and one for its columns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graticule.encodings.forms.absolute import ComputedEncoding
from graticule.position.grid import Grid
from graticule.position.places import Shape, axis_letters
from graticule.position.position import init_table, register_encoding
from graticule.position.resampling import build_resampler
from graticule.registry.fields import Channels, NotNegative
from graticule.system.symbolic import is_statically_true


@register_encoding("factorized")
class Factorized(ComputedEncoding):
    r"""Learns a table for the rows of the grid and one for its columns, and adds or multiplies them.

    .. math:: w_{(y, x)} = Y_y + X_x

    This needs (H + W) D numbers instead of H W D. Each further axis has a table, too. At another grid each table is
    resampled along its axis. Rows of prefix tokens are zero.

    Reference: Patch n' Pack: NaViT (Dehghani et al., 2023), section 2.1, which compares sums and products; names,
    sum and linear resampling are as in timm's NaFlexVit, whose `pos_embed_ar_preserving` is
    `resampler="crop(mode='bilinear', antialias=False)"`.

    Args:
        std: standard deviation of the initial values, a normal truncated at 2 (absolute).
        product: multiply the tables instead of adding them.
        resampler: resampler of the tables for another grid.
    """

    resampled = True
    crops = True
    pos_embed_y: nn.Parameter
    pos_embed_x: nn.Parameter

    def __init__(
        self,
        grid: Grid,
        dim: Channels,
        std: NotNegative = 0.02,
        product: bool = False,
        resampler: str = "bilinear(antialias=False)",
    ) -> None:
        super().__init__(grid, dim)
        self.std, self.product = std, product
        self.resampler = build_resampler(resampler)
        self.names = [f"pos_embed_{letter}" for letter in axis_letters(len(grid.shape))]
        for name, side in zip(self.names, grid.shape, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(1, side, dim)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self._tables():
            init_table(table, self.std)

    def rows(self, grid: Grid) -> Tensor:
        shape = grid.image_grid.shape
        tables = [self._axis(table, axis, self.grid.shape, shape) for axis, table in enumerate(self._tables())]
        if grid.crop is not None:
            axes = zip(grid.axes, tables, grid.shape, strict=True)
            tables = [axis.sample(table.mT, side).mT for axis, table, side in axes]
        rows = tables[0][0]
        for table in tables[1:]:
            rows = (rows[:, None] * table if self.product else rows[:, None] + table).flatten(0, 1)
        return rows

    def resample(self, name: str, value: Tensor, old: Grid, new: Grid) -> Tensor:
        """Resample the table of an axis, (1, n, D)."""
        return self._axis(value, self.names.index(name), old.shape, new.shape)

    def grid_of(self, name: str, value: Tensor, shape: Shape | None) -> Grid | None:
        """Infer the grid of the table of an axis, (1, n, D); without `shape` a square, unless it has our size."""
        axis = self.names.index(name)
        if value.ndim != 3 or value.shape[::2] != (1, self.dim) or not value.shape[1]:
            return None
        length = value.shape[1]
        if shape is not None and len(shape) == len(self.names) and shape[axis] == length:
            return Grid(*shape)
        return None if length == self.grid.shape[axis] else Grid(*(length,) * len(self.names))

    def _tables(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.names]

    def _axis(self, table: Tensor, axis: int, old: Shape, new: Shape) -> Tensor:
        """Resample the table of an axis, (1, n, D) -> (1, n', D), in float32 at least."""
        if len(old) == len(new) and all(is_statically_true(a == b) for a, b in zip(old, new, strict=True)):
            return table
        wide = torch.promote_types(table.dtype, torch.float32)
        matrix = self.resampler.matrices(old, new, table.device)[axis].to(wide)
        return (matrix @ table.to(wide)).to(table.dtype)
