"""Sheets of attention: one row per layer, and one column per model and head, as score matrices or on the image."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from graticule.external.attention_map import AttentionMap
from graticule.lab.figures.style import SIMILARITY, add_title, axes_at, spread

#: Weights above this quantile of a head are drawn in the last color: a few peaks would darken the rest.
_TOP = 0.995
#: Most columns of a sheet by default.
_MOST = 6

Maps = Mapping[str, Sequence[AttentionMap]]


def attention_sheet(maps: Maps, heads: Sequence[int] | None = None, title: str = "") -> Figure:
    """Draw the score matrices between patches, one row per layer and one column per model and head.

    Every head of a layer has a color scale of its own, the same for all models, from 0 to the 99.5 % quantile of its
    weights. Below each matrix are its mean attention distance and the ends of its scale.

    Reference: CPVT (Chu et al., 2023), Figures 5 and 6.

    Args:
        maps: label -> maps of the same layers, in the same order, with the same number of heads.
        heads: counted from 0; by default evenly spaced ones for at most six columns.
        title: above the sheet.
    """
    heads = sheet_heads(maps, heads)

    def draw(ax: Axes, layer: AttentionMap, head: int, scale: Normalize) -> None:
        ax.imshow(layer.patches(head), cmap=SIMILARITY, norm=scale, aspect="auto", interpolation="nearest")
        ax.set_xlabel(f"distance {layer.distance(head):.2f} patches", fontsize=8)

    return _sheet(maps, heads, draw, lambda weights, head: weights.patches(head), 1.0, title)


def attention_on_image(
    maps: Maps,
    image: NDArray[Any],
    query: tuple[float, float] | None = (0.5, 0.5),
    heads: Sequence[int] | None = None,
    title: str = "",
) -> Figure:
    """Draw the attention of one query over the image, one row per layer and one column per model and head.

    The query is a square, or the class token. Color scales are as in `attention_sheet`, for the weights of the
    query. Where attention is within windows, the rest of the image has no color.

    Args:
        maps: as in `attention_sheet`.
        image: (height, width) or (height, width, 3), from 0 to 1.
        query: a position as shares of height and width, from 0 to 1; the patch there is the query. None for the class
            token.
        heads: as in `attention_sheet`.
        title: above the sheet.
    """
    heads = sheet_heads(maps, heads)
    if query is not None and not all(0 <= share < 1 for share in query):
        raise ValueError(f"`query` must be from 0 to 1 (1 is outside of the image), got {query}.")
    height, width = image.shape[:2]
    gray = 0.35 + 0.65 * (image.mean(-1) if image.ndim == 3 else image)  # black would hide the colors
    box = (-0.5, width - 0.5, height - 0.5, -0.5)

    def draw(ax: Axes, layer: AttentionMap, head: int, scale: Normalize) -> None:
        weights = weights_of(layer, head)
        ax.imshow(gray, cmap="gray", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        ax.imshow(weights, cmap=SIMILARITY, norm=scale, alpha=0.65, extent=box, aspect="auto", interpolation="nearest")
        shape = weights.shape
        if query is not None:
            _, (row, column), shape = layer.of_query(head, query, height / width)
            down, across = height / shape[0], width / shape[1]
            for color, edge in (("black", 2.6), ("white", 1.2)):  # visible on dark and on light
                corner = (column * across - 0.5, row * down - 0.5)
                ax.add_patch(Rectangle(corner, across, down, fill=False, edgecolor=color, linewidth=edge))
        ax.set(xlim=box[:2], ylim=box[2:])
        ax.set_xlabel(f"{shape[0]} × {shape[1]} patches", fontsize=8)

    def weights_of(layer: AttentionMap, head: int) -> NDArray[Any]:
        return layer.of_prefix(head) if query is None else layer.of_query(head, query, height / width)[0]

    return _sheet(maps, heads, draw, weights_of, height / width, title)


def sheet_heads(maps: Maps, heads: Sequence[int] | None = None) -> list[int]:
    """Return the heads of a sheet: those that are given, or evenly spaced ones for at most six columns."""
    labels, columns = list(maps), list(maps.values())
    if not columns or not columns[0]:
        raise ValueError("`maps` must hold at least one map, got none.")
    layers = {label: [layer.layer for layer in column] for label, column in maps.items()}
    first = layers[labels[0]]
    other = next((label for label in labels if layers[label] != first), None)
    if other is not None:
        raise ValueError(
            f"`maps` must be of the same layers in all models, got {layers[other]} for {other!r} and {first} for "
            f"{labels[0]!r}."
        )
    fewest = min(layer.num_heads for column in columns for layer in column)
    for head in heads or ():
        if not 0 <= head < fewest:
            raise ValueError(f"`heads` must be from 0 to {fewest - 1}, got {head}.")
    return list(heads) if heads else spread(fewest, max(1, _MOST // len(columns)))


def _sheet(
    maps: Maps,
    heads: Sequence[int],
    draw: Callable[[Axes, AttentionMap, int, Normalize], None],
    weights_of: Callable[[AttentionMap, int], NDArray[Any]],
    ratio: float,
    title: str,
) -> Figure:
    """Draw the panels of a sheet; `ratio` is the height of a panel as a share of its width."""
    columns = list(maps.values())
    side, gap, between, left, right, below = 1.7, 0.1, 0.3, 0.7, 0.9, 0.56
    high = side * ratio
    wide = len(heads) * (side + gap) - gap
    names = [_wrapped(label, int(13 * wide)) for label in maps]
    top = 0.75 + 0.16 * max(name.count("\n") + 1 for name in names)
    needed = left + len(columns) * (wide + between) - between + right
    inches = np.array([max(needed, 5.0), top + len(columns[0]) * (high + below)])
    left += (inches[0] - needed) / 2
    figure = Figure(figsize=(inches[0], inches[1]))

    for row in range(len(columns[0])):
        scales = []
        for head in heads:
            end = max(float(np.nanquantile(weights_of(column[row], head), _TOP)) for column in columns)
            scales.append(Normalize(0, end or 1.0))
        y = top + row * (high + below)
        for number, column in enumerate(columns):
            start = left + number * (wide + between)
            for index, head in enumerate(heads):
                ax = axes_at(figure, start + index * (side + gap), y, side, high)
                draw(ax, column[row], head, scales[index])
                ax.set(xticks=[], yticks=[])
                ax.set_xlabel(f"{ax.get_xlabel()}\n0 to {scales[index].vmax:.2g}", fontsize=8)
                if row == 0:
                    ax.set_title(f"head {head}", fontsize=8, pad=4)
                if index == 0 and number == 0:
                    ax.set_ylabel(f"layer {column[row].layer}", fontsize=9)
            if row == 0:
                figure.text(
                    (start + wide / 2) / inches[0], 1 - (top - 0.28) / inches[1], names[number], ha="center", fontsize=9
                )
        bar = axes_at(figure, left + len(columns) * (wide + between) - between + 0.1, y, 0.12, high)
        figure.colorbar(ScalarMappable(Normalize(0, 1), SIMILARITY), cax=bar, extend="max")
        bar.tick_params(labelsize=8)
        bar.set_yticks([0, 1], ["0", "end"])
        if row == 0:
            bar.set_title("weight", fontsize=8, pad=5)
    add_title(figure, title)
    return figure


def _wrapped(label: str, width: int) -> str:
    """Break a label into lines that fit its columns; a path is broken after its slashes."""
    lines = [part for line in label.split("\n") for part in textwrap.wrap(line.replace("/", "/ "), width)]
    return "\n".join(line.replace("/ ", "/") for line in lines)
