"""LRPE-M: the sum of a dense matrix and a table of displacements."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from graticule.encodings.forms.mixing import MixingEncoding, TokenMixing
from graticule.encodings.lrpe import LearnableMixing
from graticule.encodings.sgu import DenseMixing
from graticule.position.grid import Grid
from graticule.position.position import register_encoding


class MixingSum(MixingEncoding):
    """Adds two mixing encodings: LRPE-M is a dense matrix and a table of displacements.

    Reference: PosMLP (Wang et al., 2022), Eq. 9-10.
    """

    def __init__(self, first: MixingEncoding, second: MixingEncoding) -> None:
        super().__init__(first.grid, max(first.groups, second.groups))
        self.first, self.second = first, second

    def forward(self, grid: Grid) -> Tensor:
        """Return the sum of both for `grid`, (groups, N, N)."""
        return cast("Tensor", self.first(grid)) + cast("Tensor", self.second(grid))

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Make `value` fit the parameter `name` of one of the parts."""
        part, _, own = name.partition(".")
        return (self.first if part == "first" else self.second).fit(own, value, shape)

    def set_grid(self, grid: Grid) -> None:
        """Pass `grid` on to both."""
        self.first.set_grid(grid)
        self.second.set_grid(grid)
        self.grid = grid


@register_encoding("lrpe_m")
class LrpeM(TokenMixing, MixingSum):
    """Mixes tokens by the sum of a dense matrix and one number per displacement.

    Args:
        grid: the grid that both are for.
        num_heads: number of groups of channels.
        group_tables: whether each group has a table of its own, as in the authors' code; the matrix is one for all.
        resampler: resampler of both for another grid.
    """

    holds = "positions, displacements"

    def __init__(self, grid: Grid, num_heads: int, group_tables: bool = False, resampler: str = "bicubic") -> None:
        table = LearnableMixing(grid, num_heads if group_tables else 1, resampler=resampler)
        super().__init__(DenseMixing(grid, resampler=resampler), table)
