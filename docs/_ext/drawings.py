"""Draw the figures of docs/concepts.md: `python docs/_ext/drawings.py` writes docs/figures/concepts/*.svg."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from says import says_at_center

from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.system.files import write_bytes

FOLDER = Path(__file__).parents[1] / "figures" / "concepts"

INK = "#1f2933"
BLUE, ORANGE, GREEN, GRAY = "#dbe9f6", "#fde5cc", "#dcefdc", "#eceff1"
DARK_BLUE, DARK_ORANGE, DARK_GREEN = "#1f5f99", "#a34d00", "#256b2a"


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure in inches, with y upwards."""
    figure = Figure(figsize=(width, height), facecolor="white")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    ax.set_axis_off()
    return figure, ax


def box(ax: Axes, x: float, y: float, text: str, width: float = 1.3, height: float = 0.4, color: str = GRAY) -> None:
    """Draw a rounded box with its center at (x, y)."""
    corner = (x - width / 2 + 0.05, y - height / 2 + 0.05)
    style = "round,pad=0.05,rounding_size=0.06"
    ax.add_patch(
        FancyBboxPatch(corner, width - 0.1, height - 0.1, boxstyle=style, facecolor=color, edgecolor=INK, lw=0.8)
    )
    ax.text(x, y, text, ha="center", va="center", fontsize=9, color=INK)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str = INK, bend: float = 0.0) -> None:
    """Draw an arrow."""
    style = {"arrowstyle": "-|>", "mutation_scale": 10, "lw": 1.1, "color": color, "shrinkA": 0, "shrinkB": 0}
    ax.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", **style))


def label(ax: Axes, x: float, y: float, text: str, color: str = INK, size: float = 9, **more: object) -> None:
    """Draw centered text."""
    ax.text(x, y, text, color=color, fontsize=size, **{"ha": "center", "va": "center", **more})


def grid() -> Figure:
    """Draw a grid of 3 x 5 patches with one prefix token: indices, and coordinates."""
    example = Grid(3, 5, prefix=1)
    figure, ax = canvas(7.2, 2.9)
    columns = example.width
    for n in range(example.patches):
        row, column = divmod(n, columns)
        corner = (1.9 + 0.66 * column, 1.75 - 0.66 * row)
        ax.add_patch(Rectangle(corner, 0.62, 0.62, facecolor=BLUE, edgecolor=INK, lw=0.8))
        y, x = (int(value) for value in example.coordinates()[n])
        label(ax, corner[0] + 0.31, corner[1] + 0.40, str(example.prefix + n), size=11)
        label(ax, corner[0] + 0.31, corner[1] + 0.15, f"({y}, {x})", size=7.5, color=DARK_BLUE)
    ax.add_patch(Rectangle((0.45, 1.75), 0.62, 0.62, facecolor=ORANGE, edgecolor=INK, lw=0.8))
    label(ax, 0.76, 2.15, "0", size=11)
    label(ax, 0.76, 1.9, "class", size=7.5, color=DARK_ORANGE)
    label(ax, 0.76, 2.6, "prefix token")
    label(ax, 3.55, 2.6, "3 x 5 patches")
    arrow(ax, (1.7, 2.3), (1.7, 0.5))
    label(ax, 1.55, 1.4, "y", size=11)
    arrow(ax, (1.95, 0.28), (5.1, 0.28))
    label(ax, 3.5, 0.13, "x", size=11)
    label(ax, 6.2, 2.06, "index in the\nflattened sequence", size=8)
    label(ax, 6.2, 1.4, "(row, column)", size=8, color=DARK_BLUE)
    label(ax, 6.2, 0.75, f"N = {example.tokens} tokens", size=8)
    return figure


