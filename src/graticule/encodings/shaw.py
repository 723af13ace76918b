"""Shaw's relative encoding on the keys: a bias that depends on the queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from graticule.encodings.forms.bias import BiasEncoding
from graticule.position.grid import Grid
from graticule.position.places import axis_letters
from graticule.position.position import register_encoding
from graticule.registry.fields import Bounded, SmallCount


@register_encoding("shaw")
class ShawBias(BiasEncoding):
    r"""Adds the product of the query with one learned vector per clipped offset and axis to the logits.

    .. math:: b_{h, i, j} = \frac{q_{h, i} \cdot (u_{clip(y_j - y_i)} + v_{clip(x_j - x_i)})}{\sqrt d}, \quad
              clip(t) = \max(-K, \min(K, t))

    There is one table of 2K + 1 vectors of d channels per axis, which all heads of the layer share. Prefix tokens get
    no bias. Nothing is resampled at another grid: offsets beyond K are clipped to K. But on a grid with fewer than
    K + 1 patches per side the vectors of the largest offsets are never trained, and a larger grid would use their
    initial values.

    Reference: Self-Attention with Relative Position Representations (Shaw et al., 2018), Eq. 4-5, on the keys only, per
    axis as in Attention Augmented Convolutional Networks (Bello et al., 2019), section 3.1. CPVT (Chu et al., 2023,
    section 5.3) uses K = 8 and does not say how to extend it to two dimensions. Its Table 8 counts 40,011 positional
    parameters with a learnable embedding (37,824): the other 2,187 = 3 * 27 * 27 are one bias table for all
    layers, as in Swin (encoding 'learnable+shared_relative_bias'), and not of any form of Shaw's encoding, although the
    text says so.

    Args:
        clip: K, in patches.
    """

    crops = True
    dense = False

    def __init__(self, grid: Grid, num_heads: SmallCount, head_dim: Bounded, clip: SmallCount = 8) -> None:
        super().__init__(grid, num_heads)
        self.head_dim, self.clip = head_dim, clip
        self.names = [f"relative_position_{letter}" for letter in axis_letters(len(grid.shape))]
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.empty(2 * clip + 1, head_dim)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the tables: a normal of std 0.02, truncated at 2 (absolute)."""
        for table in self._tables():
            trunc_normal_(table, std=0.02)

    def forward(self, grid: Grid) -> Callable[[Tensor], Tensor]:
        """Return the function that computes the bias on `grid` from scaled queries, (B, h, N, d) -> (B, h, N, N)."""
        return partial(self.bias, grid=grid)

    def bias(self, queries: Tensor, grid: Grid, start: int = 0, stop: int | None = None) -> Tensor:
        """Compute the bias, (B, h, n, M), from scaled queries, (B, h, n, d), of n tokens from `start` on.

        The M keys belong to the tokens before `stop`, or to all N.
        """
        stop = grid.tokens if stop is None else stop
        if (queries.shape[-2], stop) != (grid.tokens, grid.tokens):
            return self._part(queries, grid, start, stop)
        grid.check_pairs(queries.element_size() * math.prod(queries.shape[:-2]), queries.device)
        patches = grid.split(queries)[1].unflatten(-2, grid.shape)  # (B, h, H, W, d)
        displacements = _whole_displacements(grid, queries.device)
        bias: Tensor | None = None
        for axis, (of_axis, table) in enumerate(zip(displacements, self._tables(), strict=True), 2):
            vectors = table[_clipped_offsets(of_axis, self.clip)].to(queries.dtype)  # (H, H, d) and (W, W, d)
            of_table = _products(patches, vectors, axis)  # (B, h, H, W, H)
            # the values of a key's row and column are added, (B, h, H, W, H * W)
            bias = of_table if bias is None else (bias[..., :, None] + of_table[..., None, :]).flatten(-2)
        return grid.with_prefix_bias(cast("Tensor", bias).flatten(2, -2))

    def _part(self, queries: Tensor, grid: Grid, start: int, stop: int) -> Tensor:
        """Compute some rows and columns of the bias, pair by pair, and no others."""
        place = grid.coordinates(queries.device)
        first, last = (max(token - grid.prefix, 0) for token in (start, start + queries.shape[-2]))
        offset = place[None, : max(stop - grid.prefix, 0)] - place[first:last, None]  # (n, M, 2), key - query
        offset = offset.clamp(-self.clip, self.clip) + self.clip
        of_patches = queries[..., queries.shape[-2] - (last - first) :, :]
        bias = queries.new_zeros(())
        for axis, table in enumerate(self._tables()):
            scores = of_patches @ table.to(queries.dtype).T  # (B, h, n, 2K + 1)
            bias = bias + scores.gather(-1, offset[..., axis].expand(*scores.shape[:2], -1, -1))
        return F.pad(bias, (stop - bias.shape[-1], 0, queries.shape[-2] - bias.shape[-2], 0))

    def _tables(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.names]


def _products(patches: Tensor, vectors: Tensor, axis: int) -> Tensor:
    """Return the products of patches (..., n, ..., d) with the vectors of n on `axis`, (n, m, d); (..., n, ..., m).

    This is an `einsum`, with shapes that can be exported for any size. The axis of 1 keeps the optimizer of onnxscript
    from leaving out the flattening, after which n would be multiplied with another axis of the same size.
    """
    first = patches.movedim(axis, 0)  # (n, ..., d)
    products_by_row = (first.flatten(1, -2)[:, None] @ vectors.mT[:, None])[:, 0]
    products: Tensor = products_by_row.unflatten(1, first.shape[1:-1])
    return products.movedim(0, axis).contiguous()


def _whole_displacements(grid: Grid, device: torch.device) -> tuple[Tensor, ...]:
    """Return the displacements on each axis.

    Raises:
        ValueError: if they are not whole numbers, since others have no vector.
    """
    displacements = grid.displacements(device)
    if any(axis.is_floating_point() for axis in displacements):
        raise ValueError(
            "`crop` must not be scaled with shaw, which has a vector for each whole displacement; use one at the scale "
            "of the image."
        )
    return displacements


def _clipped_offsets(displacements: Tensor, clip: int) -> Tensor:
    """Return the row of the table for query i and key j of an axis of n, clip(j - i) + K; (n, n), int64."""
    side = (displacements.shape[0] + 1) // 2
    place = torch.arange(side, device=displacements.device)
    return displacements.clamp(-clip, clip)[place[None, :] - place[:, None] + side - 1] + clip
