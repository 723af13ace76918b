"""Plots of the scores of language models at several lengths of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from graticule.analysis.plots import _check, _legend, _style

#: Label -> length, or position, in tokens -> values over seeds.
Values = Mapping[str, Mapping[int, Sequence[float]]]


def length_plot(scores: Values, places: Values, trained_at: int | Sequence[int], title: str = "") -> Figure:
    """Draw bits per byte against the length of the windows, and against the position in the longest windows.

    Means over seeds, with bars of one standard deviation. If a model has learned to use its context, the line in the
    right panel falls up to the training length; if it cannot use longer contexts, the line rises from there. The first
    positions average few tokens, one per window, so they are the noisiest.

    Args:
        scores: of all tokens; label -> length -> values over seeds.
        places: of ranges of positions in the longest windows; label -> last position of a range -> values over seeds.
        trained_at: the lengths of training, marked by vertical lines.
        title: above both panels.
    """
    for name, values in (("scores", scores), ("places", places)):
        _check(values, name)
        if missing := [label for label, by in values.items() if not by or not all(map(len, by.values()))]:
            raise ValueError(f"`{name}` must have a value everywhere, got none for some of {missing[0]!r}.")
    trained = {trained_at} if isinstance(trained_at, int) else set(trained_at)
    figure = Figure(figsize=(9.0, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw(left, scores, trained)
    lengths = sorted({length for by in scores.values() for length in by} | trained)
    _ticks(left, lengths)
    left.set(xlabel="length of the windows (tokens)", ylabel="bits per byte", title="all of the held-out text")
    _draw(right, places, trained)
    longest = {max(by) for by in places.values()}
    powers = [1 << power for power in range(max(longest).bit_length())]
    _ticks(right, powers)
    windows = f"windows of {longest.pop()}" if len(longest) == 1 else "the longest windows"
    right.set(xlabel="position of the token in its window, up to", title=f"by position in {windows}")
    if title:
        figure.suptitle(title, fontsize=12)
    return _legend(figure, left)


def _draw(ax: Axes, values: Values, trained: set[int]) -> None:
    """Draw one line per label on a logarithmic axis (base 2), and the training lengths."""
    ax.set_xscale("log", base=2)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    for index, (label, by) in enumerate(values.items()):
        x = sorted(by)
        bars = [stdev(by[one]) if len(by[one]) > 1 else 0.0 for one in x]
        ax.errorbar(
            x, [fmean(by[one]) for one in x], bars if any(bars) else None, capsize=3, label=label, **_style(index)
        )
    for index, length in enumerate(sorted(trained)):
        name = "length of training" if index == 0 else None  # once in the legend
        ax.axvline(length, label=name, color="#666666", linewidth=1, linestyle=(0, (1, 2)), zorder=0)


def _ticks(ax: Axes, places: Sequence[int]) -> None:
    """Set ticks at `places`; if they are many or close, their labels are slanted so that they do not overlap."""
    close = any(after < 1.3 * before for before, after in pairwise(places))
    crowded = len(places) > 8 or close
    ax.set_xticks(
        places,
        [str(place) for place in places],
        rotation=45 if crowded else 0,
        ha="right" if crowded else "center",
        rotation_mode="anchor",
    )
    ax.minorticks_off()
