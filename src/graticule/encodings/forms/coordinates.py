"""The coordinates of patches, in the unit and from the origin of an encoding, and their noise in training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from graticule.position.grid import Grid
from graticule.registry.fields import Finite, NotNegative, check_fields
from graticule.system.symbolic import as_tensor

Factor = Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)]


@dataclass(frozen=True)
class Coordinates:
    r"""The coordinates (y, x) of every patch, axis by axis; i is the index on an axis of n patches.

    coordinates: 'patches', i + o;
        'separate', 'min' or 'max', the centers of patches in [-1, 1], 2 (i + 1/2 + o) / m - 1 where m is n, or the
        shorter or the longer side of the grid, as in DINOv3;
        'corners', from -1 at the first patch to 1 at the last; 'area', the same times n / sqrt(H W), which keeps the
        aspect ratio; 'unit', from 0 to 1.
    offset: o, in patches.

    Sides are those of the grid itself, but for a text those of the grid that the encoding is built for: its tokens keep
    their coordinates as the text grows, and a longer text has coordinates beyond that range.
    """

    coordinates: Literal["patches", "separate", "min", "max", "corners", "area", "unit"] = "patches"
    offset: Finite = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.offset and self.coordinates in ("corners", "area", "unit"):
            raise ValueError(f"`offset` must be 0 with coordinates {self.coordinates!r}, got {self.offset}.")

    def __call__(self, grid: Grid, device: torch.device | None = None, built: Grid | None = None) -> Tensor:
        """Return the coordinates of the patches of `grid`, (H * W, 2), float64; for a text, relative to `built`."""
        index = grid.coordinates(device).double()
        sides = as_tensor(built.shape if built is not None and grid.sequence else grid.whole.shape, index)
        if self.coordinates == "patches":
            return index + self.offset
        if self.coordinates in ("separate", "min", "max"):
            by = {"separate": sides, "min": sides.min(), "max": sides.max()}[self.coordinates]
            return 2 * (index + (0.5 + self.offset)) / by - 1
        share = index / (sides - 1).clamp(min=1)
        if self.coordinates == "unit":
            return share
        reach = sides / sides.prod().sqrt() if self.coordinates == "area" else 1.0
        return (2 * share - 1) * reach


@dataclass(frozen=True)
class Noise:
    r"""Random augmentation of the coordinates in training: one draw per forward pass, for all images and layers.

    shift: s; a number from [-s, s] is added to each coordinate, drawn separately for y and x.
    jitter: j; each coordinate is multiplied by a number from [1 / j, j], drawn separately, uniform in its logarithm.
    rescale: r; both coordinates are multiplied by the same number from [1 / r, r], uniform in its logarithm.

    Reference: DINOv3 (Simeoni et al., 2025), section 3.2 and its code.
    """

    shift: NotNegative | None = None
    jitter: Factor | None = None
    rescale: Factor | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def active(self) -> bool:
        """Return whether it changes anything."""
        return (self.shift, self.jitter, self.rescale) != (None, None, None)

    def __call__(self, coordinates: Tensor) -> Tensor:
        """Apply noise, drawn from PyTorch's generator, to coordinates (H * W, 2)."""
        like = coordinates.new_empty(2, dtype=torch.float32)
        if self.shift is not None:
            coordinates = coordinates + like.uniform_(-self.shift, self.shift)
        if self.jitter is not None:
            coordinates = coordinates * like.uniform_(-math.log(self.jitter), math.log(self.jitter)).exp()
        if self.rescale is not None:
            coordinates = coordinates * like[:1].uniform_(-math.log(self.rescale), math.log(self.rescale)).exp()
        return coordinates
