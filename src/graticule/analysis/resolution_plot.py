"""Plot of accuracy against the size of the images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from graticule.analysis.plots import _axes, _check, _legend, _style

Size = tuple[int, int]


def resolution_plot(
    scores: Mapping[str, Mapping[Size, Sequence[float]]],
    trained_at: int | Size,
    ylabel: str = "top-1 accuracy (%)",
    title: str = "",
) -> Figure:
    """Draw accuracy against the size of the test images: means over seeds, with bars of one standard deviation.

    Square sizes are joined by lines. Other sizes are in a separate panel, as points without lines.

    Args:
        scores: label -> (height, width) in pixels -> values over seeds.
        trained_at: pixels, a side or (height, width); marked by a vertical line.
        ylabel: name and unit of the values.
        title: above the plot.
    """
    _check(scores, "scores")
    for label, by_size in scores.items():
        if not all(len(values) for values in by_size.values()):
            raise ValueError(f"`scores` must have a value for every size, got none for some of {label!r}.")
    trained = (trained_at, trained_at) if isinstance(trained_at, int) else (trained_at[0], trained_at[1])
    sizes = sorted({size for by_size in scores.values() for size in by_size} | {trained}, key=_side)
    squares = [size for size in sizes if size[0] == size[1]]
    others = [size for size in sizes if size[0] != size[1]]
    figure, ax = _axes("size of the test images (pixels)", ylabel, title)
    if others and squares:
        wide, high = figure.get_size_inches()
        figure.set_size_inches(wide + 0.6 + 0.5 * len(others), high)
        figure.delaxes(ax)
        ax, beside = figure.subplots(1, 2, sharey=True, width_ratios=(wide, 0.6 + 0.5 * len(others)))
        for panel, name in ((ax, "squares: side (pixels)"), (beside, "other sizes")):
            panel.set_xlabel(name)
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(axis="y", color="#dddddd", linewidth=0.6)
            panel.set_axisbelow(True)
        ax.set_ylabel(ylabel)
        figure.suptitle(title, fontsize=12)
        _draw(beside, scores, {size: float(place) for place, size in enumerate(others)}, trained, joined=False)
        beside.set_xlim(-0.6, len(others) - 0.4)
    if squares:
        _draw(ax, scores, {size: float(size[0]) for size in squares}, trained)
    else:
        _draw(ax, scores, {size: float(place) for place, size in enumerate(others)}, trained, joined=False)
    return _legend(figure, ax)


def _draw(
    ax: Axes,
    scores: Mapping[str, Mapping[Size, Sequence[float]]],
    places: Mapping[Size, float],
    trained: Size,
    joined: bool = True,
) -> None:
    """Draw the scores of some sizes at `places` on the axis, with lines if `joined`."""
    for index, (label, by_size) in enumerate(scores.items()):
        shown = [size for size in places if size in by_size]
        x, means = [places[size] for size in shown], [fmean(by_size[size]) for size in shown]
        bars = [stdev(by_size[size]) if len(by_size[size]) > 1 else 0.0 for size in shown]
        style = _style(index) if joined else {**_style(index), "linestyle": "none"}
        if any(bars):
            ax.errorbar(x, means, bars, capsize=3, label=label, **style)
        else:  # the legend would show bars
            ax.plot(x, means, label=label, **style)
    crowded = len(places) > 8 or any(height != width for height, width in places)
    ax.set_xticks(
        list(places.values()),
        [str(height) if height == width else f"{height} × {width}" for height, width in places],
        rotation=45 if crowded else 0,
        ha="right" if crowded else "center",
        rotation_mode="anchor",
    )
    if trained in places:
        ax.axvline(places[trained], color="#666666", linewidth=1, linestyle=(0, (1, 2)), zorder=0)
        ax.annotate(
            "trained at",
            (places[trained], 0),
            xycoords=("data", "axes fraction"),
            xytext=(3, 4),
            fontsize=8,
            textcoords="offset points",
            color="#444444",
        )


def _side(size: Size) -> float:
    """Return the side of a square with the same number of pixels."""
    return math.sqrt(size[0] * size[1])
