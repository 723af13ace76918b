"""The rotary encoding of a sequence: rotations of queries and keys by angles that grow along it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graticule.encodings.forms.coordinates import Coordinates, Noise
from graticule.encodings.forms.rotary import FixedRotary, Layout, Scaling, check_head_dim, geometric
from graticule.position.grid import Grid
from graticule.position.position import register_encoding


@register_encoding("rope_1d")
class Rope1d(FixedRotary):
    r"""Rotates queries and keys by the index in the flattened sequence; nothing is learned.

    .. math:: \theta_{p, k} = p\, T^{-2k / d}, \quad k < d / 2

    where p counts the patches from 0, row by row; prefix tokens are not rotated. The product of a query and a key
    depends on the difference of their angles, so the logits depend on their distance in the sequence. Another grid is
    computed, not resampled. In a text it is RoFormer's encoding, except that indices begin at 0, which
    changes no logit. `scaling` compares numbers of patches.

    Reference: RoFormer (Su et al., 2021), Eq. 14-15 and 34.

    Args:
        grid: the grid that the encoding is built for.
        head_dim: d, a multiple of 2.
        base: T.
        layout: the channels of a pair, neighbors ('interleaved') or i and i + d / 2 ('half').
        scaling: scaling of the frequencies at other lengths.
    """

    def __init__(
        self,
        grid: Grid,
        head_dim: int,
        base: float = 10_000.0,
        layout: Layout = "interleaved",
        scaling: Scaling = Scaling(),  # noqa: B008
    ) -> None:
        check_head_dim(head_dim, 2, "pairs of channels")
        self.head_dim = head_dim
        self.base = base
        if scaling.reference is not None:
            scaling = Scaling(scaling.scaling, (math.prod(scaling.reference),), scaling.ramp)
        super().__init__(grid, Coordinates(), Noise(), scaling.at(_row(grid)), layout)

    def vectors(self, device: torch.device | None = None) -> Tensor:
        """Return the frequencies as vectors of one axis, (d / 2, 1), float64."""
        return geometric(self.base, self.head_dim // 2, device)[:, None]

    def angles(self, grid: Grid, device: torch.device | None = None, noisy: bool = False) -> Tensor:
        """Return the angle of every pair of channels at every patch, (H * W, d / 2), float64, in radians."""
        vectors = self.scaling.frequencies(self.vectors(device), _row(grid))
        return grid.order(vectors.device).to(vectors.dtype)[:, None] * vectors[:, 0]

    def query_scale(self, grid: Grid) -> Tensor | None:
        """Return the temperature of 'yarn' in a longer sequence, (N,)."""
        factor = self.scaling.logit_factor(_row(grid), self.table)
        return None if factor is None else factor.expand(grid.tokens)


def _row(grid: Grid) -> Grid:
    """Return the grid of the flattened sequence, of the whole image for a crop."""
    return Grid(grid.whole.patches)
