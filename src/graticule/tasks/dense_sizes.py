"""The sizes that dense models are evaluated at, and the figure of their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graticule.data.dense_augmentation import fitted_sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def read_fits(sizes: Sequence[str], recipe: Any) -> list[tuple[int, int]]:
    """Return the shorter and the longer side that images are fitted to, for each size; those of the recipe by default.

    Raises:
        ValueError: for an invalid size.
    """
    return fitted_sizes(tuple(sizes), "sizes") or [tuple(recipe.fit)]


def size_figure(
    curves: Mapping[str, Mapping[tuple[int, int], float]], label: str, trained: tuple[int, int]
) -> Figure | None:
    """Plot scores against the shorter side of images, one line per run; None for a single size."""
    if len({size for curve in curves.values() for size in curve}) < 2:
        return None
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, curve in curves.items():
        points = sorted(curve.items())
        axes.plot([size[0] for size, _ in points], [score for _, score in points], marker="o", label=name)
    axes.axvline(trained[0], color="gray", linestyle=":", label="trained at")
    axes.set(xlabel="shorter side of the images (pixels)", ylabel=label)
    axes.legend()
    return figure