def encoding() -> Figure:
    """Draw four kinds of encodings at the center token of 7 x 11 patches."""
    titles = {
        "sinusoidal_2d": "absolute: similarity\nof vectors",
        "kerple": "bias: added to the\nlogits of attention",
        "rope": "rotary: similarity of equal\nqueries and keys, rotated",
        "peg": "from the tokens: reach\nof a convolution",
    }
    figure = Figure(figsize=(9.2, 2.2), facecolor="white", layout="constrained")
    for ax, (name, title) in zip(figure.subplots(1, 4), titles.items(), strict=True):
        panel = says_at_center(name, Grid(7, 11))[0]
        ax.imshow(panel.values, cmap="viridis")
        ax.add_patch(Rectangle((4.5, 2.5), 1, 1, fill=False, edgecolor="black", lw=1.5))
        ax.set_title(f"{name}\n{title}", fontsize=9, color=INK)
        ax.set(xticks=[], yticks=[])
    return figure


def line(ax: Axes, *points: tuple[float, float], color: str = INK) -> None:
    """Draw straight lines through points, with an arrow at the last one."""
    ax.plot(*zip(*points[:-1], strict=True), color=color, lw=1.1)
    arrow(ax, points[-2], points[-1], color)


def plus(ax: Axes, x: float, y: float) -> None:
    """Draw a sum on the residual stream."""
    ax.plot(x, y, "o", markersize=9, mfc="white", mec=INK, mew=0.8, zorder=3)
    ax.plot(x, y, "+", markersize=6, color=INK, mew=0.9, zorder=4)


def joining() -> Figure:
    """Draw four joinings of a table with three layers."""
    figure, ax = canvas(10.4, 5.2)
    pitch, lowest = 1.24, 0.85
    levels = [lowest + pitch * layer for layer in range(3)]  # of the residual stream where a layer branches off
    for column, (name, about) in enumerate(
        {
            "default": "w is added once,\nto the token embedding",
            "shared": "the same w is added\nbefore every layer",
            "unshared": "each layer has\na separate table",
            "lape": "each layer adds w after its norm,\nthrough a separate LayerNorm",
        }.items()
    ):
        x, inside, stream = (2.6 * column + offset for offset in (0.35, 1.35, 2.2))
        label(ax, 2.6 * column + 1.3, 5.0, name, size=11, family="monospace")
        label(ax, 2.6 * column + 1.3, 4.67, about, size=8.5)
        line(ax, (stream, 0.3), (stream, 4.42))
        label(ax, stream, 0.17, "tokens")
        for y in levels:
            line(ax, (stream, y), (inside, y), (inside, y + 0.12))
            box(ax, inside, y + 0.25, "norm", 0.95, 0.27, color=BLUE)
            arrow(ax, (inside, y + 0.38), (inside, y + 0.58))
            box(ax, inside, y + 0.71, "attention", 0.95, 0.27, color=BLUE)
            line(ax, (inside, y + 0.84), (inside, y + 0.93), (stream - 0.08, y + 0.93))
            plus(ax, stream, y + 0.93)
        if name == "lape":
            box(ax, x, 0.5, "w", 0.4, color=ORANGE)
            for y, before in zip(levels, (0.7, *(level + 0.65 for level in levels)), strict=False):
                box(ax, x, y + 0.48, "LN", 0.44, 0.34, color=GREEN)
                arrow(ax, (x, before), (x, y + 0.31), DARK_ORANGE)
                arrow(ax, (x + 0.22, y + 0.48), (inside - 0.03, y + 0.48), DARK_ORANGE)
            continue
        tables = {"default": ["w"], "shared": ["w", "", ""], "unshared": ["$w_0$", "$w_1$", "$w_2$"]}[name]
        for y, table in zip((level - 0.13 for level in levels), tables, strict=False):
            if table:
                box(ax, x, y, table, 0.4, 0.34, color=ORANGE)
            arrow(ax, (x + 0.2, y), (stream - 0.02, y), DARK_ORANGE)
        if name == "shared":
            ax.plot([x + 0.2, x + 0.2], [lowest - 0.13, levels[-1] - 0.13], color=DARK_ORANGE, lw=1.1)
    return figure


