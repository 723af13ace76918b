"""The figure of docs/which.md: `python -m evidence.forest` draws the answers of each question from docs/data."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from evidence.choices import ranked
from evidence.contrasts import Registry
from graticule.lab.figures.save import save_figure
from graticule.lab.figures.style import decorate

DOCS = Path("docs")
#: Task and column of docs/which.md -> title of its panel.
PANELS = {
    ("same size", "trained size"): "digits, as in training",
    ("zoomed", "zoomed"): "digits, objects grow",
    ("canvas", "empty canvas"): "digits, empty canvas",
    ("segment", "ViT"): "CamVid, a plain ViT",
    ("relations", "6 x 6 cells"): "gym, as in training",
    ("relations", "9 x 9 cells"): "gym, more cells",
}


def forest(registry: Registry) -> Figure:
    """Draw the differences from the table of each question with their intervals; filled ones are significant."""
    figure = Figure(figsize=(9.6, 7.6), layout="constrained")
    for ax, ((task, wanted), title) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
        found = [(label, contrast) for label, column, _, contrast in ranked(registry, task) if column == wanted]
        tests = [(label.strip("`"), contrast, test) for label, contrast in reversed(found) if (test := contrast.test)]
        decorate(ax)
        ax.axvline(0, color="0.5", linewidth=1)
        for height, (_, contrast, test) in enumerate(tests):
            ax.hlines(height, test.low, test.high, color="C0")
            filled = contrast.answer.startswith(("larger", "smaller"))
            ax.plot(test.difference, height, "o", color="C0", markerfacecolor="C0" if filled else "white")
        ax.set_yticks(range(len(tests)), [label for label, *_ in tests], fontsize=8)
        ax.set_title(title, fontsize=10)
    figure.supxlabel("difference from a learnable table, in points, with its 95 % interval", fontsize=10)
    return figure


if __name__ == "__main__":
    print("wrote", save_figure(forest(Registry(DOCS / "data")), DOCS / "figures/which_forest.png"))
