"""Figures of an audit: the probe, the effects of changes, and a summary of attention, by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from graticule.analysis.attention_summary import AttentionSummary
from graticule.analysis.effect import Effect
from graticule.analysis.plots import DASHES, MARKERS, PALETTE
from graticule.analysis.probe import Probe


def probe_plot(content: Probe | None, probes: Sequence[Probe]) -> Figure:
    """Draw R2 of row and column by layer, with standard errors over folds, and R2 of the shuffled labels.

    Layer 0 stands for the embedded patches before any position information.
    """
    figure, ax = _axes("layer", "R² on images that were not fitted")
    first = 0 if content is not None else 1
    whole = [*([] if content is None else [content]), *probes]
    layers = np.arange(first, first + len(whole))
    lines = [
        ("row", [one.mean[0] for one in whole], [one.error[0] for one in whole]),
        ("column", [one.mean[1] for one in whole], [one.error[1] for one in whole]),
        (
            "control: shuffled labels",
            [np.nanmean(one.control_mean) for one in whole],
            [np.nanmax(one.control_error) for one in whole],
        ),
    ]
    for index, (label, mean, error) in enumerate(lines):
        _errorbar(ax, layers, mean, error, label, index)
    ax.axhline(0, color="#555555", linewidth=1)
    if content is not None:
        ax.annotate("patches alone", (0, 0.02), xycoords=("data", "axes fraction"), fontsize=8, color="#444444")
    ax.set_ylim(min(-0.05, *(float(np.nanmin(mean)) for _, mean, _ in lines)) - 0.02, 1.05)
    return _legend(figure, len(lines))


def effect_plot(effects: Sequence[Effect]) -> Figure:
    """Draw the relative change of the features by layer, one line per change, with standard errors over images."""
    figure, ax = _axes("layer", "change of the features\n(share of their spread)")
    for index, one in enumerate(effects):
        layers = np.arange(1, len(one.mean_change) + 1)
        _errorbar(ax, layers, one.mean_change, one.change_error, one.name, index)
    if max(one.mean_change.max() for one in effects) > 0.7:
        ax.axhline(math.sqrt(2), color="#555555", linewidth=1, linestyle=(0, (1, 2)))
        ax.annotate("unrelated", (0.01, math.sqrt(2) + 0.02), xycoords=("axes fraction", "data"), fontsize=8)
    ax.set_ylim(bottom=0)
    return _legend(figure, len(effects))


def attention_plot(summary: AttentionSummary) -> Figure:
    """Draw distance, entropy and the share on prefix tokens by layer, one dot per head, and the mean over heads."""
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    panels = figure.subplots(1, 3)
    layers = np.array(summary.layers) + 1
    kinds = (
        ("mean distance (patches)", summary.distance, summary.uniform),
        ("entropy (nats)", summary.entropy, summary.uniform_entropy),
        ("share on prefix tokens", summary.prefix, None),
    )
    for ax, (name, values, uniform) in zip(panels, kinds, strict=True):
        _decorate(ax, "layer", name)
        for head in range(values.shape[1]):
            ax.plot(layers, values[:, head], "o", markersize=3.5, color=PALETTE[0], alpha=0.55)
        ax.plot(layers, np.nanmean(values, 1), color=PALETTE[1], linewidth=1.6)
        if uniform is not None:
            ax.plot(layers, uniform, color="#555555", linewidth=1, linestyle=(0, (1, 2)))
        ax.set_ylim(bottom=0)
    return figure


def _errorbar(
    ax: Axes, layers: np.ndarray, mean: Sequence[float] | np.ndarray, error: Sequence[float] | np.ndarray, label: str,
    index: int,
) -> None:  # fmt: skip
    ax.errorbar(
        layers,
        mean,
        error,
        label=label,
        capsize=2.5,
        color=PALETTE[index % len(PALETTE)],
        marker=MARKERS[index % len(MARKERS)],
        linestyle=DASHES[index % len(DASHES)],
        linewidth=1.5,
        markersize=4.5,
    )


def _axes(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    ax = figure.subplots()
    _decorate(ax, xlabel, ylabel)
    return figure, ax


def _decorate(ax: Axes, xlabel: str, ylabel: str) -> None:
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _legend(figure: Figure, lines: int) -> Figure:
    figure.legend(loc="outside lower center", ncols=min(lines, 3), fontsize=9, frameon=False, handlelength=2.8)
    return figure
