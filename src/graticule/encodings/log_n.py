"""A temperature of attention that depends on the number of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graticule.position.grid import Grid
from graticule.position.joining import Joining
from graticule.position.layer import LayerPosition
from graticule.position.position import Encoding, Position, SharedPosition, StageSpec, register_encoding
from graticule.registry.fields import Count
from graticule.system.symbolic import as_tensor


@register_encoding("log_n")
class LogN(Encoding):
    r"""Multiplies the queries by the logarithm of the number of patches, relative to that in training.

    .. math:: q_i \to \frac{\ln N}{\ln N_0} q_i

    Over more tokens a softmax of the same logits is flatter; with this factor its entropy stays about the same. At the
    training size nothing changes. It can be combined with any other encoding, such as `rope + log_n`, and costs one
    product with the queries. A bias that does not depend on the queries is not multiplied. In a text the token i sees
    i + 1 tokens and has max(1, ln(i + 1) / ln N_0), so that a short text gets the same factors as the beginning of
    a long one.

    Reference: Scale Factor of Attention from the Invariance of Entropy (Su, 2021); the factor log N is from Overcoming
    a Theoretical Limitation of Self-Attention (Chiang and Cholak, 2022).

    Args:
        reference: N_0, the number of patches in training, at least 2; by default `grid`'s.
    """

    crops = True
    exempt = ("crop: the factor is for the number of tokens of the crop",)

    def __init__(self, grid: Grid, causal: bool = False, reference: Count | None = None) -> None:
        super().__init__()
        if reference is not None and reference < 2:
            raise ValueError(f"`reference` must be at least 2 patches, got {reference}.")
        self.grid = grid
        self.causal = causal
        known = max(grid.patches, 2) if reference is None else reference
        # a part of the weights: what a model was trained for stays when it is resized, saved and opened
        self.register_buffer("reference_patches", torch.tensor(known))
        self.reference_patches: Tensor
        self.like: Tensor
        self.init_non_persistent_buffers()

    def compute_buffers(self, device: torch.device | None, dtype: torch.dtype) -> dict[str, Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        return {"like": torch.empty(0, device=device, dtype=wide)}  # has our dtype and device

    def forward(self, grid: Grid) -> Tensor:
        """Return the factor of the queries of each token, (N,), float32 at least."""
        wide = torch.promote_types(self.like.dtype, torch.float32)
        known = self.reference_patches.double().log()
        if self.causal:
            counts = torch.arange(1, grid.tokens + 1, dtype=wide, device=self.like.device)
            return (counts.double().log() / known).to(wide).clamp(min=1)
        patches = as_tensor([grid.patches], self.like.double()).clamp(min=2)
        return (patches.log() / known).to(wide).expand(grid.tokens)

    @classmethod
    def position(cls, stage: StageSpec, joining: Joining, **options: Any) -> Position:
        encoding = cls.build(replace(stage, depth=joining.layers), stage.within, options)
        return LogNPosition(encoding, stage.depth, joining.layer_indices)


class LogNPosition(SharedPosition):
    """A factor of the queries, the same in all joined layers."""

    def layer_positions(self, grid: Grid) -> list[LayerPosition]:
        """Return the position of all joined layers for `grid`, with the factor."""
        return [LayerPosition(query_scale=self.encoding(grid))]
