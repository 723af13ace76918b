"""Equally spaced coordinates along an axis, and the interpolation of maps at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graticule.position.resampling import BICUBIC


class Axis(NamedTuple):
    """Equally spaced coordinates: first, first + step, ...; whole numbers are ints."""

    first: float = 0
    step: float = 1

    @property
    def whole(self) -> bool:
        """Return whether all coordinates are whole numbers."""
        return isinstance(self.first, int | torch.SymInt) and isinstance(self.step, int)

    def displacements(self, count: int) -> Axis:
        """Return the displacements between `count` coordinates, from the lowest to the highest."""
        return Axis((1 - count) * self.step, self.step)

    def coordinates(self, count: int, device: torch.device | str | None = None) -> Tensor:
        """Return the first `count` coordinates, int64 if they are whole numbers, else float64."""
        index = torch.arange(count, device=device)
        return (index if self.whole else index.double()) * self.step + self.first

    def sample(self, values: Tensor, count: int) -> Tensor:
        """Return values (..., n) at `count` coordinates, (..., count), interpolated by cubic convolution.

        Beyond the ends the values at the ends are repeated. Within them, quadratic functions are interpolated exactly.
        """
        if self.whole:
            return values[..., self.first : self.first + self.step * (count - 1) + 1 : self.step]
        last = values.shape[-1] - 1
        center = self.coordinates(count, values.device)[:, None]  # (count, 1), float64
        index = center.floor() + torch.arange(-1, 3, device=values.device)  # (count, 4)
        entries = torch.arange(last + 1, device=values.device)
        chosen = index.clamp(0, last)[..., None] == entries  # (count, 4, n)
        weights = (BICUBIC.filter((center - index).abs(), antialias=True)[..., None] * chosen).sum(1)
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        return (wide @ weights.to(wide.dtype).T).to(values.dtype)


def axis_of(start: float, size: float, count: int) -> Axis:
    """Return the centers of `count` patches that cover `size` from `start` on."""
    if size == count:
        return Axis(_int_if_whole(start), 1)
    step = size / count
    return Axis(_int_if_whole(start + (step - 1) / 2), _int_if_whole(step))


def _int_if_whole(number: float) -> float:
    return number if isinstance(number, int) or not number.is_integer() else int(number)


def lattice(*axes: Tensor) -> Tensor:
    """Return all combinations of coordinates on each axis, the last axis fastest, (H * W, 2) for rows and columns."""
    dtype = axes[0].dtype
    for axis in axes[1:]:
        dtype = torch.promote_types(dtype, axis.dtype)
    return torch.stack(torch.meshgrid(*(axis.to(dtype) for axis in axes), indexing="ij"), -1).flatten(0, -2)


def sampled(image: Tensor, axes: Sequence[Axis], shape: Sequence[int]) -> Tensor:
    """Return a map (..., H', W') at the coordinates of `axes`, (..., *shape)."""
    for dim, (axis, side) in enumerate(zip(axes, shape, strict=True), -len(axes)):
        image = axis.sample(image.movedim(dim, -1), side).movedim(-1, dim)
    return image
