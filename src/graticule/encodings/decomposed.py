"""Decomposed relative positions of SAM: products of the query with a vector per row and per column."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from graticule.encodings.forms.bias import BiasEncoding
from graticule.position.bias import BiasFunction
from graticule.position.grid import Grid
from graticule.position.places import Axis, axis_letters
from graticule.position.position import register_encoding
from graticule.position.resampling import build_resampler
from graticule.registry.fields import Bounded, SmallCount
from graticule.system.memory import check_memory

#: The letters of rows and columns in SAM.
_LETTERS = {"y": "h", "x": "w"}


@register_encoding("decomposed")
class Decomposed(BiasEncoding):
    r"""Adds the product of the query with a learned vector per row offset and another per column offset.

    .. math:: b_{h, i, j} = q_{h, i} \cdot (R^h_{y_i - y_j} + R^w_{x_i - x_j})

    All heads of a layer share the tables, of 2H - 1 and 2W - 1 vectors; each further axis has one. The queries are not
    scaled, as in SAM: only :math:`q \cdot k` is divided by :math:`\sqrt d`. Prefix tokens get no bias. At
    another grid each table is resampled, linearly by default, as in their code. Each query needs products with H + W
    vectors, not with H W.

    Reference: MViTv2 (Li et al., 2022), Eq. 4, which draws the tables from a normal of std 0.02; Segment Anything
    (Kirillov et al., 2023), in global and windowed layers, whose tables start at zero.

    Args:
        scaled: whether the product is divided by :math:`\sqrt d`, too, as in Shaw's encoding.
        resampler: resampler of the tables for another grid.
    """

    resampled = True
    crops = True
    dense = False
    table_kind = "displacements"

    def __init__(
        self,
        grid: Grid,
        num_heads: SmallCount,
        head_dim: Bounded,
        scaled: bool = False,
        resampler: str = "bilinear(antialias=False)",
    ) -> None:
        super().__init__(grid, num_heads)
        self.resampler = build_resampler(resampler, "displacements")
        self.head_dim, self.scaled = head_dim, scaled
        self.names = [f"rel_pos_{_LETTERS.get(letter, letter)}" for letter in axis_letters(len(grid.shape))]
        for name, side in zip(self.names, grid.shape, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(2 * side - 1, head_dim)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the tables: a normal of std 0.02, truncated at 2 (absolute)."""
        for name in self.names:
            trunc_normal_(getattr(self, name), std=0.02)

    def forward(self, grid: Grid) -> BiasFunction:
        """Return the function that computes the bias on `grid` from scaled queries, (B, h, N, d) -> (B, h, N, N)."""
        return partial(self.bias, grid=grid)

    def bias(self, queries: Tensor, grid: Grid, start: int = 0, stop: int | None = None) -> Tensor:
        """Compute the bias, (B, h, n, M), from scaled queries, (B, h, n, d), of n tokens from `start` on.

        The M keys belong to the tokens before `stop`, or to all N.
        """
        stop = grid.tokens if stop is None else stop
        # offsets of the queries' patches from every row and column
        first = max(start - grid.prefix, 0)
        last = max(start + queries.shape[-2] - grid.prefix, first)
        of_patches = queries[..., queries.shape[-2] - (last - first) :, :]  # (B, h, n, d)
        size = queries.element_size() * math.prod(queries.shape[:-1]) * stop
        check_memory("grid", "the values of all pairs of its patches", size, queries.device)
        places = Grid(*grid.shape).coordinates(queries.device)[first:last]
        bias = self._between(of_patches, places, grid)[..., : max(stop - grid.prefix, 0)]
        return F.pad(bias, (stop - bias.shape[-1], 0, queries.shape[-2] - bias.shape[-2], 0))

    def _between(self, queries: Tensor, places: Tensor, grid: Grid) -> Tensor:
        """Compute the bias, (B, h, n, H * W), of queries (B, h, n, d) at `places`, (n, 2)."""
        queries = queries if self.scaled else queries * math.sqrt(self.head_dim)
        bias, *others = (
            self._products(queries, self._vectors(grid, axis).to(queries.dtype), places[:, axis], side)
            for axis, side in enumerate(grid.shape)
        )  # (B, h, n, H) and (B, h, n, W)
        for other in others:
            bias = (bias[..., :, None] + other[..., None, :]).flatten(-2)
        return bias

    def _vectors(self, grid: Grid, axis: int) -> Tensor:
        """Return the vectors of all displacements along an axis of `grid`, (2H - 1, d)."""
        length, side = grid.image_grid.shape[axis], grid.shape[axis]
        table = self._resampled(getattr(self, self.names[axis]), 2 * length - 1)
        if grid.crop is None:
            return table
        displacements = grid.axes[axis].displacements(side)
        return Axis(displacements.first + length - 1, displacements.step).sample(table.T, 2 * side - 1).T

    @staticmethod
    def _products(queries: Tensor, table: Tensor, place: Tensor, side: int) -> Tensor:
        """Return the products of queries (B, h, n, d) at `place`, (n,), with the vectors to every key of an axis."""
        offset = place[:, None] - torch.arange(side, device=place.device) + side - 1  # query - key, from the lowest on
        return (queries @ table.T).gather(-1, offset.expand(*queries.shape[:2], -1, -1))

    def grid_of(self, name: str, value: Tensor, shape: tuple[int, int] | None) -> Grid | None:
        """Infer the grid or window of the table of an axis, (2H' - 1, d), as if all sides were alike."""
        fits = value.ndim == 2 and value.shape[1] == self.head_dim and len(value) % 2
        return Grid(*[(len(value) + 1) // 2] * len(self.names)) if fits else None

    def resample(self, name: str, value: Tensor, old: Grid, new: Grid) -> Tensor:
        """Resample the table of an axis, (2H' - 1, d)."""
        rows = 2 * new.shape[self.names.index(name)] - 1
        return value if len(value) == rows else self._resampled(value, rows)

    def _resampled(self, table: Tensor, rows: int) -> Tensor:
        """Resample a table of vectors over the offsets of an axis, (2H' - 1, d), to (rows, d)."""
        return self.resampler(table.T[:, None], (1, rows))[:, 0].T