def layer_position() -> Figure:
    """Draw a block with the position of each field of a LayerPosition."""
    figure, ax = canvas(10.4, 3.3)
    y, low = 1.5, 0.9
    label(ax, 5.2, 3.15, "An attention block. Each field may be None.", size=9.5)
    label(ax, 0.3, y + 0.17, "tokens")
    line(ax, (0.05, y), (10.3, y))
    label(ax, 10.0, y + 0.17, "tokens")
    for x, text, width in (
        (1.75, "norm", 0.85),
        (3.3, "queries, keys,\nvalues", 1.25),
        (5.2, "logits", 0.8),
        (6.9, "mixed values", 1.25),
        (8.5, "norm, MLP", 1.1),
    ):
        box(ax, x, y, text, width, 0.52, color=BLUE)
    for start, end in ((1.15, 7.68), (7.8, 9.22)):
        line(ax, (start, y), (start, low), (end, low), (end, y - 0.08))
        plus(ax, end, y)
    label(ax, 4.4, low - 0.15, "residual stream", size=8.5)
    fields = {
        (0.75, y + 0.04): "added_to_stream\nmap_before",
        (2.4, y + 0.04): "after_norm\ninputs\nqueries_keys",
        (4.22, y + 0.04): "rotary\nquery_scale",
        (5.2, y + 0.27): "bias\nkey_bias",
        (6.02, y + 0.04): "positional",
        (6.9, y + 0.27): "value_bias",
        (9.6, y + 0.04): "map_after",
    }
    below = "mixing, spatial_bias"
    drawn = re.findall(r"\w+", " ".join([*fields.values(), below]))
    if sorted(drawn) != sorted(LayerPosition._fields):
        raise ValueError(f"the drawing must have every field of LayerPosition once, got {drawn}.")
    for (x, end), text in fields.items():
        arrow(ax, (x, y + 0.8), (x, end), DARK_ORANGE)
        label(ax, x, y + 0.85, text, DARK_ORANGE, va="bottom", family="monospace")
    label(ax, 5.2, 0.25, f"Gated MLPs and mixers have   {below}   instead of attention.")
    return figure


def fold() -> Figure:
    """Draw a model before and after folding."""
    figure, ax = canvas(9.2, 2.9)
    label(ax, 2.3, 2.7, "as trained: computed in every forward pass", size=9.5)
    label(ax, 7.2, 2.7, "folded: constants for this grid", size=9.5)
    box(ax, 0.75, 0.6, "parameters", 1.1, color=ORANGE)
    box(ax, 0.75, 1.3, "grid", 1.1, color=ORANGE)
    for layer in range(3):
        y = 0.5 + 0.8 * layer
        box(ax, 2.55, y, "LN, resample,\nlook up, ...", 1.3, 0.5, color=GREEN)
        arrow(ax, (1.32, 0.95), (1.88, y), DARK_ORANGE)
        arrow(ax, (3.22, y), (3.68, y), DARK_ORANGE)
        box(ax, 4.2, y, f"layer {layer}", 1.0, color=BLUE)
        box(ax, 6.5, y, "(N, D)", 0.9, color=ORANGE)
        arrow(ax, (6.97, y), (7.52, y), DARK_ORANGE)
        box(ax, 8.05, y, f"layer {layer}", 1.0, color=BLUE)
    arrow(ax, (5.0, 1.5), (5.85, 1.5))
    label(ax, 5.42, 1.68, "fold", size=9.5, family="monospace")
    arrow(ax, (5.85, 1.1), (5.0, 1.1))
    label(ax, 5.42, 0.92, "unfold", size=9.5, family="monospace")
    return figure


DRAWINGS = {drawing.__name__: drawing for drawing in (grid, encoding, joining, layer_position, fold)}


def main() -> None:
    """Write all drawings."""
    import io

    matplotlib.rcParams["svg.hashsalt"] = "graticule"
    for name, draw in DRAWINGS.items():
        np.random.seed(0)
        buffer = io.BytesIO()
        draw().savefig(buffer, format="svg", metadata={"Date": None})
        print(f"wrote {write_bytes(FOLDER / f'{name}.svg', buffer.getvalue())}")


if __name__ == "__main__":
    main()
