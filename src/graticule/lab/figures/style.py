"""The style of all figures: colors, markers, panels, lines with their errors, and the legend below."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

SIMILARITY = "viridis"  # even in lightness: it survives a gray printer and every kind of color vision

#: Okabe and Ito's colors, which people with any color vision can tell apart, darkest first; markers and
#: dashes tell them apart in gray.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX*<"  # no divisor in common with colors and dashes, so that points without lines differ too
DASHES = ("-", "--", "-.", ":")
#: The dashes of lines that are no data.
DOTTED: Any = (0, (1, 2))


def axes_at(figure: Figure, x: float, y: float, wide: float, high: float) -> Axes:
    """Add axes whose upper left corner is `x` inches from the left and `y` from the top."""
    across, down = figure.get_size_inches()
    return figure.add_axes((x / across, (down - y - high) / down, wide / across, high / down))


def add_title(figure: Figure, title: str, middle: float = 0.5) -> None:
    """Write the title of a figure whose panels are placed by hand; `middle` is a share of the width."""
    high = figure.get_size_inches()[1]
    figure.text(middle, 1 - 0.25 / high, title, ha="center", va="center", fontsize=12)


def wrap_notes(notes: Sequence[str], width: float) -> list[str]:
    """Break the notes below a figure into lines for its width in inches."""
    unbroken = [note.replace(" = ", "\0=\0") for note in notes]
    return [line.replace("\0", " ") for note in unbroken for line in textwrap.wrap(note, int(14.5 * width))]


def add_notes(figure: Figure, lines: Sequence[str]) -> None:
    """Write lines at the bottom of a figure whose panels are placed by hand, 0.2 inches each."""
    for index, line in enumerate(lines, start=1):
        height = (0.18 + 0.2 * (len(lines) - index)) / figure.get_size_inches()[1]
        figure.text(0.5, height, line, ha="center", va="center", fontsize=9)


def mark(ax: Axes, x: float, y: float, size: float = 5, shape: str = "o", color: str = "black") -> None:
    """Mark a token of a map, visibly on dark and on light."""
    for edge, width in (("white", 2.6), (color, 1.2)):
        ax.plot(x, y, shape, markersize=size, mfc="none", mec=edge, mew=width)


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced indices of `count` things, from the first to the last."""
    return sorted({round(index) for index in np.linspace(0, count - 1, min(count, most))})


def check_lines(lines: Mapping[str, Any], name: str) -> None:
    """Check that there is at least one line."""
    if not lines:
        raise ValueError(f"`{name}` must hold at least one line, got none.")


def new_axes(
    xlabel: str, ylabel: str, title: str = "", figsize: tuple[float, float] = (6.4, 4.2)
) -> tuple[Figure, Axes]:
    """Return a figure with one panel."""
    figure = Figure(figsize=figsize, layout="constrained")
    ax = figure.subplots()
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    decorate(ax)
    return figure, ax


def layer_panels(*ylabels: str, figsize: tuple[float, float], **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels side by side, whose x-axes are the layers, counted from 0."""
    figure = Figure(figsize=figsize, layout="constrained")
    panels = list(figure.subplots(1, len(ylabels), squeeze=False, **options)[0])
    for ax, ylabel in zip(panels, ylabels, strict=True):
        ax.set(xlabel="layer", ylabel=ylabel)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        decorate(ax)
    return figure, panels


def decorate(ax: Axes) -> None:
    """Show the left and the lower edge of a panel only, and horizontal lines behind what is drawn."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)


def line_style(index: int) -> dict[str, Any]:
    """Return the style of the line `index`; the first 28 styles are all different."""
    return {
        "color": PALETTE[index % len(PALETTE)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
        "linewidth": 1.6,
        "markersize": 5,
    }


def draw_line(
    ax: Axes,
    index: int,
    label: str,
    x: ArrayLike,
    values: ArrayLike,
    errors: ArrayLike | None = None,
    *,
    band: bool = False,
    **style: Any,
) -> None:
    """Draw the line `index` of a panel, with errors as bars or as a band.

    Args:
        ax: the panel.
        index: of the line, which decides its style.
        label: its name in the legend.
        x: places on the axis, (n,).
        values: (n,).
        errors: on either side of each value, (n,). The lines of a panel have bars together or none: matplotlib lists
            those with bars last in a legend.
        band: fill the range of the errors.
        style: changes of the style.
    """
    style = {**line_style(index), **style}
    label = f" {label}" if label.startswith("_") else label  # which matplotlib leaves out of a legend
    if errors is not None and not band:
        ax.errorbar(x, values, np.asarray(errors), label=label, capsize=3, **style)
        return
    ax.plot(x, values, label=label, **style)
    if errors is not None and np.any(errors):
        low, high = np.subtract(values, errors), np.add(values, errors)
        ax.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def draw_level(ax: Axes, value: float, text: str) -> None:
    """Draw a dotted horizontal line at a value with a meaning, and name it at its left end."""
    ax.axhline(value, color="#555555", linewidth=1, linestyle=DOTTED)
    ax.annotate(
        text,
        (0, value),
        (4, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        fontsize=8,
        color="#444444",
    )


def add_legend(figure: Figure, ax: Axes) -> Figure:
    """Put the legend below the axes, where it hides nothing; a long one makes the figure taller."""
    handles, labels = ax.get_legend_handles_labels()
    longest = max(map(len, labels), default=1)
    width, height = figure.get_size_inches()
    columns = max(1, min(len(labels), int(11.25 * width) // (longest + 6)))
    rows = math.ceil(len(labels) / columns)
    figure.set_size_inches(width, height + 0.2 * max(0, rows - 3))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False, handlelength=2.8
    )
    return figure
