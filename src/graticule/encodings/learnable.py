"""A learnable table: the position embedding of ViT and DeiT."""

from __future__ import annotations

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from graticule.checks import checked
from graticule.encodings.absolute import AbsoluteEncoding
from graticule.encodings.base import register_encoding
from graticule.grid import Grid
from graticule.resampling import build_resampler


@register_encoding("learnable")
class Learnable(AbsoluteEncoding):
    """Learns one row per token, prefix tokens included; drawn from a normal of `std`, cut at 2 (absolute).

    At another grid the rows of the patches are resampled, bicubically with antialias unless `resampler` names another
    way, and the prefix rows kept.

    Reference: An Image Is Worth 16x16 Words (Dosovitskiy et al., 2021); DeiT (Touvron et al., 2021).
    """

    resampled = True
    crops = True

    @checked
    def __init__(self, grid: Grid, dim: int, std: float = 0.02, resampler: str = "bicubic") -> None:
        super().__init__(grid, dim)
        self.std = std
        self.resampler = build_resampler(resampler)
        self.pos_embed = nn.Parameter(torch.empty(1, grid.tokens, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table anew."""
        trunc_normal_(self.pos_embed, std=self.std)

    def fit(self, table: Tensor, old: Grid) -> Tensor | None:
        """Resample a table of a checkpoint, (N', D), made for `old`, for this grid."""
        return old.resize(table, self.grid, self.resampler)

    def at(self, grid: Grid) -> Tensor:
        """Return the table resampled for `grid`, (N, D); the gradient reaches the original rows."""
        return self.grid.resize(self.pos_embed[0], grid, self.resampler)
