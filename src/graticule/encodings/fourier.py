"""Fourier features of the coordinates, learned or random, mapped to the channels by an MLP."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from graticule.encodings.forms.absolute import ComputedEncoding
from graticule.encodings.forms.coordinates import Coordinates, linear
from graticule.position.grid import Grid
from graticule.position.position import register_encoding


@register_encoding("fourier")
class Fourier(ComputedEncoding):
    r"""Encodes coordinates by waves in learned directions, and maps these to the channels by an MLP.

    .. math:: w(p) = W_2\, \mathrm{GELU}(W_1 r(p) + b_1) + b_2, \quad
              r(p) = \frac{1}{\sqrt{2F}} [\cos A p;\ \sin A p], \quad A \sim N(0, s^2) \in \mathbb{R}^{F \times 2}

    The similarity of two positions, :math:`2\, r(p)^\top r(q)`, is initially about
    :math:`e^{-s^2 |p - q|^2 / 2}`. Angles are computed in float32 at least. Rows of prefix tokens are zero, and another
    grid is computed, not resampled. The paper tunes s (its 1 / gamma) for each task; with the default, neighbors on a
    grid of 14 x 14 have a similarity of 0.7.

    Reference: Learnable Fourier Features for Multi-Dimensional Spatial Positional Encoding (Li et al., 2021), Eq. 2-4;
    with `learned=False` and `hidden=None`, Fourier Features Let Networks Learn High Frequency Functions in Low
    Dimensional Domains (Tancik et al., 2020).

    Args:
        grid: the grid that the encoding is built for.
        dim: D.
        frequencies: F.
        std: s, per unit of the coordinates.
        hidden: channels of the hidden layer; None for a linear map only.
        learned: whether A is learned; otherwise it keeps its random initial values.
        coordinates: 'separate', each axis in [-1, 1]; 'max', the longer axis in [-1, 1], which keeps the aspect ratio;
            'patches', the index of a patch.
    """

    crops = True

    def __init__(
        self,
        grid: Grid,
        dim: int,
        frequencies: int = 64,
        std: float = 6.0,
        hidden: int | None = 64,
        learned: bool = True,
        coordinates: Literal["separate", "max", "patches"] = "separate",
    ) -> None:
        super().__init__(grid, dim)
        if frequencies < 1:
            raise ValueError(f"`frequencies` must be at least 1, got {frequencies}.")
        self.std = std
        self.coordinates = Coordinates(coordinates)
        self.directions = nn.Parameter(torch.empty(frequencies, len(grid.shape)), requires_grad=learned)
        layers: list[nn.Module] = [nn.Linear(2 * frequencies, dim)]
        if hidden is not None:
            layers = [nn.Linear(2 * frequencies, hidden), nn.GELU(), nn.Linear(hidden, dim)]
        self.mlp = nn.Sequential(*layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the directions and the MLP."""
        nn.init.normal_(self.directions, std=self.std)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def rows(self, grid: Grid) -> Tensor:
        """Compute the rows of the patches of `grid`, (H * W, D)."""
        table: Tensor = self.mlp(self.features(grid).to(self.directions.dtype))
        return table

    def features(self, grid: Grid) -> Tensor:
        """Compute r of the patches of `grid`, (H * W, 2F), in float32 at least."""
        wide = torch.promote_types(self.directions.dtype, torch.float32)
        angle = linear(
            self.coordinates(grid, self.directions.device, self.grid).to(wide), self.directions.to(wide)[None]
        )
        return torch.cat([angle.cos(), angle.sin()], -1) / math.sqrt(2 * len(self.directions))
