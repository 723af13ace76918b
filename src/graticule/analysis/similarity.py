"""Numbers that summarize the similarity of positions: reach and two-dimensionality."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from graticule.position.grid import Grid
from graticule.system.files import write_arrays
from graticule.system.tables import PrintedTable

Array = NDArray[np.float64]


def cosine_similarity(vectors: Array) -> Array:
    """Return the cosine of every pair of rows, (N, D) -> (N, N); NaN for a row of zeros, which has no direction."""
    with np.errstate(invalid="ignore", divide="ignore"):
        unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.clip(unit @ unit.T, -1, 1)


def reach(similarity: Array, grid: Grid) -> float:
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


def range_of(reaches: Array, uniform: float) -> float:
    """Return the largest minus the smallest, as a share of `uniform`; NaN for fewer than two."""
    finite = reaches[np.isfinite(reaches)]
    return float(np.ptp(finite)) / uniform if len(finite) > 1 and uniform else float("nan")


def two_dimensionality(similarity: Array, grid: Grid) -> float:
    r"""Return the ratio of the axes in the encoding: 1 if vertical neighbors count as much as horizontal ones.

    .. math:: \min(v, h) / \max(v, h), \quad v = \max(\bar s_{\Delta = (1, 0)} - \bar s, 0), \quad
              h = \max(\bar s_{\Delta = (0, 1)} - \bar s, 0)

    v and h are the excess of the mean cosine of neighbors over the mean over all pairs of different tokens. In a video
    or volume there are three of them.
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
    offsets = grid.offsets().numpy()
    pairs = similarity[offsets.any(-1)]
    neighbors = [similarity[(offsets == axis).all(-1)] for axis in np.eye(grid.ndim, dtype=int)]
    excess = [max(near.mean() - pairs.mean(), 0.0) for near in neighbors]
    errors = [max(pairs.std() / len(near) ** 0.5, 1e-9) for near in neighbors]  # smaller ones are of rounding
    if all(value <= 4 * error for value, error in zip(excess, errors, strict=True)):
        return float("nan")
    return float(min(excess) / max(excess))


#: Columns of `Correlations.summary()`.
COLUMNS = ("layer", "sees", "reach (patches)", "of uniform", "two-dimensionality")

#: A range of reaches is more than untrained models show below this p value.
_LEVEL = 0.05


