"""Plots of scores: against the epoch, the size of images, the length of texts; and of all seeds of each choice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from graticule.lab.figures.style import DOTTED, PALETTE, add_legend, check_lines, draw_line, new_axes
from graticule.lab.training.results import Metric
from graticule.lab.training.task import metric_of
from graticule.registry.checks import printable

Size = tuple[int, ...]
#: Label -> size of an image, length or position of tokens -> values over seeds.
Scores = Mapping[str, Mapping[Any, Sequence[float]]]


def resolution_plot(scores: Scores, trained_at: int | Size, ylabel: str = "top-1 accuracy (%)") -> Figure:
    """Draw accuracy against the size of the test images: means over seeds, with bars of one standard deviation.

    Squares are joined by lines. If other sizes are among them, all are points in the order of their areas.

    Args:
        scores: label -> (height, width) in pixels -> values over seeds.
        trained_at: pixels, a side or (height, width); marked by a vertical line.
        ylabel: name and unit of the values.
    """
    check_lines(scores, "scores")
    for label, by_size in scores.items():
        if not all(len(values) for values in by_size.values()):
            raise ValueError(f"`scores` must have a value for every size, got none for some of {label!r}.")
    trained = (trained_at, trained_at) if isinstance(trained_at, int) else tuple(trained_at)
    sizes = sorted({size for by_size in scores.values() for size in by_size} | {trained}, key=math.prod)
    squares = all(len(set(size)) == 1 for size in sizes)
    places = {size: float(size[0] if squares else place) for place, size in enumerate(sizes)}
    figure, ax = new_axes("size of the test images (pixels)", ylabel)
    several = any(len(values) > 1 for by_size in scores.values() for values in by_size.values())
    # bars of equal places would hide each other
    step = 0.012 * (places[sizes[-1]] - places[sizes[0]]) if several else 0.0
    style: dict[str, Any] = {} if squares else {"linestyle": "none"}
    for index, (label, by_size) in enumerate(scores.items()):
        measured = [size for size in sizes if size in by_size]
        x = [places[size] + step * (index - (len(scores) - 1) / 2) for size in measured]
        means = [fmean(by_size[size]) for size in measured]
        bars = [stdev(by_size[size]) if len(by_size[size]) > 1 else 0.0 for size in measured]
        draw_line(ax, index, label, x, means, bars if several else None, **style)
    ax.axvline(places[trained], color="#666666", linewidth=1, linestyle=DOTTED, zorder=0)
    names = [str(size[0]) if len(set(size)) == 1 else " × ".join(map(str, size)) for size in places]
    slanted = len(places) > 8 or not squares  # so that names do not overlap
    angle, side = (45, "right") if slanted else (0, "center")
    ax.set_xticks(list(places.values()), names, rotation=angle, ha=side, rotation_mode="anchor")
    ax.annotate(
        "trained at",
        (places[trained], 0),
        xycoords=("data", "axes fraction"),
        xytext=(3, 4),
        fontsize=8,
        textcoords="offset points",
        color="#444444",
    )
    return add_legend(figure, ax)


def score_plot(scores: Mapping[str, Sequence[float]], xlabel: str) -> Figure:
    """Draw one line per choice: the mean as a diamond with a bar of one standard deviation, and a dot per seed below.

    Args:
        scores: label -> values over seeds; the first is at the top, and a vertical line continues its mean.
        xlabel: name and unit of the values.
    """
    if not scores or not all(scores.values()):
        raise ValueError(f"`scores` must have a value for every label, got {dict(scores)}.")
    longest = max(map(len, scores))
    figure = Figure(figsize=(max(6.2, 4.2 + min(0.075 * longest, 5.0)), 1.3 + 0.42 * len(scores)), layout="constrained")
    ax = figure.subplots()
    several = any(len(values) > 1 for values in scores.values())
    counts = sorted({len(values) for values in scores.values()})
    count = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    legend = f"\ndots: {count} seeds; diamonds, bars: mean, one s.d." if several else "\none seed each"
    if len(scores) > 1:
        legend += "\ndotted line: mean of the first choice"
    ax.set(xlabel=f"{xlabel}{legend}")
    ax.xaxis.label.set_parse_math(False)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.grid(axis="x", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    color = PALETTE[0]
    for row, values in enumerate(scores.values()):
        if len(values) > 1:
            ax.plot(values, [row + 0.24] * len(values), "o", color=color, alpha=0.4, markersize=4.5, markeredgewidth=0)
        bar = stdev(values) if len(values) > 1 else None
        ax.errorbar(fmean(values), row, xerr=bar, fmt="D", color=color, capsize=4, markersize=6, linewidth=1.6)
    ax.axvline(fmean(next(iter(scores.values()))), color="#666666", linewidth=1, linestyle=DOTTED, zorder=0)
    ax.set_yticks(range(len(scores)), list(map(printable, scores)), parse_math=False)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(scores) - 0.5, -0.5)
    return figure


#: Columns of the metrics of every run -> label of the axis.
LOSSES = {"train_loss": "loss in training", "val_loss": "loss on validation"}
MOST_LINES = 28  # that can be told apart


def convergence_plot(
    lines: Mapping[str, Sequence[tuple[float, float, float | None]]], metric: Metric | str = "val_top1", title: str = ""
) -> Figure:
    """Draw a metric against the epoch of training, one line per run, or a mean with a band.

    A line has a gap where its value is not finite.

    Reference: LaPE (Yu et al., 2023), Figure 5; CPVT (Chu et al., 2023), Figure 4.

    Args:
        lines: label -> (epoch, value, standard deviation or None) in order; labels are drawn as they are.
        metric: the metric of the values, such as a task's, or the name of a column of metrics.csv.
        title: above the plot.
    """
    if not 1 <= len(lines) <= MOST_LINES:
        raise ValueError(f"`lines` must be 1 to {MOST_LINES}, so that no two look the same, got {len(lines)}.")
    if empty := [label for label, points in lines.items() if not points]:
        raise ValueError(f"`lines` must have at least one point each, got none for {empty[0]!r}.")
    figure, ax = new_axes("epoch", axis_label(metric), title)
    for index, (label, points) in enumerate(lines.items()):
        x, mean, deviation = zip(*map(_finite, points), strict=True)
        style: dict[str, Any] = {"marker": None} if len(points) > 30 else {}  # a chain of markers hides the line
        draw_line(ax, index, label, x, mean, [value or 0.0 for value in deviation], band=True, **style)
    add_legend(figure, ax)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if len(lines) == 1:  # a title says what it is
        figure.legends[0].set_visible(False)
    return figure


def axis_label(metric: Metric | str) -> str:
    """Return the label of the axis of a metric, or of a column of metrics.csv."""
    if isinstance(metric, str):
        if metric in LOSSES:
            return LOSSES[metric]
        known = metric_of(metric)
        if known is None:
            return "learning rate" if metric == "lr" else metric
        metric = known
    return f"{metric.label} on validation" + (f" ({metric.unit})" if metric.unit else "")


def _finite(point: tuple[float, float, float | None]) -> tuple[float, float, float | None]:
    """Return a point with NaN for a value that is not finite."""
    x, y, deviation = point
    if not math.isfinite(y):
        y, deviation = math.nan, None if deviation is None else math.nan
    return x, y, deviation
