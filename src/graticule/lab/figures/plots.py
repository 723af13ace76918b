"""Figures of position correlations, of curves, and of translation equivariance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from graticule.analysis.equivariance import Translation
from graticule.analysis.similarity import Array, Correlations, locality

COLUMNS = 7  # of a sheet
SIMILARITY = "viridis"  # even in lightness: it survives a gray printer and every kind of color vision

#: Okabe and Ito's colors, which people with any color vision can tell apart, darkest first; markers and
#: dashes tell them apart in gray.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX"
DASHES = ("-", "--", "-.", ":")

Size = tuple[int, int]


def correlation_sheet(correlations: Correlations, title: str, limits: tuple[float, float] = (-1.0, 1.0)) -> Figure:
    """Draw, for the table w and for every layer, all pairs of tokens and beneath them the center token's map.

    Of a text, which is drawn as one row, the center token's row is drawn as a line.

    All sheets have one color scale, from -1 to 1, so that any two can be compared. The center token is marked. A layer
    that receives no position is an empty panel that says so.

    Reference: LaPE (Yu et al., 2023), Figures 3 and 4.

    Args:
        correlations: those of one model.
        title: above the sheet.
        limits: the ends of the color scale.
    """
    panels = list(_panels(correlations))
    bands = max(1, math.ceil(len(panels) / COLUMNS))
    columns = math.ceil(len(panels) / bands)
    height, width = correlations.grid.shape
    # every length is in inches and every panel is placed by hand: no layout engine makes them all alike
    side, gap, left, right, top, bottom = 1.7, 0.12, 0.6, 1.0, 0.45, 0.55
    across = side * min(1.0, 1.6 * width / height)  # of a map, narrower than its column on a tall grid
    down = across * height / width if height > 1 else 0.7
    band_height = 0.3 + side + 0.1 + down + 0.35  # name, pairs, gap, map, number
    needed = left + columns * (side + gap) + right
    inches = np.array([max(needed, 6.8), top + bands * band_height + bottom])
    left += (inches[0] - needed) / 2
    figure = Figure(figsize=(inches[0], inches[1]))

    low, high = limits
    scale: dict[str, Any] = {"cmap": SIMILARITY, "norm": Normalize(low, high)}
    for index, (name, image) in enumerate(panels):
        band, column = divmod(index, columns)
        x, y = left + column * (side + gap), top + band * band_height + 0.3
        pairs = axes_at(figure, x, y, side, side)
        center = axes_at(figure, x + (side - across) / 2, y + side + 0.1, across, down)
        pairs.set_title(name, fontsize=10, pad=4)
        for ax in (pairs, center):
            ax.set(xticks=[], yticks=[])
        if column == 0:
            tokens = correlations.grid.patches
            pairs.set_ylabel(f"all pairs\n{tokens} × {tokens}", fontsize=9)
            center.set_ylabel(f"center token\n{height} × {width}" if height > 1 else "center\ntoken", fontsize=9)
        if image is None:
            _draw_nothing(pairs)
            _draw_nothing(center)
            continue
        pairs.imshow(image, **scale)
        row = image[correlations.grid.center]
        if height > 1:
            center.imshow(row.reshape(height, width), interpolation="nearest", **scale)
            spot: tuple[float, float] = divmod(correlations.grid.center, width)[::-1]
        else:
            center.plot(row, color=PALETTE[0], linewidth=1)
            center.set(xlim=(-0.5, width - 0.5), ylim=(low - 0.05 * (high - low), high + 0.05 * (high - low)))
            spot = correlations.grid.center, row[correlations.grid.center]
        for color, edge in (("white", 2.6), ("black", 1.2)):  # visible on dark and on light
            center.plot(*spot, "o", markersize=5, mfc="none", mec=color, mew=edge)
        center.set_xlabel(f"locality {locality(image, correlations.grid):.2f}", fontsize=9)
    long = min(band_height - 0.65, 4.0)
    bar = axes_at(figure, left + columns * (side + gap) + 0.1, top + 0.3, 0.16, long)
    figure.colorbar(ScalarMappable(**scale), cax=bar)
    bar.set_ylabel("cosine similarity", fontsize=9)
    bar.tick_params(labelsize=8)
    middle = (left + columns * (side + gap) / 2) / inches[0]
    figure.text(middle, 1 - 0.25 / inches[1], title, ha="center", va="center", fontsize=12)
    note = f"locality: mean distance in {correlations.unit} under the map"
    note += f"; {correlations.uniform_distance:.2f} for a uniform map"
    for line, text in enumerate((note, correlations.verdict)):
        figure.text(middle, (0.38 - 0.2 * line) / inches[1], text, ha="center", va="center", fontsize=9)
    return figure


def axes_at(figure: Figure, x: float, y: float, wide: float, high: float) -> Axes:
    """Add axes whose upper left corner is `x` inches from the left and `y` from the top."""
    across, down = figure.get_size_inches()
    return figure.add_axes((x / across, (down - y - high) / down, wide / across, high / down))


def _panels(correlations: Correlations) -> Iterator[tuple[str, Array | None]]:
    if correlations.initial is not None:
        yield "table w", correlations.initial
    for layer, (image, source) in enumerate(zip(correlations.similarity, correlations.sources, strict=True)):
        yield f"layer {layer + 1}", None if source is None else image


def _draw_nothing(ax: Axes) -> None:
    ax.set_facecolor("#f2f2f2")
    ax.text(0.5, 0.5, "no position", ha="center", va="center", fontsize=9, color="#666666", transform=ax.transAxes)


def locality_plot(correlations: Mapping[str, Correlations], title: str = "") -> Figure:
    """Draw the locality of every layer, one line per model, and the locality if all positions were alike."""
    check_lines(correlations, "correlations")
    units = {found.unit for found in correlations.values()}
    figure, ax = new_axes("layer", f"locality ({' or '.join(sorted(units))})", title)
    for index, (label, found) in enumerate(correlations.items()):
        layers = np.arange(1, len(found.locality) + 1)
        ax.plot(layers, found.locality, label=label, **line_style(index))
    uniform = {f"uniform, {c.grid.height} × {c.grid.width}": c.uniform_distance for c in correlations.values()}
    for index, (label, distance) in enumerate(uniform.items()):
        ax.axhline(distance, label=label, color="#555555", linewidth=1.2, linestyle=(0, (1, 1 + 2 * index)))
    ax.set_ylim(bottom=0)
    ax.margins(y=0.1)
    depth = max(len(found.locality) for found in correlations.values())
    ax.xaxis.set_major_locator(FixedLocator(range(1, depth + 1)) if depth <= 16 else MaxNLocator(integer=True))
    return add_legend(figure, ax)


def curves(
    lines: Mapping[str, Sequence[tuple[float, float, float | None]]],
    xlabel: str,
    ylabel: str,
    title: str = "",
) -> Figure:
    """Draw lines of (x, mean, standard deviation or None), with a band of one standard deviation on either side."""
    check_lines(lines, "lines")
    figure, ax = new_axes(xlabel, ylabel, title)
    for index, (label, points) in enumerate(lines.items()):
        x, mean = [p[0] for p in points], np.array([p[1] for p in points])
        deviation = np.array([p[2] or 0.0 for p in points])
        style = line_style(index)
        if len(points) > 30:
            style["marker"] = None  # a chain of markers hides the line
        ax.plot(x, mean, label=label, **style)
        if deviation.any():
            ax.fill_between(x, mean - deviation, mean + deviation, color=style["color"], alpha=0.18, linewidth=0)
    return add_legend(figure, ax)


def translation_plot(found: Mapping[str, Translation], title: str = "") -> Figure:
    """Draw the translation error of each layer, inside and at the border, one line per model.

    A layer at 0 is equivariant; the line at the square root of 2 is the error of unrelated features.
    """
    check_lines(found, "found")
    figure = Figure(figsize=(8.4, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    border = next(iter(found.values())).border
    names = ("inside", f"within {border} patch{'es' * (border != 1)} of an edge")
    for ax, name in zip(panels, names, strict=True):
        ax.set(xlabel="layer", title=name)
        decorate(ax)
        ax.axhline(math.sqrt(2), color="#555555", linewidth=1, linestyle=(0, (1, 2)))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].annotate(
        "unrelated",
        (0, math.sqrt(2)),
        (4, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        fontsize=8,
        color="#444444",
    )
    panels[0].set_ylabel("difference after a shift\n(share of the features' spread)")
    for index, (label, one) in enumerate(found.items()):
        layers = np.arange(1, len(one.grids) + 1)
        style = line_style(index)
        if not np.isnan(one.logits):
            label += f" (logits {one.logits:.2f})"
        panels[0].plot(layers, one.inside, label=label, **style)
        panels[1].plot(layers, one.at_border, **style)
    panels[0].set_ylim(bottom=0)
    if title:
        figure.suptitle(title, fontsize=12)
    return add_legend(figure, panels[0])


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
