"""MLPs of the coordinates: of Fourier features, or of coordinates that are augmented in training as in CAPE."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from graticule.encodings.forms.absolute import ComputedEncoding
from graticule.encodings.forms.coordinates import Coordinates, Factor, Noise, linear
from graticule.position.grid import Grid
from graticule.position.places import Points
from graticule.position.position import register_encoding
from graticule.registry.fields import Channels, NotNegative, SmallCount
from graticule.system.symbolic import as_tensor


@register_encoding("coordinates")
class CoordinateMlp(ComputedEncoding):
    r"""Maps the coordinates of a patch in [-1, 1] to the channels by an MLP; in training they are augmented.

    .. math:: w(p) = W_2\, \mathrm{GELU}(W_1 p' + b_1) + b_2, \quad p' = \lambda (p + \Delta + \epsilon_p)

    with a global shift :math:`\Delta`, uniform in [-`shift`, `shift`] on each axis; a local shift :math:`\epsilon_p` of
    each patch, uniform in [-`local_shift`, `local_shift`] patches on each axis; and a global scale :math:`\lambda` in
    [1 / `rescale`, `rescale`], uniform in its logarithm. In evaluation p' = p. So absolute coordinates matter less, and
    densities and extents vary as at other grids. Rows of prefix tokens are zero, and another grid is computed, not
    resampled.

    Reference: CAPE: Encoding Relative Positions with Continuous Augmented Positional Embeddings (Likhomanenko et al.,
    2021), section 3. CAPE draws for every image; here one draw is for all images of a forward pass, which share a
    table. CAPE embeds p' by a formula of sines. The ranges are CAPE's for images.

    Args:
        hidden: channels of the hidden layer.
        shift: the largest global shift; None for no shift.
        local_shift: the largest local shift, in patches; from 1/2 on, patches may swap positions. None for no shift.
        rescale: the largest scale; None for 1.
    """

    crops = True

    def __init__(
        self,
        grid: Grid,
        dim: Channels,
        hidden: SmallCount = 64,
        shift: NotNegative | None = 0.5,
        local_shift: NotNegative | None = 0.5,
        rescale: Factor | None = 1.4,
    ) -> None:
        super().__init__(grid, dim)
        self.coordinates = Coordinates("separate")
        self.noise = Noise(shift, None, rescale)
        self.local_shift = 0.0 if local_shift is None else local_shift
        self.mlp = nn.Sequential(nn.Linear(len(grid.shape), hidden), nn.GELU(), nn.Linear(hidden, dim))

    def reset_parameters(self) -> None:
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def rows(self, grid: Grid) -> Tensor:
        """Compute the rows of the patches of `grid`, (H * W, D); in training at augmented coordinates."""
        weight = next(self.mlp.parameters())
        place = self.augmented(grid) if self.training else self.coordinates(grid, weight.device, self.grid)
        return self.mlp(place.to(weight.dtype))

    def augmented(self, grid: Grid) -> Tensor:
        """Draw coordinates for training from PyTorch's generator, (H * W, 2), float64."""
        place = self.coordinates(grid, next(self.mlp.parameters()).device, self.grid)
        if self.local_shift:
            local = torch.empty_like(place).uniform_(-self.local_shift, self.local_shift)
            image = self.grid if isinstance(grid, Points) else grid.image_grid
            place = place + local * (2 / as_tensor(image.shape, place))
        return self.noise(place)


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
        dim: Channels,
        frequencies: SmallCount = 64,
        std: NotNegative = 6.0,
        hidden: SmallCount | None = 64,
        learned: bool = True,
        coordinates: Literal["separate", "max", "patches"] = "separate",
    ) -> None:
        if not std:
            raise ValueError("`std` must be positive, as features of no direction are constant, got 0.")
        super().__init__(grid, dim)
        self.std = std
        self.coordinates = Coordinates(coordinates)
        self.directions = nn.Parameter(torch.empty(frequencies, len(grid.shape)), requires_grad=learned)
        layers: list[nn.Module] = [nn.Linear(2 * frequencies, dim)]
        if hidden is not None:
            layers = [nn.Linear(2 * frequencies, hidden), nn.GELU(), nn.Linear(hidden, dim)]
        self.mlp = nn.Sequential(*layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.directions, std=self.std)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def rows(self, grid: Grid) -> Tensor:
        """Compute the rows of the patches of `grid`, (H * W, D)."""
        return self.mlp(self.features(grid).to(self.directions.dtype))

    def features(self, grid: Grid) -> Tensor:
        """Compute r of the patches of `grid`, (H * W, 2F), in float32 at least."""
        wide = torch.promote_types(self.directions.dtype, torch.float32)
        angle = linear(
            self.coordinates(grid, self.directions.device, self.grid).to(wide), self.directions.to(wide)[None]
        )
        return torch.cat([angle.cos(), angle.sin()], -1) / math.sqrt(2 * len(self.directions))
