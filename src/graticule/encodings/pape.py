"""PaPE: a sum of parabolas of the displacement, with coefficients computed from the token of the query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import combinations_with_replacement
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.encodings.forms.bias import BiasEncoding
from graticule.position.bias import LowRank
from graticule.position.grid import Grid
from graticule.position.joining import Joining
from graticule.position.layer import LayerPosition
from graticule.position.position import Position, Site, register_encoding


@register_encoding("pape")
class Pape(BiasEncoding):
    r"""Adds a sum of parabolas of the displacement, with coefficients computed from the token of the query (PaPE).

    .. math:: b_{h, i, j} = \frac{1}{\sqrt d} \sum_{m=1}^{M} -a_{h, m, i}\, t_m^2 - b_{h, m, i}\, t_m, \quad
              t_m = w_{h, m} \cdot (p_j - p_i), \quad a_i = softplus(A x_i), \quad b_i = B x_i

    with M parabolas per head along learned directions w, and x the tokens after the norm, from which queries are
    projected. `rotation_invariant` is the paper's PaPE-RI: one parabola of the Euclidean distance per head, b = 0, and
    fixed scales instead of w, uniform within 1 / sqrt(2).

    As a function of the key, the bias is a quadratic polynomial of its coordinates, so in an image it needs six more
    channels of queries and keys for any M, and no table per sample. Positions are (y, x) in patches, relative to the
    center of the grid. In the paper the class token is at the corner before the first patch; here prefix tokens get no
    bias, so that the bias depends on displacements alone. Nothing is resampled at another grid.

    Reference: Parabolic Position Encoding: Vision-Centric, Principled, Extrapolatable, General (PaPE, Øhrstrøm et al.,
    2026) and its code.

    Args:
        parabolas: M; not used with `rotation_invariant`.
        rotation_invariant: whether the bias depends on the distance alone.
    """

    crops = True

    def __init__(
        self,
        grid: Grid,
        dim: int,
        num_heads: int,
        head_dim: int,
        parabolas: int = 50,
        rotation_invariant: bool = False,
    ) -> None:
        super().__init__(grid, num_heads)
        self.head_dim, self.parabolas = head_dim, parabolas
        self.rotation_invariant = rotation_invariant
        if rotation_invariant:
            self.a = nn.Linear(dim, num_heads, bias=False)
            self.register_buffer("position_scales", (2 * torch.rand(num_heads) - 1) / math.sqrt(2))
            self.position_scales: Tensor
        else:
            self.directions = nn.Linear(len(grid.shape), num_heads * parabolas, bias=False)
            self.ab = nn.Linear(dim, 2 * num_heads * parabolas, bias=False)

    @classmethod
    def position(
        cls, site: Site, joining: Joining, *, heads: tuple[int, ...] | None = None, **options: Any
    ) -> Position:
        """Build one per joined layer."""
        if heads is not None:
            raise ValueError(f"`heads` must be None with pape, which cannot be restricted to some heads, got {heads}.")
        return super().position(site, joining, **options)

    def forward(self, grid: Grid) -> LayerPosition:
        """Return the position of a layer on `grid`: `token_bias`, which computes the bias from tokens, (B, N, D)."""
        return LayerPosition(token_bias=partial(self.factors, grid=grid))

    def factors(self, tokens: Tensor, grid: Grid, start: int = 0, stop: int | None = None) -> LowRank:
        """Compute the factors, (B, h, n, 6) and (1, 1, M, 6), from tokens (B, n, D), the first of which is `start`.

        There are 6 channels in an image, (a + 1)(a + 2) / 2 on a axes. The M keys are those of the tokens before
        `stop`, or of all N.
        """
        wide = torch.promote_types(tokens.dtype, torch.float32)
        place = grid.coordinates(tokens.device).to(wide)
        place = grid.with_prefix_rows(place - place.mean(0))  # (N, axes)
        patch = grid.with_prefix_rows(torch.ones_like(place[grid.prefix :, :1]))  # 0 for a prefix token
        p, own = place.unbind(-1), slice(start, start + tokens.shape[-2])
        pairs = _pairs(len(p))
        squares = torch.stack([(1 if a == b else 2) * p[a] * p[b] for a, b in pairs], -1)
        keys = torch.cat([patch, place, squares], -1)[:stop]
        quadratic, b = self._polynomial(tokens, wide)  # of (p_j - p_i), (B, h, n) each
        p = tuple(each[own] for each in p)
        # a + b . p + p^T C p at p_j, with its coefficients at p_i
        terms = [(1 if i == j else 2) * c * p[i] * p[j] for c, (i, j) in zip(quadratic, pairs, strict=True)]
        constant: Any = -_sum(terms)
        for each, slope in zip(p, b, strict=True):
            constant = constant + slope * each
        matrix = dict(zip(pairs, quadratic, strict=True))
        rows = [[matrix[min(i, j), max(i, j)] for j in range(len(p))] for i in range(len(p))]
        linear = [
            2 * _sum([c * each for c, each in zip(row, p, strict=True)]) - slope
            for row, slope in zip(rows, b, strict=True)
        ]
        queries = torch.stack([constant, *linear, *(-c for c in quadratic)], -1) * patch[own] / math.sqrt(self.head_dim)
        return LowRank(queries, keys[None, None])

    def _polynomial(self, tokens: Tensor, wide: torch.dtype) -> Any:
        """Return the sums over m of a w w^T, as (yy, yx, xx), and of b w, as (y, x), (B, h, n) each."""
        axes = len(self.grid.shape)
        if self.rotation_invariant:
            strength = F.softplus(self.a(tokens).to(wide)).mT * self.position_scales.to(wide).square()[:, None]
            zero = torch.zeros_like(strength)
            return [strength if a == b else zero for a, b in _pairs(axes)], [zero] * axes
        a, b = self.ab(tokens).to(wide).unflatten(-1, (2, self.num_heads, self.parabolas)).unbind(-3)
        each = self.directions.weight.to(wide).unflatten(0, (self.num_heads, self.parabolas)).unbind(-1)  # (h, M)
        a = F.softplus(a)
        quadratic = [(a * (each[i] * each[j])).sum(-1).mT for i, j in _pairs(axes)]
        return quadratic, [(b * w).sum(-1).mT for w in each]


def _pairs(axes: int) -> list[tuple[int, int]]:
    """Return the pairs of axes of a symmetric matrix, (yy, yx, xx) in an image."""
    return list(combinations_with_replacement(range(axes), 2))


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return sum(terms[1:], terms[0])
