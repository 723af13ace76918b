"""LRPE: one learned number per displacement of two tokens; LRPE-M adds a dense matrix."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from graticule.encodings.forms.mixing import MixingEncoding, TokenMixing
from graticule.encodings.sgu import DenseMixing
from graticule.position.displacement import Displacements
from graticule.position.grid import Grid
from graticule.position.position import init_table, register_encoding
from graticule.position.resampling import BICUBIC, Resampler, build_resampler
from graticule.registry.fields import NotNegative, SmallCount


class LearnableMixing(MixingEncoding):
    r"""LRPE and, with several groups, GLRPE: one learned number per displacement of two tokens.

    .. math:: W_{g, ij} = r_g[p_j - p_i]

    There are (2H - 1)(2W - 1) numbers per group; no softmax is applied. At another grid the table is resampled
    by `resampler` over the displacements and scaled by N / N', so that a row keeps its sum (`resize_displacements`).

    Reference: PosMLP (Wang et al., 2022), Eq. 11. Its appendix 4 counts 4 s N - 4 s sqrt(N) + 4 s numbers; by
    construction there are s (2 sqrt(N) - 1)^2 = 4 s N - 4 s sqrt(N) + s. The authors' code indexes the table by p_i -
    p_j, which loading its checkpoints accounts for, and initializes it to zero, because the loop that should draw it
    with std 0.02 finds no parameter; here it is drawn.

    Args:
        groups: number of groups, each with a table.
        std: standard deviation of the initial values.
        resampler: resampler of the tables for another grid.
    """

    resampled = True
    table_kind = "displacements"

    def __init__(self, grid: Grid, groups: SmallCount = 1, std: NotNegative = 0.02, resampler: str = "bicubic") -> None:
        super().__init__(grid, groups)
        self.std = std
        self.resampler = build_resampler(resampler, "displacements")
        self.relative_position_table = nn.Parameter(torch.empty(groups, math.prod(grid.table)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the tables: a normal, truncated at 2 (absolute)."""
        init_table(self.relative_position_table, self.std)

    def forward(self, grid: Grid) -> Tensor:
        return self.displacements(grid).matrix()

    def displacements(self, grid: Grid) -> Displacements:
        """Return the tables for `grid`."""
        table = self.at_grid("relative_position_table", grid)
        return Displacements(table.unflatten(-1, grid.table), softmax=False)

    def grid_of(self, name: str, value: Tensor, shape: tuple[int, int] | None) -> Grid | None:
        """Infer the grid of tables, (groups, (2H' - 1)(2W' - 1))."""
        return self.grid.infer_grid_from_offsets(value.shape[1], shape) if value.ndim == 2 else None

    def resample(self, name: str, value: Tensor, old: Grid, new: Grid) -> Tensor:
        return resize_displacements(value, old, new, self.resampler)


def resize_displacements(table: Tensor, old: Grid, new: Grid, resampler: Resampler = BICUBIC) -> Tensor:
    """Resample tables of displacements, (groups, (2H - 1)(2W - 1)), and scale them so that a row keeps its sum."""
    resized = resampler(table.unflatten(1, old.table), new.table).flatten(1)
    return resized * (old.patches / new.patches)


@register_encoding("lrpe")
class Lrpe(TokenMixing, LearnableMixing):
    """Mixes tokens by one learned number per displacement of two tokens."""


@register_encoding("glrpe")
class Glrpe(TokenMixing, LearnableMixing):
    """Mixes tokens by one learned number per displacement and group of channels."""

    grouped = True


class MixingSum(MixingEncoding):
    """Adds two mixing encodings: LRPE-M is a dense matrix and a table of displacements.

    Reference: PosMLP (Wang et al., 2022), Eq. 9-10.
    """

    def __init__(self, first: MixingEncoding, second: MixingEncoding) -> None:
        super().__init__(first.grid, max(first.groups, second.groups))
        self.first, self.second = first, second

    def forward(self, grid: Grid) -> Tensor:
        return cast("Tensor", self.first(grid)) + cast("Tensor", self.second(grid))


@register_encoding("lrpe_m")
class LrpeM(TokenMixing, MixingSum):
    """Mixes tokens by the sum of a dense matrix and one number per displacement.

    Args:
        num_heads: number of groups of channels.
        group_tables: whether each group has a table of its own, as in the authors' code; the matrix is one for all.
        resampler: resampler of both for another grid.
    """

    table_kind = "positions, displacements"

    def __init__(
        self, grid: Grid, num_heads: SmallCount, group_tables: bool = False, resampler: str = "bicubic"
    ) -> None:
        table = LearnableMixing(grid, num_heads if group_tables else 1, resampler=resampler)
        super().__init__(DenseMixing(grid, resampler=resampler), table)
