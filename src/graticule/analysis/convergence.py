"""Convergence curves: a metric over the course of training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from graticule.analysis.plots import curves
from graticule.metric import METRICS, Metric

#: Columns of the metrics of every run -> label of the axis.
LOSSES = {"train_loss": "loss in training", "val_loss": "loss on validation"}
MOST_LINES = 28  # that can be told apart


def convergence_plot(
    lines: Mapping[str, Sequence[tuple[float, float, float | None]]],
    metric: Metric | str = "val_top1",
    against: str = "epoch",
    title: str = "",
) -> Figure:
    """Draw a metric against the epoch or the seconds of training, one line per run, or a mean with a band.

    A line has a gap where its value is not finite; a point between two gaps is a dot.

    Reference: LaPE (Yu et al., 2023), Figure 5; CPVT (Chu et al., 2023), Figure 4.

    Args:
        lines: label -> (epoch or seconds, value, standard deviation or None) in order; labels are drawn as they are.
        metric: the metric of the values, such as that of a task, or the name of a column of metrics.csv.
        against: epoch, or seconds; long times are drawn in minutes or hours.
        title: above the plot.
    """
    if against not in ("epoch", "seconds"):
        raise ValueError(f"`against` must be epoch or seconds, got {against!r}.")
    if not 1 <= len(lines) <= MOST_LINES:
        raise ValueError(f"`lines` must be 1 to {MOST_LINES}, so that no two look the same, got {len(lines)}.")
    if empty := [label for label, points in lines.items() if not points]:
        raise ValueError(f"`lines` must have at least one point each, got none for {empty[0]!r}.")
    longest = max(points[-1][0] for points in lines.values())
    unit, size = ("epoch", 1.0) if against == "epoch" else _unit(longest)
    # matplotlib leaves out labels that begin with _, and reads $ as mathematics: so the labels are set at the end
    drawn = {str(index).rjust(len(label), "m"): label for index, label in enumerate(lines)}
    figure = curves(
        {stand: [_scaled(point, size) for point in lines[label]] for stand, label in drawn.items()},
        unit if against == "epoch" else f"time of training ({unit})",
        axis_label(metric),
        title,
    )
    ax = figure.axes[0]
    for label_of_ax in (ax.title, ax.yaxis.label):
        label_of_ax.set_parse_math(False)
    if against == "epoch":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for line, label, text in zip(list(ax.lines), lines, figure.legends[0].get_texts(), strict=True):
        line.set_label(label)
        text.set_text(label)
        text.set_parse_math(False)
        x, y = np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float)
        known = np.pad(np.isfinite(y), 1)
        alone = known[1:-1] & ~known[:-2] & ~known[2:]
        if alone.any() and line.get_marker() in (None, "None", ""):
            ax.plot(x[alone], y[alone], ".", color=line.get_color(), markersize=5)
    return figure


def axis_label(metric: Metric | str) -> str:
    """Return the label of the axis of a metric, or of a column of metrics.csv."""
    if isinstance(metric, str):
        known = next((one for one in METRICS if one.column == metric), None)
        if known is None:
            return LOSSES.get(metric, "learning rate" if metric == "lr" else metric)
        metric = known
    return f"{metric.label} on validation" + (f" ({metric.unit})" if metric.unit else "")


def _scaled(point: tuple[float, float, float | None], size: float) -> tuple[float, float, float | None]:
    """Return x in units of `size`, and NaN for values that are not finite."""
    x, y, deviation = point
    if not math.isfinite(y):
        y, deviation = math.nan, None if deviation is None else math.nan
    return x / size, y, deviation


def _unit(seconds: float) -> tuple[str, float]:
    """Return the unit of time for a duration, and its length in seconds."""
    return ("s", 1.0) if seconds < 600 else ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)
