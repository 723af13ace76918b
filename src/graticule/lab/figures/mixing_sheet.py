"""Sheets of the token mixing of gated MLPs: weights around a query, bias maps, and the parts of a sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from graticule.analysis.mixing import MixingMap, MixingParts
from graticule.lab.figures.style import DASHES, PALETTE, SIMILARITY, mark, spread

_SIGNED = "PuOr"  # two-sided, and distinguishable with any color vision


def mixing_sheet(
    maps: Sequence[MixingMap],
    groups: Sequence[int] | None = None,
    values: Literal["weights", "logits"] = "weights",
    title: str = "",
) -> Figure:
    """Draw the mixing weights of a query for every token, one row per layer and one column per group.

    The query is a circle, and the center Delta of a quadratic encoding is a cross if it is inside. Every row has
    one color scale: from 0 for weights after a softmax, symmetric about 0 for weights that may be negative, and for
    logits the range of 6 below the largest; a weight below it is less than 1/400 of the largest.

    Reference: PosMLP (Wang et al., 2022), Figures 1 (d, e) and 4.

    Args:
        maps: the layers to draw.
        groups: counted from 0; eight evenly spaced ones by default. A layer that has fewer leaves panels empty.
        values: 'weights' or 'logits'.
        title: above the sheet.
    """
    if values not in ("weights", "logits"):
        raise ValueError(f"`values` must be weights or logits, got {values!r}.")
    if not maps:
        raise ValueError("`maps` must have at least one layer, got none.")
    most = max(layer.groups for layer in maps)
    for group in groups or ():
        if not 0 <= group < most:
            raise ValueError(f"`groups` must be from 0 to {most - 1}, got {group}.")
    chosen_groups = [list(groups) if groups else spread(layer.groups, 8) for layer in maps]
    columns = max(map(len, chosen_groups))
    tall = sum(0.3 + 1.2 * min(max(layer.grid.height / layer.grid.width, 0.3), 2.0) for layer in maps)
    figure = Figure(figsize=(1.5 + 1.35 * max(columns, 3), 0.9 + max(tall, 1.5)), layout="compressed")
    panels = figure.subplots(len(maps), columns, squeeze=False)
    for line, layer, chosen in zip(panels, maps, chosen_groups, strict=True):
        images = getattr(layer, values)
        visible = images[[group for group in chosen if group < layer.groups]]
        reference = visible if len(visible) else images
        high = float((reference if layer.softmax else np.abs(reference)).max())
        if layer.softmax:
            norm, cmap = Normalize(high - 6 if values == "logits" else 0.0, high), SIMILARITY
        else:
            norm, cmap = Normalize(-(high or 1.0), high or 1.0), _SIGNED
        for index, ax in enumerate(line):
            if index == 0:
                ax.set_ylabel(f"layer {layer.layer}\n{layer.grid.height} × {layer.grid.width}", fontsize=9)
            ax.set(xticks=[], yticks=[])
            if index >= len(chosen) or chosen[index] >= layer.groups:
                ax.set_axis_off()
                continue
            ax.imshow(images[chosen[index]], norm=norm, cmap=cmap, interpolation="nearest")
            ax.set_title(f"group {chosen[index]} of {layer.groups}", fontsize=8, pad=3)
            row, column = layer.query
            mark(ax, column, row)
            if layer.centers is not None:
                x, y = layer.centers[chosen[index]] + (column, row)
                if -0.5 <= x <= layer.grid.width - 0.5 and -0.5 <= y <= layer.grid.height - 0.5:
                    mark(ax, x, y, 6, "+", PALETTE[1])
        if len(visible):
            extend = "min" if values == "logits" and layer.softmax else "neither"
            bar = figure.colorbar(ScalarMappable(norm, cmap), ax=list(line), extend=extend)
            bar.set_label(values[:-1], fontsize=8)
            bar.ax.tick_params(labelsize=7)
            bar.ax.yaxis.set_major_locator(MaxNLocator(4))
    figure.suptitle(title, fontsize=12)
    cross = ", cross: learned center" if any(layer.centers is not None for layer in maps) else ""
    figure.supxlabel(f"circle: the query{cross}", fontsize=8)
    return figure


def bias_sheet(maps: Sequence[MixingMap], title: str = "") -> Figure:
    """Draw the bias of every layer as a map of its grid or window; one color scale for all.

    Reference: PosMLP (Wang et al., 2022), Figure 5.
    """
    layers = [layer for layer in maps if layer.bias is not None]
    if not layers:
        raise ValueError(
            "`maps` must have a bias in at least one layer, got none (option `bias` of the encoding is off)."
        )
    columns = min(6, len(layers))
    lines = math.ceil(len(layers) / columns)
    figure = Figure(figsize=(1.4 + 1.5 * max(columns, 3), 0.8 + 1.75 * lines), layout="compressed")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    values = np.concatenate([layer.bias.ravel() for layer in layers if layer.bias is not None])
    low, high = float(values.min()), float(values.max())
    norm = Normalize(low, high if high > low else low + 1e-6)
    for ax, layer in zip(panels, layers, strict=False):
        assert layer.bias is not None
        ax.imshow(layer.bias, norm=norm, cmap=SIMILARITY, interpolation="nearest")
        ax.set(xticks=[], yticks=[])
        ax.set_title(f"layer {layer.layer}", fontsize=9, pad=3)
        ax.set_xlabel(f"{layer.grid.height} × {layer.grid.width}, mean {layer.bias.mean():.2f}", fontsize=8)
    for ax in panels[len(layers) :]:
        ax.set_axis_off()
    bar = figure.colorbar(ScalarMappable(norm, SIMILARITY), ax=list(panels))
    bar.set_label("bias b", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    figure.suptitle(title, fontsize=12)
    return figure


def parts_sheet(parts: Sequence[MixingParts], group: int = 0, title: str = "") -> Figure:
    """Draw the two parts of each layer's mixing weights, their sum, and one row of all three, in one row per layer.

    The panels of a layer share one color scale, so that the larger part is visible. The paper draws the row of
    token 40; here it is the row of the query.

    Reference: PosMLP (Wang et al., 2022), Figure 7.

    Args:
        parts: the layers to draw.
        group: counted from 0; a layer that has fewer shows its last.
        title: above the sheet.
    """
    if not parts:
        raise ValueError("`parts` must have at least one layer, got none: no layer mixes by a sum, as LRPE-M does.")
    figure = Figure(figsize=(11.5, 0.9 + 2.5 * len(parts)), layout="compressed")
    panels = figure.subplots(len(parts), 4, squeeze=False, width_ratios=(1, 1, 1, 1.35))
    for index, (line, layer) in enumerate(zip(panels, parts, strict=True)):
        images = [matrices[min(group, len(matrices) - 1)] for matrices in (layer.dense, layer.relative, layer.total)]
        names = ("dense matrix", "relative table", "sum")
        high = max(float(np.abs(image).max()) for image in images) or 1.0
        norm = Normalize(-high, high)
        row = layer.query[0] * layer.grid.width + layer.query[1]
        for number, (ax, image, name) in enumerate(zip(line, images, names, strict=False)):
            ax.imshow(image, norm=norm, cmap=_SIGNED, interpolation="nearest")
            ax.axhline(row, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
            ax.set(xticks=[], yticks=[])
            line[3].plot(image[row], label=name, color=PALETTE[number], linestyle=DASHES[number], linewidth=1)
            if index == 0:
                ax.set_title(name, fontsize=10, pad=4)
        tokens = layer.grid.patches
        line[0].set_ylabel(f"layer {layer.layer}\n{tokens} × {tokens}", fontsize=9)
        line[1].set_xlabel(f"{100 * layer.relative_share():.0f} % of the squares", fontsize=8)
        figure.colorbar(ScalarMappable(norm, _SIGNED), ax=list(line[:3])).ax.tick_params(labelsize=7)
        line[3].axhline(0, color="#bbbbbb", linewidth=0.8, zorder=0)
        line[3].set(xlim=(-0.5, tokens - 0.5))
        line[3].tick_params(labelsize=7)
        if index == 0:
            line[3].set_title("row of the query", fontsize=10, pad=4)
            line[3].legend(fontsize=7)
    figure.suptitle(title, fontsize=12)
    figure.supxlabel("token that is read; dashed: the row of the query", fontsize=9)
    return figure
