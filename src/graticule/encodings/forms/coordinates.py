"""The coordinates of patches, in the unit and from the origin of an encoding, and their noise in training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from graticule.position.grid import Grid
from graticule.position.places import Points
from graticule.registry.fields import Finite, NotNegative, check_fields
from graticule.system.symbolic import as_tensor

Factor = Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)]
Origin = Literal["patches", "centered", "separate", "min", "max", "corners", "area", "unit", "middle"]


@dataclass(frozen=True)
class Coordinates:
    r"""The coordinates of every patch, (y, x) in an image, axis by axis; i is the index on an axis of n patches.

    coordinates: 'patches', i + o; 'centered', i + o - (n - n // 2), as in Qwen-Image;
        'middle', i + 1 / 2 + o - n / 2;
        'separate', 'min' or 'max', the centers of patches in [-1, 1], 2 (i + 1/2 + o) / m - 1 where m is n, or the
        shorter or the longer side of the grid, as in DINOv3;
        'corners', from -1 at the first patch to 1 at the last; 'area', the same times n / sqrt(H W), or over the
        geometric mean of more sides, which keeps the aspect ratio; 'unit', from 0 to 1. Or one of these for each axis.
    offset: o, in patches.

    If the grid has a `spacing`, i and n are multiplied by it, and those three are in its unit.

    Sides are the sides of the grid itself, but on one axis, as of a text, and for `Points` without an `extent` the
    sides of the grid that the encoding is built for: its tokens keep their coordinates as the text grows, and a longer
    text has coordinates beyond that range.
    """

    coordinates: Origin | tuple[Origin, ...] = "patches"
    offset: Finite = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.offset and {"corners", "area", "unit"}.intersection(self.names):
            raise ValueError(f"`offset` must be 0 with coordinates {self.coordinates!r}, got {self.offset}.")

    @property
    def names(self) -> tuple[Origin, ...]:
        """The coordinates of each axis, or one for all."""
        return self.coordinates if isinstance(self.coordinates, tuple) else (self.coordinates,)

    @property
    def in_patches(self) -> bool:
        """Return whether neighbors have the same distance on every grid."""
        return {"patches", "centered", "middle"}.issuperset(self.names)

    def __call__(self, grid: Grid, device: torch.device | None = None, built: Grid | None = None) -> Tensor:
        """Return the coordinates of the patches of `grid`, (H * W, 2), float64; for a text, relative to `built`."""
        if isinstance(self.coordinates, tuple):
            if len(self.coordinates) != grid.ndim:
                raise ValueError(f"`coordinates` must be {grid.ndim} names, one for each axis, got {self.coordinates}.")
            named = enumerate(self.coordinates)
            return torch.stack([self._of(name, grid, device, built)[..., axis] for axis, name in named], -1)
        return self._of(self.coordinates, grid, device, built)

    def _of(self, name: Origin, grid: Grid, device: torch.device | None, built: Grid | None) -> Tensor:
        index = grid.coordinates(device).double()
        unit = built.spacing if isinstance(grid, Points) and built is not None else grid.spacing
        step: float | Tensor = 1.0 if unit is None else as_tensor(unit, index)
        if name == "patches":
            return index + self.offset * step
        known = built if built is not None and (grid.ndim == 1 or grid.extent is None) else grid
        sides = as_tensor(known.extent, index)
        if name == "centered":
            middle = (sides / step / 2 - 1e-9).ceil()  # n - n // 2, whatever the rounding of a product with the unit
            return index + (self.offset - middle) * step
        if name == "middle":
            return index + (0.5 + self.offset) * step - sides / 2
        if name in ("separate", "min", "max"):
            by = {"separate": sides, "min": sides.min(), "max": sides.max()}[name]
            return 2 * (index + (0.5 + self.offset) * step) / by - 1
        share = index / (sides - step).clamp(min=step)
        if name == "unit":
            return share
        reach = sides / sides.prod() ** (1 / len(sides)) if name == "area" else 1.0
        return (2 * share - 1) * reach


@dataclass(frozen=True)
class Noise:
    r"""Random augmentation of the coordinates in training: one draw per forward pass, for all images and layers.

    shift: s; a number from [-s, s] is added to each coordinate, drawn separately for each axis.
    jitter: j; each coordinate is multiplied by a number from [1 / j, j], drawn separately, uniform in its logarithm.
    rescale: r; all coordinates are multiplied by the same number from [1 / r, r], uniform in its logarithm.

    Reference: DINOv3 (Simeoni et al., 2025), section 3.2 and its code.
    """

    shift: NotNegative | None = None
    jitter: Factor | None = None
    rescale: Factor | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def active(self) -> bool:
        return (self.shift, self.jitter, self.rescale) != (None, None, None)

    def __call__(self, coordinates: Tensor) -> Tensor:
        """Apply noise, drawn from PyTorch's generator, to coordinates (H * W, 2)."""
        like = coordinates.new_empty(coordinates.shape[-1], dtype=torch.float32)
        if self.shift is not None:
            coordinates = coordinates + like.uniform_(-self.shift, self.shift)
        for factor, draws in ((self.jitter, len(like)), (self.rescale, 1)):
            if factor is not None:
                coordinates = coordinates * like[:draws].uniform_(-math.log(factor), math.log(factor)).exp()
        return coordinates


def spread_directions(index: Tensor, axes: int) -> Tensor:
    r"""Return unit vectors that cover the sphere evenly, (..., axes), from their numbers, (...), float64.

    .. math:: \mathrm{erf}^{-1}(2 u_i - 1), \quad u_i = (i + 1) (g^{-1}, \dots, g^{-n}) \bmod 1, \quad g^{n + 1} = g + 1

    divided by their length, for n axes: the points u fill the cube evenly.

    Reference: The Unreasonable Effectiveness of Quasirandom Sequences (Roberts, 2018).
    """
    ratio = 2.0  # its fixed point is g
    for _ in range(64):
        ratio = (1 + ratio) ** (1 / (axes + 1))
    powers = ratio ** -torch.arange(1, axes + 1, device=index.device, dtype=torch.float64)
    directions = torch.erfinv(2 * ((index[..., None] + 1) * powers % 1) - 1)
    return directions / directions.norm(dim=-1, keepdim=True)


def linear(places: Tensor, vectors: Tensor) -> Tensor:
    """Return the dot product of coordinates (..., N, axes) with vectors (..., 1, n, axes), (..., N, n).

    Uses elementwise products, because autocast and TF32 reduce the precision of matrix products.

    Raises:
        ValueError: if they have different numbers of axes.
    """
    if places.shape[-1] != vectors.shape[-1]:
        raise ValueError(
            f"`grid` must have {vectors.shape[-1]} axes, as many as the encoding is built for, got {places.shape[-1]}."
        )
    products = [place * vector for place, vector in zip(places[..., None].unbind(-2), vectors.unbind(-1), strict=True)]
    return sum(products[1:], products[0])