@dataclass(frozen=True, eq=False, repr=False)
class Correlations(PrintedTable):
    """The position correlations of every layer; layers count from 0.

    Args:
        grid: the grid of the tokens; prefix tokens are left out of all arrays.
        similarity: (L, H * W, H * W), cosines; NaN for a layer that receives no position.
        sources: the form in which each layer gets position: 'stream' (residual stream), 'after_norm', 'queries_keys',
            several joined by ' + ', or None.
        initial: (H * W, H * W), cosines of the table w itself; None if the model does not have exactly one table.
        untrained: (n,), `reach_range` of n untrained models of the same shape; None without any.
    """

    grid: Grid
    similarity: Array
    sources: tuple[str | None, ...]
    initial: Array | None = None
    untrained: Array | None = None

    def __post_init__(self) -> None:
        expected = (len(self.sources), self.grid.patches, self.grid.patches)
        if self.similarity.shape != expected:
            raise ValueError(f"`similarity` must be (L, H * W, H * W) = {expected}, got {self.similarity.shape}.")
        if self.initial is not None and self.initial.shape != expected[1:]:
            raise ValueError(f"`initial` must be (H * W, H * W) = {expected[1:]}, got {self.initial.shape}.")

    @property
    def unit(self) -> str:
        """The unit of distances: patches, or tokens of a text."""
        return "tokens" if self.grid.height == 1 else "patches"

    @cached_property
    def center_maps(self) -> Array:
        """The row of the token at (H // 2, W // 2) laid out on the grid, (L, H, W).

        LaPE's figures take row 96 of a 14 x 14 grid, which they call the center; ours is row 105.
        """
        return self.similarity[:, self.grid.center].reshape(-1, *self.grid.shape)

    @cached_property
    def reach(self) -> Array:
        """`reach` of every layer, (L,), in patches."""
        return np.array([reach(s, self.grid) for s in self.similarity])

    @cached_property
    def uniform_distance(self) -> float:
        """The reach of a layer that sees all positions alike, in patches."""
        return reach(np.ones((self.grid.patches, self.grid.patches)), self.grid)

    @cached_property
    def two_dimensionality(self) -> Array:
        """`two_dimensionality` of every layer, (L,)."""
        return np.array([two_dimensionality(s, self.grid) for s in self.similarity])

    @cached_property
    def hierarchy(self) -> float:
        """Spearman's rank correlation of reach with depth, in [-1, 1]: 1 goes from local to global.

        It is over the layers that receive position, at least three; reaches that differ by less than a thousandth
        of a patch count as equal, so that rounding makes no hierarchy. NaN if it is undefined: too few layers, or all
        equal. It depends on ranks alone, not on the size of the differences, and tiny differences can reach 1. So read
        it beside `reach_range` and `p_value`, as `verdict` does.
        """
        depth = np.flatnonzero(np.isfinite(self.reach))
        values = self.reach[depth].round(3)
        if len(depth) < 3 or np.ptp(values) == 0:
            return float("nan")
        return float(stats.spearmanr(depth, values).statistic)

    @cached_property
    def reach_range(self) -> float:
        """Largest minus smallest reach of a layer, as a share of a uniform map's; NaN for fewer than two layers."""
        return range_of(self.reach, self.uniform_distance)

    @cached_property
    def p_value(self) -> float:
        """The share of untrained models, including this model, whose `reach_range` is as large or larger.

        With 39 untrained models it is at least 1 / 40. NaN without untrained models or without a range.
        """
        if self.untrained is None or np.isnan(self.reach_range):
            return float("nan")
        as_large = (self.untrained >= self.reach_range - 1e-6).sum()  # smaller differences are rounding of float32
        return float((1 + as_large) / (1 + len(self.untrained)))

    @property
    def verdict(self) -> str:
        """One line about the range of reach over the layers, and whether untrained models explain it."""
        if np.isnan(self.reach_range):
            return "reach of fewer than two layers: nothing to compare"
        sentence = f"reach over the layers: a range of {100 * self.reach_range:.1f} % of a uniform map's"
        if self.untrained is None:
            return sentence
        if self.p_value >= _LEVEL:
            return f"{sentence}, within what untrained models show (p = {self.p_value:.2g})"
        sentence += f" (p = {self.p_value:.2g}, {len(self.untrained)} untrained models)"
        correlation = f", rank correlation with depth {self.hierarchy:+.2f}"
        return sentence if np.isnan(self.hierarchy) else sentence + correlation

    def summary(self) -> list[tuple[str, ...]]:
        """Return rows for a table: `COLUMNS`, the table w, every layer, and the uniform map."""
        rows: list[tuple[str, ...]] = [tuple(name.replace("patches", self.unit) for name in COLUMNS)]
        if self.initial is not None:
            numbers = reach(self.initial, self.grid), two_dimensionality(self.initial, self.grid)
            rows.append(self._row("w", "table", *numbers))
        for layer, source in enumerate(self.sources):
            numbers = self.reach[layer], self.two_dimensionality[layer]
            rows.append(self._row(str(layer), source or "nothing", *numbers))
        return [*rows, self._row("uniform", "-", self.uniform_distance, float("nan"))]

    @property
    def heading(self) -> str:
        return self.verdict

    def _row(self, name: str, source: str, local: float, planar: float) -> tuple[str, ...]:
        share = 100 * local / self.uniform_distance if self.uniform_distance else float("nan")
        return (
            name,
            source,
            format_number(local, ".2f"),
            format_number(share, ".0f", " %"),
            format_number(planar, ".2f"),
        )

    def save(self, path: str | Path) -> Path:
        """Write all arrays and numbers to `path` as .npz, completely or not at all; returns the path."""
        names = ("similarity", "center_maps", "reach", "uniform_distance", "two_dimensionality", "reach_range")
        arrays = {
            "grid": np.array([*self.grid.shape, self.grid.prefix]),
            "sources": np.array([source or "" for source in self.sources], dtype=np.str_),
            **{name: getattr(self, name) for name in (*names, "p_value", "hierarchy", "initial", "untrained")},
        }
        return write_arrays(path, {name: array for name, array in arrays.items() if array is not None})


def format_number(value: float, form: str, unit: str = "") -> str:
    """Return a number as text; '-' for NaN."""
    return "-" if np.isnan(value) else f"{value:{form}}{unit}"
