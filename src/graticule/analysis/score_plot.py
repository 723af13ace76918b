"""Plot of the scores of several choices: every seed, the mean, and one standard deviation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from matplotlib.figure import Figure

from graticule.analysis.plots import PALETTE
from graticule.checks import printable


def score_plot(
    scores: Mapping[str, Sequence[float]], xlabel: str, title: str = "", groups: Sequence[int] = ()
) -> Figure:
    """Draw one line per choice: a dot per seed, the mean as a diamond, and a bar of one standard deviation.

    Args:
        scores: label -> values over seeds; the first is at the top, and a vertical line continues its mean.
        xlabel: name and unit of the values.
        title: above the plot.
        groups: number of consecutive labels in each group; a vertical line continues the mean of the first label of a
            group through that group alone. One group by default.
    """
    if not scores or not all(scores.values()):
        raise ValueError(f"`scores` must have a value for every label, got {dict(scores)}.")
    groups = groups or [len(scores)]
    if sum(groups) != len(scores) or min(groups) < 1:
        raise ValueError(f"`groups` must be numbers of labels with the sum {len(scores)}, got {list(groups)}.")
    longest = max(map(len, scores))
    figure = Figure(figsize=(max(6.2, 4.2 + min(0.075 * longest, 5.0)), 1.3 + 0.42 * len(scores)), layout="constrained")
    ax = figure.subplots()
    several = any(len(values) > 1 for values in scores.values())
    legend = "\ndots: seeds; diamonds, bars: mean, one s.d." if several else "\none seed each"
    if max(groups) > 1:
        legend += f"\ndotted line: mean of the first choice{' of a group' if len(groups) > 1 else ''}"
    ax.set(xlabel=f"{xlabel}{legend}", title=title)
    ax.xaxis.label.set_parse_math(False)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.grid(axis="x", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    color = PALETTE[0]
    for row, values in enumerate(scores.values()):
        ax.plot(values, [row] * len(values), "o", color=color, alpha=0.35, markersize=5, markeredgewidth=0)
        bar = stdev(values) if len(values) > 1 else None
        ax.errorbar(fmean(values), row, xerr=bar, fmt="D", color=color, capsize=4, markersize=6, linewidth=1.6)
    first = 0
    for number in groups:
        mean = fmean(list(scores.values())[first])
        ends = (first - 0.5, first + number - 0.5)
        ax.plot([mean, mean], ends, color="#666666", linewidth=1, linestyle=(0, (1, 2)), zorder=0)
        if first:
            ax.axhline(first - 0.5, color="#bbbbbb", linewidth=0.6)
        first += number
    ax.set_yticks(range(len(scores)), list(map(printable, scores)), parse_math=False)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(scores) - 0.5, -0.5)
    return figure
