"""Numbers that summarize the similarity of positions: locality and two-dimensionality."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from graticule.grid import Grid

Array = NDArray[np.float64]


def cosine_similarity(vectors: Array) -> Array:
    """Return the cosine of every pair of rows, (N, D) -> (N, N); NaN for a row of zeros, which has no direction."""
    with np.errstate(invalid="ignore", divide="ignore"):
        unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    cosines: Array = np.clip(unit @ unit.T, -1, 1)
    return cosines


def locality(similarity: Array, grid: Grid) -> float:
    r"""Return the mean distance of tokens, in patches, weighted by the positive part of the similarity.

    .. math:: \frac{1}{N} \sum_i \frac{\sum_j \max(s_{ij}, 0)\, \|p_i - p_j\|}{\sum_j \max(s_{ij}, 0)}

    over all j including i: so it is 0 if every token is similar to itself alone, and the denominator is never below 1.

    Args:
        similarity: (H * W, H * W).
        grid: the grid of the tokens.
    """
    return mean_distance(similarity, grid.distances().double().numpy())


def mean_distance(similarity: Array, distance: Array) -> float:
    """Return the mean of `distance` (n, m) under the positive part of `similarity` (n, m), mean over rows."""
    weight = np.maximum(similarity, 0)
    return float(((weight * distance).sum(-1) / weight.sum(-1)).mean())


def range_of(localities: Array, uniform: float) -> float:
    """Return the largest minus the smallest, as a share of `uniform`; NaN for fewer than two."""
    finite = localities[np.isfinite(localities)]
    return float(np.ptp(finite)) / uniform if len(finite) > 1 and uniform else float("nan")


def two_dimensionality(similarity: Array, grid: Grid) -> float:
    r"""Return the ratio of the two axes in the encoding: 1 if vertical neighbors count as much as horizontal ones.

    .. math:: \min(v, h) / \max(v, h), \quad v = \max(\bar s_{\Delta = (1, 0)} - \bar s, 0), \quad
              h = \max(\bar s_{\Delta = (0, 1)} - \bar s, 0)

    v and h are the excess of the mean cosine of neighbors over the mean over all pairs of different tokens.
    The result is in [0, 1]: 0 if only one axis is encoded, as with a sequence in row-major order. It is NaN, undefined,
    if the grid has only one axis, or if neither excess is more than four standard errors of such a mean over as many
    random pairs: then all positions are equally similar, or the table has no structure, like a learnable one before
    training, whose ratio would be one of noise; or the grid, such as 2 x 2, is too small to tell.

    Args:
        similarity: (H * W, H * W).
        grid: the grid of the tokens.
    """
    if min(grid.shape) < 2:
        return float("nan")
    dy, dx = grid.offsets().numpy().transpose(2, 0, 1)
    pairs = similarity[(dy != 0) | (dx != 0)]
    neighbors = similarity[(dy == 1) & (dx == 0)], similarity[(dy == 0) & (dx == 1)]
    excess = [max(near.mean() - pairs.mean(), 0.0) for near in neighbors]
    errors = [max(pairs.std() / len(near) ** 0.5, 1e-9) for near in neighbors]  # smaller ones are of rounding
    if all(one <= 4 * error for one, error in zip(excess, errors, strict=True)):
        return float("nan")
    return float(min(excess) / max(excess))
