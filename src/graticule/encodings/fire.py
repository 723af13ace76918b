"""FIRE: a bias that a small MLP computes from the distance, relative to the largest one."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from graticule.encodings.forms.bias import PatchBias
from graticule.position.grid import Grid
from graticule.position.places import Points
from graticule.position.position import register_encoding
from graticule.registry.fields import SmallCount
from graticule.system.symbolic import as_tensor


@register_encoding("fire")
class Fire(PatchBias):
    r"""Adds a bias that a small MLP computes from the distance, relative to the largest one (FIRE).

    .. math:: b_{h, i, j} = f_h\left(\frac{\psi(|p_i - p_j|)}{\psi(\max(L, R))}\right), \quad
              \psi(t) = \ln(1 + c t)

    with a learned scale c, a learned threshold L and R the largest distance. On a grid larger than L the argument stays
    in [0, 1], so f never sees values that it was not trained for. c starts at 0.1, as in the paper, and L at the
    diagonal of the grid that the encoding was built for. Both are learned as logarithms, so that they stay positive (L
    as a multiple of this diagonal).

    The paper defines it for texts with causal attention. There R is the position i of the query, as it is here with
    `causal`. In an image every query sees the whole grid, and R is its diagonal for all queries. So the bias depends on
    the displacement alone, and f is evaluated once per displacement, not once per pair.

    Forms in several dimensions, which are not in the paper:

    - 'distance': f of the Euclidean distance, the same in all directions.
    - 'axes': f of one displacement per axis, of rows and of columns, each with its sign and relative to the largest
      along its axis. So the bias differs between directions.

    Prefix tokens get no bias. Nothing is resampled at another grid. In a crop R is the whole image's.

    Reference: Functional Interpolation for Relative Positions Improves Long Context Transformers (FIRE, Li et al.,
    2024), Eq. 18-20; the MLP and its 32 hidden units are the paper's.

    Args:
        causal: whether tokens attend only to those before them, for texts.
        hidden: hidden units of the MLP.
        form: 'distance' or 'axes'.
    """

    crops = True

    def __init__(
        self,
        grid: Grid,
        num_heads: SmallCount,
        causal: bool = False,
        hidden: SmallCount = 32,
        form: Literal["distance", "axes"] = "distance",
    ) -> None:
        super().__init__(grid, num_heads)
        self.causal, self.form = causal, form
        # (H, W) is part of the learned function, so it is saved in checkpoints
        self.register_buffer("reference", torch.tensor(grid.shape))
        self.reference: Tensor
        self.mlp = nn.Sequential(
            nn.Linear(len(grid.shape) if form == "axes" else 1, hidden), nn.ReLU(), nn.Linear(hidden, num_heads)
        )
        self.log_scale = nn.Parameter(torch.tensor([0.1]).log())
        self.log_threshold = nn.Parameter(torch.zeros(1))

    def patch_bias(self, grid: Grid) -> Tensor:
        wide = torch.promote_types(self.log_scale.dtype, torch.float32)
        device = self.log_scale.device
        reference = (self.reference - 1).clamp(min=1).to(wide)
        if self.causal and grid.ndim == 1:
            place = grid.coordinates(device)[:, 0].to(wide)
            distance = (place[:, None] - place).clamp(min=0)  # keys after the query are masked
            return self._mlp(self._share(distance, place[:, None], reference)[..., None])
        return grid.expand_offsets(self._mlp(self.shares(grid)))

    def shares(self, grid: Grid) -> Tensor:
        """Return the inputs of the MLP for an image, one row per displacement, (displacements, 1 or axes)."""
        wide = torch.promote_types(self.log_scale.dtype, torch.float32)
        device = self.log_scale.device
        reference = (self.reference - 1).clamp(min=1).to(wide)
        offsets = grid.unique_offsets(device).flatten(0, -2).to(wide)  # (displacements, axes)
        image = self.grid if isinstance(grid, Points) else grid
        step = 1 if image.spacing is None else as_tensor(image.spacing, offsets)
        largest = as_tensor(image.extent if grid.extent is None else grid.extent, offsets) - step
        if self.form == "axes":
            return offsets.sign() * self._share(offsets.abs(), largest, reference)
        diagonal = (self.reference - 1).to(wide).norm().clamp(min=1)
        return self._share(offsets.norm(dim=-1, keepdim=True), largest.norm(), diagonal)

    def _share(self, distance: Tensor, largest: Tensor, reference: Tensor) -> Tensor:
        """Return psi of distances, divided by psi of the largest one, or of the threshold if that is larger."""
        scale = self.log_scale.to(distance.dtype).exp()
        threshold = self.log_threshold.to(distance.dtype).exp() * reference
        return torch.log1p(scale * distance) / torch.log1p(scale * torch.maximum(threshold, largest))

    def _mlp(self, shares: Tensor) -> Tensor:
        """Map shares (..., 1 or axes) to one number per head, (num_heads, ...)."""
        return self.mlp(shares.to(self.log_scale.dtype)).movedim(-1, 0)
