"""The rotary encoding of a grid along directions spaced by the golden ratio."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graticule.encodings.forms.coordinates import Coordinates, Noise, spread_directions
from graticule.encodings.forms.rotary import FixedRotary, Scaling, check_head_dim
from graticule.position.grid import Grid
from graticule.position.position import register_encoding
from graticule.registry.fields import Positive


@register_encoding("rope_golden_gate")
class GoldenGateRope(FixedRotary):
    r"""Rotates each channel pair by the position along its own direction; the directions cover the circle evenly.

    .. math:: \theta_i = \omega_k (x \cos \varphi_i + y \sin \varphi_i), \quad
              \varphi_i = i\, \pi (\sqrt{5} - 1) / 2, \quad i = h\, d / 2 + k

    for pair k of head h. On other numbers of axes the directions
    cover the sphere evenly. The frequencies :math:`\omega_k` are geometric from the lowest to the
    highest, and the first ones may be zero. Coordinates are in [-1, 1], scaled to keep the aspect ratio. Pairs are (i,
    i + d / 2). Nothing is learned. Prefix tokens are not rotated.

    Reference: On N-dimensional Rotary Positional Embeddings (Xiong, 2025), golden gate RoPE.

    Args:
        grid: the grid that the encoding is built for.
        num_heads: h.
        head_dim: d, a multiple of 2.
        lowest: the lowest nonzero frequency, in radians per unit of the coordinates.
        highest: the highest frequency.
        zeros: fraction of frequencies that are zero.
        coordinates: the coordinates of patches.
        noise: noise of the coordinates in training.
        scaling: scaling of the frequencies at other grids, for coordinates in patches.
    """

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        lowest: Positive = 0.2,
        highest: Positive = 20.0,
        zeros: float = 0.0,
        coordinates: Coordinates = Coordinates("area"),  # noqa: B008
        noise: Noise = Noise(),  # noqa: B008
        scaling: Scaling = Scaling(),  # noqa: B008
    ) -> None:
        check_head_dim(head_dim, 2, "pairs of channels")
        if not 0 < lowest <= highest:
            raise ValueError(f"`lowest` must be positive and at most `highest`, got {lowest} and {highest}.")
        if not 0 <= zeros < 1:
            raise ValueError(f"`zeros` must be in [0, 1), got {zeros}.")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.lowest, self.highest, self.zeros = lowest, highest, zeros
        super().__init__(grid, coordinates, noise, scaling, "half")

    def vectors(self, device: torch.device | None = None) -> Tensor:
        """Return the frequency vectors (f^y, f^x), (h, d / 2, axes), float64."""
        pairs = self.head_dim // 2
        still = round(self.zeros * pairs)
        share = torch.linspace(0, 1, pairs - still, device=device, dtype=torch.float64)
        lengths = torch.cat([share.new_zeros(still), self.lowest * (self.highest / self.lowest) ** share])
        index = torch.arange(self.num_heads * pairs, device=device, dtype=torch.float64).unflatten(0, (-1, pairs))
        if (axes := len(self.grid.shape)) == 2:
            angle = index * (math.pi * (math.sqrt(5) - 1) / 2)
            return torch.stack([angle.sin(), angle.cos()], -1) * lengths[:, None]
        return spread_directions(index, axes) * lengths[:, None]
