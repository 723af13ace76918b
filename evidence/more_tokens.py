"""The figure of docs/extrapolation.md and README: `python -m evidence.more_tokens` draws it from docs/data."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

from matplotlib.figure import Figure
from pandas import DataFrame

from evidence.contrasts import Registry
from evidence.results import rows_of
from evidence.studies import Study
from graticule.lab.figures.save import save_figure
from graticule.lab.figures.style import decorate, line_style
from graticule.lab.studies.results import TRAINED

DOCS = Path("docs")
#: The choices of the figure, and what its panels show.
DRAWN = ("learnable", "learnable, lape", "rope(preset='dinov3')", "rope", "peg", "none", "learnable(std=1)")
PANELS = {"canvas": "the digit keeps its size on an empty canvas", "zoom": "the digit grows with the image"}


def lines(study: Study, rows: DataFrame) -> Figure:
    """Draw the top-1 of some choices against the number of tokens, on a canvas and zoomed."""
    figure = Figure(figsize=(8.4, 4.0), layout="constrained")
    sides = {20: TRAINED, **{side: f" {side}" for side, _ in study.sizes}}
    shares = [(side / 20) ** 2 for side in sides]
    for ax, (mode, title) in zip(figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True):
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
    figure = lines(*rows_of("extrapolation", Registry(DOCS / "data")))
    print("wrote", save_figure(figure, DOCS / "figures/extrapolation_lines.png"))
