"""Plots of a number of each layer, one line per model or quantity; layers count from 0 through all stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from graticule.analysis.attention import AttentionSummary
from graticule.analysis.effect import Effect
from graticule.analysis.equivariance import Translation
from graticule.analysis.mixing import MixingMap
from graticule.analysis.probe import Probe
from graticule.analysis.share import PositionShare
from graticule.lab.figures.style import DOTTED, PALETTE, add_legend, check_lines, draw_level, draw_line, layer_panels
from graticule.position.places import axis_names, by

_WIDE = (7.2, 4.0)


def translation_plot(translations: Mapping[str, Translation], title: str = "") -> Figure:
    """Draw the translation error of each layer, inside and at the border, one line per model.

    A layer at 0 is equivariant; the line at the square root of 2 is the error of unrelated features.
    """
    check_lines(translations, "translations")
    ylabel = "difference after a shift\n(share of the features' spread)"
    figure, (inside, outside) = layer_panels(ylabel, "", figsize=(8.4, 4.4), sharey=True)
    inside.set_title("inside")
    outside.set_title("at an edge")
    draw_level(inside, math.sqrt(2), "unrelated")
    draw_level(outside, math.sqrt(2), "")
    for index, (label, translation) in enumerate(translations.items()):
        layers = np.arange(len(translation.grids))
        if not np.isnan(translation.logits):
            label += f" (logits {translation.logits:.2f})"
        draw_line(inside, index, label, layers, translation.inside)
        draw_line(outside, index, label, layers, translation.at_border)
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
    ylabels = ("g, smaller is less local (1 / patches²)", "mean distance from the query (patches)")
    figure, (left, right) = layer_panels(*ylabels, figsize=(9.5, 3.9))
    for index, (label, layers) in enumerate(maps.items()):
        at = [layer.layer for layer in layers]
        g = [layer.non_locality()[0] for layer in layers]
        if np.isfinite(g).any():
            draw_line(left, index, label, at, g)
        draw_line(right, index, label, at, [layer.distance() for layer in layers])
    if not left.lines:
        left.text(0.5, 0.5, "no quadratic encoding", ha="center", va="center", transform=left.transAxes)
    for ax, name in ((left, "non-locality g"), (right, "distance of the weights")):
        ax.set_title(name)
        ax.set_ylim(0, 1.05 * ax.get_ylim()[1])  # above the highest marker
    figure.suptitle(title, fontsize=12)
    return add_legend(figure, right)


def share_plot(share: PositionShare) -> Figure:
    """Draw the share of the variance that position explains by layer, its linear part, and the share at other sizes.

    Bars are intervals of 95 %; the last point is of the features.
    """
    figure, (ax,) = layer_panels("share of the variance of the tokens (%)", figsize=_WIDE)
    names, layers = share.names, np.arange(len(share.names))
    at = f" at {by(share.img_size)}" if share.others else ""
    lines = [(f"position{at}", share.total), (f"linear part{at}", share.linear)]
    lines += [(f"position at {by(size)}", other.total) for size, other in share.others.items()]
    for index, (label, line) in enumerate(lines):
        draw_line(ax, index, label, layers, 100 * line.value, 100 * (line.high - line.value))
    ax.axhline(0, color="#555555", linewidth=1)
    step = -(-len(names) // 14)
    ticks = [*range(0, len(names) - 1, step), len(names) - 1]
    ax.set_xticks(layers[ticks], [names[index] for index in ticks])
    return add_legend(figure, ax)


def probe_plot(content: Probe | None, probes: Sequence[Probe]) -> Figure:
    """Draw R2 of row and column by layer, with standard errors over folds, and R2 of the shuffled labels.

    The first point, if there is `content`, is of the embedded patches before any position information.
    """
    figure, (ax,) = layer_panels("R² on images that were not fitted", figsize=_WIDE)
    points = [*([] if content is None else [content]), *probes]
    layers = np.arange(len(points)) - (content is not None)
    control = [float(np.nanmean(probe.control_mean)) for probe in points]
    lines = {
        name: ([probe.mean[axis] for probe in points], [probe.error[axis] for probe in points])
        for axis, name in enumerate(axis_names(points[0].r2.shape[1]))
    }
    lines["control: shuffled labels"] = (control, [float(np.nanmax(probe.control_error)) for probe in points])
    for index, (label, (mean, error)) in enumerate(lines.items()):
        draw_line(ax, index, label, layers, mean, error)
    ax.axhline(0, color="#555555", linewidth=1)
    if content is not None:
        ticks = np.unique(np.linspace(0, len(probes) - 1, min(len(probes), 12)).round().astype(int))
        ax.set_xticks([-1, *ticks], ["patches\nalone", *map(str, ticks)])
    ends = [value for mean, _ in lines.values() for value in (float(np.nanmin(mean)), float(np.nanmax(mean)))]
    ax.set_ylim(min(-0.05, *ends) - 0.02, 1.15 * max(0.1, *ends))
    return add_legend(figure, ax)


def effect_plot(effects: Sequence[Effect]) -> Figure:
    """Draw the relative change of the features by layer, one line per change, with standard errors over images."""
    figure, (ax,) = layer_panels("change of the features\n(share of their spread)", figsize=_WIDE)
    for index, effect in enumerate(effects):
        draw_line(ax, index, effect.name, np.arange(len(effect.mean_change)), effect.mean_change, effect.change_error)
    if max(effect.mean_change.max() for effect in effects) > 0.7:
        draw_level(ax, math.sqrt(2), "unrelated")
    ax.set_ylim(bottom=0)
    return add_legend(figure, ax)


def attention_plot(summary: AttentionSummary) -> Figure:
    """Draw distance, entropy and the share on prefix tokens by layer, one dot per head, and the mean over heads."""
    kinds = {
        "mean distance (patches)": (summary.distance, summary.uniform),
        "entropy (nats)": (summary.entropy, summary.uniform_entropy),
        "share on prefix tokens": (summary.prefix, None),
    }
    figure, panels = layer_panels(*kinds, figsize=(9.6, 3.4))
    for ax, (values, uniform) in zip(panels, kinds.values(), strict=True):
        ax.plot(summary.layers, values, "o", markersize=3.5, color=PALETTE[0], alpha=0.55)
        ax.plot(summary.layers, np.nanmean(values, 1), color=PALETTE[1], linewidth=1.6)
        if uniform is not None:
            ax.plot(summary.layers, uniform, color="#555555", linewidth=1, linestyle=DOTTED)
        ax.set_ylim(bottom=0)
    return figure
