"""A learnable table: the position embedding of ViT and DeiT."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from graticule.encodings.forms.absolute import AbsoluteEncoding
from graticule.position.grid import Grid
from graticule.position.position import init_table, register_encoding
from graticule.position.resampling import build_resampler
from graticule.registry.fields import Channels, NotNegative


@register_encoding("learnable")
class Learnable(AbsoluteEncoding):
    """Learns one row per token, drawn from a normal of `std`, truncated at 2 (absolute).

    At another grid the rows of the patches are resampled, bicubically with antialias unless `resampler` names another
    way; the prefix rows are unchanged. Without `prefix_rows` the rows of class and register tokens are zero and no
    parameters, as in DeiT III and FlexiViT (timm's `no_embed_class`); with 'first' only the tokens after the
    first, as in transformers' DINOv2 with registers.

    Reference: An Image Is Worth 16x16 Words (Dosovitskiy et al., 2021); DeiT (Touvron et al., 2021).

    Args:
        std: standard deviation of the initial values.
        resampler: resampler of the rows for another grid.
        prefix_rows: whether prefix tokens have rows; 'first' for the first one alone, the class token.
    """

    resampled = True
    crops = True

    def __init__(
        self,
        grid: Grid,
        dim: Channels,
        std: NotNegative = 0.02,
        resampler: str = "bicubic",
        prefix_rows: bool | Literal["first"] = True,
    ) -> None:
        super().__init__(_with_rows(grid, prefix_rows), dim)
        self.prefix_rows = prefix_rows
        self.std = std
        self.resampler = build_resampler(resampler)
        self.pos_embed = nn.Parameter(torch.empty(1, self.grid.tokens, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_table(self.pos_embed, self.std)

    def forward(self, grid: Grid) -> Tensor:
        with_rows = _with_rows(grid, self.prefix_rows)
        table = super().forward(with_rows)
        if with_rows.prefix == grid.prefix:
            return table
        first, patches = with_rows.split(table)
        return torch.cat([first, replace(grid, prefix=grid.prefix - with_rows.prefix).with_prefix_rows(patches)])

    def set_grid(self, grid: Grid) -> None:
        super().set_grid(_with_rows(grid, self.prefix_rows))

    def fit(self, table: Tensor, old: Grid) -> Tensor | None:
        """Resample a table of a checkpoint, (N', D), from the grid `old` to this grid."""
        return old.resize(table, self.grid, self.resampler)

    def at(self, grid: Grid) -> Tensor:
        """Return the table resampled for `grid`, (N, D); the gradient reaches the original rows."""
        return self.grid.resize(self.pos_embed[0], grid, self.resampler)


def _with_rows(grid: Grid, prefix_rows: bool | Literal["first"]) -> Grid:
    """Return the grid of the tokens that have rows."""
    return grid if prefix_rows is True else replace(grid, prefix=min(grid.prefix, 1) if prefix_rows else 0)
