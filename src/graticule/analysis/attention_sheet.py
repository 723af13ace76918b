"""The sheet of attention maps: one column per model, one row per layer and head."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from graticule.analysis.attention_map import AttentionMap
from graticule.analysis.plots import SIMILARITY

#: Weights above this quantile of a row of the sheet are drawn in the last colour: a few peaks would darken the rest.
_TOP = 0.995


def attention_sheet(
    maps: Mapping[str, Sequence[AttentionMap]],
    heads: Sequence[int] | None = None,
    image: int = 0,
    title: str = "",
) -> Figure:
    """Draw the score matrices between patches, one column per model and one row per layer and head.

    Every row of the sheet has one colour scale, from 0 to the 99.5 % quantile of its weights. Beneath each
    matrix is its mean attention distance.

    Reference: CPVT (Chu et al., 2023), Figures 5 and 6.

    Args:
        maps: label -> maps of the same layers, in the same order, with the same number of heads.
        heads: counted from 0; all by default.
        image: which of the images that the maps are of.
        title: above the sheet.

    Raises:
        ValueError: if there is nothing to draw, or the models have different layers or no such head.
    """
    labels, columns = list(maps), list(maps.values())
    if not columns or not columns[0]:
        raise ValueError("`maps` must hold at least one map, got none.")
    layers = [one.layer for one in columns[0]]
    for label, column in maps.items():
        if [one.layer for one in column] != layers:
            raise ValueError(
                f"`maps` must be of the same layers in all models, got {[one.layer for one in column]} for "
                f"{label!r} and {layers} for {labels[0]!r}."
            )
    fewest = min(one.num_heads for column in columns for one in column)
    chosen = list(range(fewest)) if heads is None else list(heads)
    for head in chosen:
        if not 0 <= head < fewest:
            raise ValueError(f"`heads` must be from 0 to {fewest - 1}, got {head}.")
    rows = [(index, head) for index in range(len(layers)) for head in chosen]
    names = [_wrapped(label) for label in labels]
    side, gap, left, right, below = 2.0, 0.3, 0.9, 1.0, 0.45
    top = 0.6 + 0.16 * max(name.count("\n") + 1 for name in names)
    width = left + len(columns) * (side + gap) + right
    height = top + len(rows) * (side + below)
    figure = Figure(figsize=(max(width, 5.0), height))
    size = figure.get_size_inches()
    left += (size[0] - width) / 2
    for row, (index, head) in enumerate(rows):
        panels = [column[index].patches(head, image) for column in columns]
        high = max(float(np.quantile(panel, _TOP)) for panel in panels)
        scale = Normalize(0, high or 1.0)
        y = top + row * (side + below)
        for number, (panel, column) in enumerate(zip(panels, columns, strict=True)):
            x = left + number * (side + gap)
            ax = figure.add_axes((x / size[0], (size[1] - y - side) / size[1], side / size[0], side / size[1]))
            ax.imshow(panel, cmap=SIMILARITY, norm=scale, aspect="auto", interpolation="nearest")
            ax.set(xticks=[], yticks=[])
            ax.set_xlabel(f"distance {column[index].distance(head, image):.2f} patches", fontsize=9)
            if row == 0:
                ax.set_title(names[number], fontsize=9, pad=5)
            if number == 0:
                ax.set_ylabel(f"layer {layers[index] + 1}, head {head + 1}\n{panel.shape[0]} queries", fontsize=9)
        x = left + len(columns) * (side + gap)
        bar = figure.add_axes((x / size[0], (size[1] - y - side) / size[1], 0.12 / size[0], side / size[1]))
        figure.colorbar(ScalarMappable(scale, SIMILARITY), cax=bar, extend="max")
        bar.tick_params(labelsize=8)
        if row == 0:
            bar.set_title("weight", fontsize=8, pad=5)
    figure.text(0.5, 1 - 0.25 / size[1], title, ha="center", va="center", fontsize=12)
    return figure


def _wrapped(label: str) -> str:
    """Break a label into lines that a column holds, a path after its slashes."""
    lines = [part for line in label.split("\n") for part in textwrap.wrap(line.replace("/", "/ "), 28)]
    return "\n".join(line.replace("/ ", "/") for line in lines)
