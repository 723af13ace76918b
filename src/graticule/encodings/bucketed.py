"""T5's relative bias: one number per head for each bucket of offsets; distant buckets are wider."""

from __future__ import annotations

from math import ceil, gcd

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from graticule.encodings.forms.bias import BiasEncoding
from graticule.position.grid import Grid
from graticule.position.places import axis_letters, by
from graticule.position.position import register_encoding
from graticule.registry.fields import Bounded, SmallCount


@register_encoding("bucketed_bias")
class BucketedBias(BiasEncoding):
    r"""Adds one learned number per head and bucket of offsets to the logits: exact nearby, logarithmic beyond.

    .. math:: b_{h, i, j} = T_h[g(j - i)], \quad g(t) = \begin{cases} |t| & |t| < m \\
              \min(M - 1, m + \lfloor \frac{\ln(|t| / m)}{\ln(L / m)} (M - m) \rfloor) & |t| \ge m \end{cases}

    with m = M / 2, for M buckets per direction and `max_distance` L, in patches. Offsets to keys after the query,
    j > i, have M buckets of their own, so M is half of `buckets`; the one at distance 0 is never used, as in its code.
    With `causal` all buckets are for keys before the query, and later keys share the bucket of offset 0: the decoder of
    T5, for a text with causal attention. The edges of the buckets are computed in integers, without
    rounded logarithms.

    In a text this is T5's bias. In an image the bias is the sum of one for the row offset and one for the column
    offset, each with its own table, as in iRPE's cross method; further axes have theirs. An axis with one patch has
    none, unless it is the last. Prefix tokens get no bias. Nothing is
    resampled at another grid: offsets of `max_distance` and beyond share a bucket.

    Reference: Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer (T5, Raffel et al.,
    2020), section 2.1; one table per axis as in the cross method of iRPE (Wu et al., 2021). T5 starts from a larger
    standard deviation, and does not divide its logits by the root of d, which is left to the attention.

    Args:
        buckets: number of buckets of an axis, a multiple of 4, or of 2 with `causal`.
        max_distance: L, larger than m.
        causal: whether later keys are never attended to, for texts.
    """

    shared = True
    crops = True
    edges: Tensor

    def __init__(
        self,
        grid: Grid,
        num_heads: SmallCount,
        buckets: Bounded = 32,
        max_distance: Bounded = 128,
        causal: bool = False,
    ) -> None:
        super().__init__(grid, num_heads)
        step = 2 if causal else 4
        if buckets < step or buckets % step:
            raise ValueError(f"`buckets` must be a multiple of {step}, got {buckets}.")
        side = buckets if causal else buckets // 2
        if max_distance <= side // 2:
            raise ValueError(f"`max_distance` must be more than the {side // 2} exact buckets, got {max_distance}.")
        self.buckets, self.max_distance, self.causal = buckets, max_distance, causal
        last = len(grid.shape) - 1
        self.axes = [axis for axis, side in enumerate(grid.shape) if axis == last or (side > 1 and not causal)]
        self._check(grid)
        self.init_non_persistent_buffers()
        self.relative_attention_bias = nn.Parameter(torch.empty(buckets, num_heads))
        # the table of an axis with one patch would be one number per head, which a softmax cancels
        self.names = [
            "relative_attention_bias",
            *(f"relative_attention_bias_{axis_letters(last + 1)[axis]}" for axis in self.axes[:-1][::-1]),
        ]
        for name in self.names[1:]:
            self.register_parameter(name, nn.Parameter(torch.empty(buckets, num_heads)))
        self.reset_parameters()

    def compute_buffers(self, device: torch.device | None, dtype: torch.dtype) -> dict[str, Tensor]:
        side = self.buckets if self.causal else self.buckets // 2
        return {"edges": torch.tensor(edges(side, self.max_distance), device=device)}

    def reset_parameters(self) -> None:
        """Initialize the tables: a normal of std 0.02, truncated at 2 (absolute), as in `RelativeBias`."""
        for table in self.parameters():
            trunc_normal_(table, std=0.02)

    def forward(self, grid: Grid) -> Tensor:
        self._check(grid)
        displacements = grid.displacements(self.relative_attention_bias.device)
        first, *others = (
            self._of_axis(getattr(self, name), displacements[axis])
            for name, axis in zip(self.names, self.axes[::-1], strict=True)
        )
        for other in others:  # (h, H, H), and the sum so far (h, W, W)
            first = other[:, :, None, :, None] + first[:, None, :, None, :]  # (h, H, W, H, W)
            first = first.flatten(3).flatten(1, 2)
        return grid.with_prefix_bias(first)

    def set_grid(self, grid: Grid) -> None:
        self._check(grid)
        self.grid = grid

    def bucket(self, offset: Tensor) -> Tensor:
        """Return the bucket of offsets of keys from queries, j - i, int64, of any shape."""
        if self.causal:
            return torch.bucketize(-offset, self.edges, right=True)
        return torch.bucketize(offset.abs(), self.edges, right=True) + (offset > 0) * (self.buckets // 2)

    def _of_axis(self, table: Tensor, displacements: Tensor) -> Tensor:
        """Return the bias between the n coordinates of an axis, (h, n, n), from their 2n - 1 displacements."""
        side = (displacements.shape[0] + 1) // 2
        place = torch.arange(side, device=table.device)
        by_offset = self.bucket(displacements)  # (2n - 1,)
        index = place[None, :] - place[:, None] + side - 1
        return table.T.index_select(1, by_offset).index_select(1, index.flatten()).unflatten(1, index.shape)

    def _check(self, grid: Grid) -> None:
        if any(side > 1 and axis not in self.axes for axis, side in enumerate(grid.shape)):
            raise ValueError(
                f"`grid` must have height 1, for which the bias is built, or one patch on each axis without a table, "
                f"got {by(grid.shape)} patches."
            )


def edges(buckets: int, max_distance: int) -> list[int]:
    """Return the smallest distance of every bucket of a direction except the first, which is for distance 0.

    Bucket m + t starts at the smallest n with (n / m)^(M - m) >= (L / m)^t, where floats that are near a whole number
    are compared in integers.
    """
    exact = buckets // 2
    steps = buckets - exact
    wide = []
    for t in range(steps):
        start = exact * (max_distance / exact) ** (t / steps)
        n = round(start)
        if abs(start - n) < 1e-6:
            shared = gcd(t, steps)
            a, b = steps // shared, t // shared
            wide.append(n if n**a * exact**b >= max_distance**b * exact**a else n + 1)
        else:
            wide.append(ceil(start))
    return [*range(1, exact), *wide]
