"""The figures of docs/which.md and of docs/extrapolation.md: `python -m evidence.figures` draws them from docs/data."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

from matplotlib.figure import Figure
from pandas import DataFrame

from evidence.choices import ranked
from evidence.contrasts import Registry
from evidence.results import rows_of
from evidence.studies import Study
from graticule.lab.figures.save import save_figure
from graticule.lab.figures.style import decorate, line_style
from graticule.lab.studies.results import TRAINED

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
#: The choices of the figure, and what its panels show.
DRAWN = ("learnable", "learnable, lape", "rope(preset='dinov3')", "rope", "peg", "none", "learnable(std=1)")
MODES = {"canvas": "the digit keeps its size on an empty canvas", "zoom": "the digit grows with the image"}


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


def lines(study: Study, rows: DataFrame) -> Figure:
    """Draw the top-1 of some choices against the number of tokens, on a canvas and zoomed."""
    figure = Figure(figsize=(8.4, 4.0), layout="constrained")
    sides = {20: TRAINED, **{side: f" {side}" for side, _ in study.sizes}}
    shares = [(side / 20) ** 2 for side in sides]
    for ax, (mode, title) in zip(figure.subplots(1, 2, sharey=True), MODES.items(), strict=True):
        decorate(ax)
        places = [at if at == TRAINED else mode + at for at in sides.values()]
        for index, choice in enumerate(DRAWN):
            of_choice = rows[(rows.choice == choice) & (rows.metric == "top1")]
            values = [[*of_choice[of_choice["at"] == at].value] for at in places]
            ax.errorbar(
                shares, [*map(fmean, values)], [*map(stdev, values)], capsize=2, label=choice, **line_style(index)
            )
        ax.set_xscale("log")
        ax.set_xticks(shares, [f"{share:.3g}x" for share in shares])
        ax.set_xticks([], minor=True)
        ax.set(ylim=(0, 100), xlabel="tokens, relative to training", title=title)
    figure.axes[0].set_ylabel("top-1 (%)")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure


if __name__ == "__main__":
    registry = Registry(DOCS / "data")
    print("wrote", save_figure(forest(registry), DOCS / "figures/which_forest.png"))
    figure = lines(*rows_of("extrapolation", registry))
    print("wrote", save_figure(figure, DOCS / "figures/extrapolation_lines.png"))
