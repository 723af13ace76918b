"""Scaling of rotary frequencies on grids of other lengths than the reference grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from graticule.position.grid import Grid
from graticule.registry.fields import Count, Positive, check_fields
from graticule.system.symbolic import as_tensor, holds


@dataclass(frozen=True)
class Scaling:
    r"""Scales rotary frequencies per axis, by the ratio of its length to that of the reference grid.

    With s the ratio of the two lengths of an axis and :math:`\omega` a frequency on it:

    - 'interpolation': :math:`\omega / s`, so that angles span the same range; also at smaller grids.
    - 'ntk': :math:`\omega s^{-u}`, where u runs from 0 at the highest frequency to 1 at the lowest (by their
      logarithms); for frequencies T^(-k / n) this gives the base :math:`T s^{n / (n - 1)}`.
    - 'yarn': :math:`\omega (\gamma + (1 - \gamma) / s)`, where :math:`\gamma` grows from 0 to 1 as the number of turns
      along the axis of the reference grid grows through `ramp`; and the logits are multiplied by
      :math:`(1 + \ln(s_y s_x) / 10)^2`. On one axis this is as in the paper, where s is the ratio of the numbers of
      tokens.

    'ntk' and 'yarn' change nothing on an axis that is not longer. At the reference grid all three change nothing.

    Reference: Position Interpolation (Chen et al., 2023); YaRN (Peng et al., 2023), Eq. 16 and sections 3.1-3.4; per
    axis as in FiT (Lu et al., 2024).

    scaling: one of the three ways; None keeps the frequencies per patch.
    reference: the shape of the reference grid, (H, W) for images; by default the one that the encoding is built for.
    ramp: turns below which a frequency is interpolated, and above which it is unchanged, (1, 32) by default as in the
        paper. On a small grid no frequency is above 32 turns; there (0.25, 1) keeps some.
    """

    scaling: Literal["interpolation", "ntk", "yarn"] | None = None
    reference: tuple[Count, ...] | None = None
    ramp: tuple[Positive, Positive] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.reference is not None and self.scaling is None:
            raise ValueError(f"`reference` must be left out without `scaling`, got {self.reference}.")
        if self.ramp is not None and self.scaling != "yarn":
            raise ValueError(f"`ramp` must be left out with scaling {self.scaling!r}, got {self.ramp}.")
        if self.ramp is not None and self.ramp[0] >= self.ramp[1]:
            raise ValueError(f"`ramp` must be two increasing numbers of turns, got {self.ramp}.")

    def at(self, built: Grid) -> Scaling:
        """Return the same with a reference grid, `built` if it has none."""
        known = self.scaling is None or self.reference is not None
        return self if known else Scaling(self.scaling, built.shape, self.ramp)

    def ratios(self, grid: Grid, like: Tensor) -> Tensor | None:
        """Return s on each axis, such as (y, x), as a tensor like `like`; None if all are known to be 1."""
        if self.scaling is None or self.reference is None:
            return None
        axes, longer = zip(grid.image_grid.shape, self.reference, strict=True), self.scaling != "interpolation"
        if all(holds(side <= known if longer else side == known) for side, known in axes):
            return None
        s = as_tensor(grid.image_grid.shape, like) / as_tensor(self.reference, like)
        return s.clamp(min=1) if longer else s

    def frequencies(self, vectors: Tensor, grid: Grid) -> Tensor:
        """Scale frequency vectors (..., axes), in radians per patch along each axis, for `grid`."""
        if self.reference is not None and len(self.reference) != len(grid.shape):
            raise ValueError(
                f"`reference` must have {len(grid.shape)} sides, as many as the grid has axes, got {self.reference}."
            )
        s = self.ratios(grid, vectors)
        if s is None:
            return vectors
        if self.scaling == "interpolation":
            return vectors / s
        if self.scaling == "ntk":
            return vectors * s ** -_depth(vectors)[..., None]
        turns = vectors.abs() * as_tensor(self.reference or (), vectors) / (2 * math.pi)
        low, high = self.ramp or (1.0, 32.0)
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return vectors * (share + (1 - share) / s)

    def logit_factor(self, grid: Grid, like: Tensor) -> Tensor | None:
        """Return the factor of the attention logits at `grid`, a scalar like `like`; None for 1."""
        s = self.ratios(grid, like.double()) if self.scaling == "yarn" else None
        return None if s is None else (1 + 0.1 * s.prod().log()).square().to(like.dtype)


def _depth(vectors: Tensor) -> Tensor:
    """Return the relative depth of frequency vectors (..., axes), from the longest, 0, to the shortest nonzero, 1."""
    lengths = vectors.norm(dim=-1)
    moves = lengths > 0
    logs = torch.where(moves, lengths, 1).log()
    highest, lowest = (torch.where(moves, logs, edge).flatten() for edge in (-math.inf, math.inf))
    highest, lowest = highest.max(), lowest.min()
    return torch.where(moves, (highest - logs) / (highest - lowest), 0)
