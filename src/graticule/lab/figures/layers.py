"""Plots of a number of each layer, one line per model or quantity; layers count from 0 through all stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from graticule.analysis.attention import AttentionSummary
from graticule.analysis.effect import Effect
from graticule.analysis.equivariance import Translation
from graticule.analysis.mixing import MixingMap
from graticule.analysis.probe import Probe
from graticule.analysis.share import PositionShare
from graticule.lab.figures.style import (
    DOTTED,
    PALETTE,
    add_legend,
    check_lines,
    decorate,
    draw_level,
    draw_line,
    layer_axes,
)
from graticule.position.places import axis_names, by

_WIDE = (7.2, 4.0)


def translation_plot(found: Mapping[str, Translation], title: str = "") -> Figure:
    """Draw the translation error of each layer, inside and at the border, one line per model.

    A layer at 0 is equivariant; the line at the square root of 2 is the error of unrelated features.
    """
    check_lines(found, "found")
    figure = Figure(figsize=(8.4, 4.4), layout="constrained")
    inside, outside = figure.subplots(1, 2, sharey=True)
    border = next(iter(found.values())).border
    names = ("inside", f"within {border} patch{'es' * (border != 1)} of an edge")
    for ax, name in zip((inside, outside), names, strict=True):
        ax.set(xlabel="layer", title=name)
        decorate(ax)
        draw_level(ax, math.sqrt(2), "unrelated" if ax is inside else "")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    inside.set_ylabel("difference after a shift\n(share of the features' spread)")
    for index, (label, one) in enumerate(found.items()):
        layers = np.arange(len(one.grids))
        if not np.isnan(one.logits):
            label += f" (logits {one.logits:.2f})"
        draw_line(inside, index, label, layers, one.inside)
        draw_line(outside, index, label, layers, one.at_border)
    inside.set_ylim(bottom=0)
    figure.suptitle(title, fontsize=12)
    return add_legend(figure, inside)


def non_locality_plot(maps: Mapping[str, Sequence[MixingMap]], title: str = "") -> Figure:
    """Draw the non-locality of every layer, one line per model: g of the paper, and the mean distance of the weights.

    A model without a quadratic encoding has no g, and is in the second panel alone.

    Reference: PosMLP (Wang et al., 2022), Eq. 16 and Figure 8.
    """
    if not maps:
        raise ValueError("`maps` must have the layers of at least one model, got none.")
    figure = Figure(figsize=(9.5, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, (label, layers) in enumerate(maps.items()):
        at = [one.layer for one in layers]
        g = [one.non_locality()[0] for one in layers]
        if np.isfinite(g).any():
            draw_line(left, index, label, at, g)
        draw_line(right, index, label, at, [one.distance() for one in layers])
    if not left.lines:
        left.text(0.5, 0.5, "no quadratic encoding", ha="center", va="center", transform=left.transAxes)
    left.set(xlabel="layer", ylabel="g, smaller is less local (1 / patches²)", title="non-locality g")
    right.set(xlabel="layer", ylabel="mean distance from the query (patches)", title="distance of the weights")
    for ax in (left, right):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_ylim(bottom=0)
        decorate(ax)
    figure.suptitle(title, fontsize=12)
    return add_legend(figure, right)


def share_plot(share: PositionShare) -> Figure:
    """Draw the share of the variance that position explains by layer, its linear part, and the share at other sizes.

    Bars are intervals of 95 %; the last point is of the features.
    """
    figure, ax = layer_axes("share of the variance of the tokens (%)", figsize=_WIDE)
    names, layers = share.names, np.arange(len(share.names))
    side = _size(share.img_size) if share.others else ""
    lines = [(f"position{side}", share.total), (f"linear part{side}", share.linear)]
    lines += [(f"position{_size(size)}", one.total) for size, one in share.others.items()]
    for index, (label, one) in enumerate(lines):
        draw_line(ax, index, label, layers, 100 * one.value, 100 * (one.high - one.value))
    ax.axhline(0, color="#555555", linewidth=1)
    step = -(-len(names) // 14)
    shown = [*range(0, len(names) - 1, step), len(names) - 1]
    ax.set_xticks(layers[shown], [names[index] for index in shown])
    return add_legend(figure, ax)


def _size(size: tuple[int, ...]) -> str:
    return f" at {by(size)}"


def probe_plot(content: Probe | None, probes: Sequence[Probe]) -> Figure:
    """Draw R2 of row and column by layer, with standard errors over folds, and R2 of the shuffled labels.

    The first point, if there is `content`, is of the embedded patches before any position information.
    """
    figure, ax = layer_axes("R² on images that were not fitted", figsize=_WIDE)
    whole = [*([] if content is None else [content]), *probes]
    layers = np.arange(len(whole)) - (content is not None)
    control = [float(np.nanmean(one.control_mean)) for one in whole]
    lines = {
        name: ([one.mean[axis] for one in whole], [one.error[axis] for one in whole])
        for axis, name in enumerate(axis_names(whole[0].r2.shape[1]))
    }
    lines["control: shuffled labels"] = (control, [float(np.nanmax(one.control_error)) for one in whole])
    for index, (label, (mean, error)) in enumerate(lines.items()):
        draw_line(ax, index, label, layers, mean, error)
    ax.axhline(0, color="#555555", linewidth=1)
    if content is not None:
        shown = np.unique(np.linspace(0, len(probes) - 1, min(len(probes), 12)).round().astype(int))
        ax.set_xticks([-1, *shown], ["patches\nalone", *map(str, shown)])
    ends = [value for mean, _ in lines.values() for value in (float(np.nanmin(mean)), float(np.nanmax(mean)))]
    ax.set_ylim(min(-0.05, *ends) - 0.02, 1.15 * max(0.1, *ends))
    return add_legend(figure, ax)


def effect_plot(effects: Sequence[Effect]) -> Figure:
    """Draw the relative change of the features by layer, one line per change, with standard errors over images."""
    figure, ax = layer_axes("change of the features\n(share of their spread)", figsize=_WIDE)
    for index, one in enumerate(effects):
        draw_line(ax, index, one.name, np.arange(len(one.mean_change)), one.mean_change, one.change_error)
    if max(one.mean_change.max() for one in effects) > 0.7:
        draw_level(ax, math.sqrt(2), "unrelated")
    ax.set_ylim(bottom=0)
    return add_legend(figure, ax)


def attention_plot(summary: AttentionSummary) -> Figure:
    """Draw distance, entropy and the share on prefix tokens by layer, one dot per head, and the mean over heads."""
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    kinds = (
        ("mean distance (patches)", summary.distance, summary.uniform),
        ("entropy (nats)", summary.entropy, summary.uniform_entropy),
        ("share on prefix tokens", summary.prefix, None),
    )
    for ax, (name, values, uniform) in zip(figure.subplots(1, 3), kinds, strict=True):
        ax.set(xlabel="layer", ylabel=name)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        decorate(ax)
        ax.plot(summary.layers, values, "o", markersize=3.5, color=PALETTE[0], alpha=0.55)
        ax.plot(summary.layers, np.nanmean(values, 1), color=PALETTE[1], linewidth=1.6)
        if uniform is not None:
            ax.plot(summary.layers, uniform, color="#555555", linewidth=1, linestyle=DOTTED)
        ax.set_ylim(bottom=0)
    return figure
