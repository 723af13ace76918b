"""The rotary encoding of a sequence: queries and keys are turned by angles that grow along it."""

from __future__ import annotations

import torch
from torch import Tensor

from graticule.checks import checked
from graticule.encodings.base import register_encoding
from graticule.encodings.rotary import FixedRotary
from graticule.grid import Grid


@register_encoding("rope_1d")
class Rotary1d(FixedRotary):
    r"""Rotates queries and keys by the index in the flattened sequence; nothing is learned.

    .. math:: \theta_{p, k} = p\, T^{-2k / d}, \quad k < d / 2

    where p counts the patches from 0, row by row; prefix tokens are not turned. A query and a key meet at the
    difference of their angles: the logits depend on how far apart in the sequence they are. At another grid it is
    computed, not resampled. On a grid of height 1 it is RoFormer's, but for a first place of 0, which changes no
    logit.

    Reference: RoFormer (Su et al., 2021), Eq. 14-15 and 34.

    Args:
        grid: the grid that the encoding is built for.
        head_dim: d, a multiple of 2.
        temperature: T.
    """

    @checked
    def __init__(self, grid: Grid, head_dim: int, temperature: float = 10_000.0) -> None:
        if head_dim < 2 or head_dim % 2:
            raise ValueError(
                f"`head_dim` must be a multiple of 2 with rotary encodings (pairs of channels), got {head_dim}; "
                "it is embed_dim / num_heads."
            )
        super().__init__(grid, head_dim, temperature)

    def angles(self, grid: Grid, device: torch.device | None = None) -> Tensor:
        """Return the angle of every pair of channels at every patch, (H * W, d / 2), float64, in radians."""
        place = torch.arange(grid.patches, device=device, dtype=torch.float64)
        exponent = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float64) / self.head_dim
        return place[:, None] * self.temperature**-exponent
