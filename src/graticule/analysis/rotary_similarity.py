"""Position similarity under rotation alone: of two positions whose queries and keys are otherwise the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from graticule.analysis.correlation import layers_of, positions_of, seen_in
from graticule.analysis.similarity import Array, Correlations
from graticule.position.grid import Grid
from graticule.registry.checks import checked


@torch.no_grad()
@checked
def rotary_similarity(
    model: nn.Module, img_size: int | tuple[int, int] | None = None, stage: int = 0
) -> Correlations | None:
    r"""Compare all pairs of positions by the rotations that a layer applies to the same query and key.

    .. math:: s_{i, j} = \frac{1}{d} \sum_k (R_i e_k) \cdot (R_j e_k)

    over the d channels of a head, mean over the heads: for pairs of channels that is the mean cosine of the angles
    between i and j. Magnitudes (PoPE) are assumed to be all the same.

    Args:
        model: one of our backbones.
        img_size: pixels, a side or (height, width); by default the size that the model is built for.
        stage: of a pyramid, counted from 0.

    Returns:
        The similarities of every layer; NaN for a layer without rotation, with pooled queries or keys, or with windows
        where others see the whole grid. None if there are no other layers.

    Raises:
        ValueError: if the model is not a backbone or has no such stage.
    """
    positions, grid, _ = positions_of(model, img_size, stage)
    layers: list[Array | None] = []
    where = seen_in(model, grid, stage)
    for (at, index, block, _), position in zip(layers_of(model, grid), positions, strict=True):
        if index == stage:
            rotary = position.rotary if at.within == where and not _pools(block, at) else None
            layers.append(None if rotary is None else similarity_of(rotary, where, cast("Any", block).attn.head_dim))
    return correlations_of(layers, where)


def _pools(block: nn.Module, grid: Grid) -> bool:
    """Return whether the queries or keys of a layer are not the tokens of `grid`."""
    seen_grids = getattr(getattr(block, "attn", None), "seen_grids", None)
    return bool(seen_grids is not None and seen_grids(grid) != (grid, grid))


def similarity_of(rotary: Any, grid: Grid, head_dim: int) -> Array:
    """Return the similarity of the patches under a rotation, mean over heads, (H * W, H * W)."""
    if rotary.channels is None:
        basis = torch.eye(head_dim)[:, None, None].expand(-1, 1, grid.tokens, -1)  # (d, 1, N, d)
    else:
        basis = torch.zeros(1, 1, grid.tokens, head_dim)
    queries, keys = rotary(basis, basis)
    queries, keys = (_patch_vectors(x, grid) for x in (queries, keys))
    similarity: Array = (queries @ keys.mT).mean(0).numpy()
    return similarity


def correlations_of(layers: list[Array | None], grid: Grid) -> Correlations | None:
    """Return the similarities of every layer; None if no layer has any."""
    if all(layer is None for layer in layers):
        return None
    nothing = np.full((grid.patches, grid.patches), np.nan)
    similarity = np.stack([nothing if layer is None else layer for layer in layers])
    return Correlations(
        replace(grid, prefix=0).plane, similarity, tuple(None if one is None else "rotation" for one in layers)
    )


def _patch_vectors(x: Tensor, grid: Grid) -> Tensor:
    """Return (k, h, N, d) as one unit vector per head and patch, (h, H * W, k * d), in float64."""
    vectors = grid.split(x.double())[1].permute(1, 2, 0, 3).flatten(2)
    unit: Tensor = nn.functional.normalize(vectors, dim=-1)
    return unit
