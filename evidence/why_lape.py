"""Contrasts of the study `lape_place`, fixed before its runs, and the tables and figure of docs/why_lape.md.

The study is declared and has not been run yet. `python -m evidence.why_lape` writes them from its table,
docs/data/study_lape_place.csv.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from scipy import stats

from graticule.lab.figures.save import save_figure
from graticule.lab.studies.significance import LEVEL, PairedTest, format_p, paired_test, spread
from graticule.lab.studies.study import TRAINED, read_table
from graticule.lab.studies.tables import between, markdown
from graticule.system.files import write_text

#: The contrasts: name -> (choice, reference, what else differs).
CONTRASTS = {
    "place": ("beside, std 1", "once, std 1", "where the same table is added"),
    "every layer": ("every layer, std 1", "once, std 1", "how often it is added to the stream"),
    "values": ("beside, std 1", "queries and keys, std 1", "whether the values get it too"),
    "norm": ("beside, LN chain", "beside, std 1", "the norms of LaPE, with their scales and shifts"),
    "plain norm": ("beside, Norm", "beside, std 1", "a norm without scale and shift"),
    "chain": ("beside, LN chain", "beside, LN", "whether each norm takes the output of the last"),
}
#: The largest difference that would not matter, in points, at the trained size and at others.
MARGINS = {TRAINED: 1.0, "zoom 28": 3.0, "zoom 40": 3.0, "canvas 28": 3.0, "canvas 40": 3.0}


@dataclass(frozen=True)
class Contrast:
    """A contrast at one size, with its answer.

    name: of the contrast.
    at: condition of the score.
    test: of the differences over seeds.
    adjusted: p adjusted by Benjamini and Yekutieli's method for all contrasts and sizes.
    margin: of equivalence, in points.
    equivalent: p of the two one-sided tests that the difference is within the margin.
    """

    name: str
    at: str
    test: PairedTest
    adjusted: float
    margin: float
    equivalent: float

    @property
    def answer(self) -> str:
        """Return one of four answers: larger or smaller by more than 0, within the margin, or undecided."""
        if self.adjusted < LEVEL:
            return "larger" if self.test.difference > 0 else "smaller"
        return "within the margin" if self.equivalent < LEVEL else "undecided"


def contrasts(scores: Mapping[tuple[str, str], Sequence[float]]) -> list[Contrast]:
    """Test all contrasts at all sizes as one family.

    Args:
        scores: (choice, condition) -> the accuracies of the seeds, in order.
    """
    found = []
    for name, (choice, reference, _) in CONTRASTS.items():
        for at, margin in MARGINS.items():
            ours, theirs = scores[choice, at], scores[reference, at]
            test = paired_test(ours, theirs)
            if test is None:
                raise ValueError(f"`scores` must differ between seeds, got {list(ours)} for {choice!r}, {at}.")
            lower = [value + margin for value in ours]
            upper = [value - margin for value in ours]
            equivalent = max(
                stats.ttest_rel(lower, theirs, alternative="greater").pvalue,
                stats.ttest_rel(upper, theirs, alternative="less").pvalue,
            )
            found.append((name, at, test, margin, float(equivalent)))
    adjusted = stats.false_discovery_control([test.p for _, _, test, _, _ in found], method="by")
    return [
        Contrast(name, at, test, float(p), margin, equivalent)
        for (name, at, test, margin, equivalent), p in zip(found, adjusted, strict=True)
    ]


def scores_of(table: Path) -> dict[tuple[str, str], list[float]]:
    """Read the accuracy of every choice and condition, in the order of the seeds."""
    rows = sorted((row for row in read_table(table) if row.metric == "top1"), key=lambda row: row.seed)
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row.choice, row.at), []).append(row.value)
    return found


def means_table(scores: Mapping[tuple[str, str], Sequence[float]]) -> str:
    """Write the mean accuracy of every choice at every size, with the standard deviation over seeds."""
    choices = dict.fromkeys(choice for choice, _ in scores)
    rows = [["choice", *MARGINS]]
    rows += [[choice, *(spread(scores[choice, at], 1) for at in MARGINS)] for choice in choices]
    return markdown(rows)


def contrasts_table(found: Sequence[Contrast]) -> str:
    """Write a row for every contrast at every size."""
    rows = [["contrast", "size", "difference (95 % interval)", "p", "adjusted p", "margin", "answer"]]
    for one in found:
        interval = f"{one.test.difference:+.2f} ({one.test.low:+.2f} to {one.test.high:+.2f})"
        rows.append(
            [one.name, one.at, interval, format_p(one.test.p), format_p(one.adjusted), f"{one.margin:g}", one.answer]
        )
    return markdown(rows)


def forest_plot(found: Sequence[Contrast]) -> Figure:
    """Draw the differences with their intervals: one panel per contrast, one row per size, the margin shaded."""
    sizes = list(MARGINS)
    figure = Figure(figsize=(10, 5), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True).flat
    for panel, name in zip(panels, CONTRASTS, strict=True):
        for one in (one for one in found if one.name == name):
            row = sizes.index(one.at)
            panel.fill_betweenx([row - 0.4, row + 0.4], -one.margin, one.margin, color="0.9", linewidth=0)
            decided = one.answer in ("larger", "smaller")
            panel.plot([one.test.low, one.test.high], [row, row], color="C0" if decided else "0.45")
            panel.plot(one.test.difference, row, "o", color="C0" if decided else "0.45")
        panel.axvline(0, color="0.3", linewidth=0.8)
        choice, reference, _ = CONTRASTS[name]
        panel.set_title(f"{name}\n{choice} - {reference}", fontsize=9)
        panel.set_yticks(range(len(sizes)), sizes)
    panel.invert_yaxis()
    figure.supxlabel("difference of top-1 (points), 95 % interval; gray: the margin", fontsize=9)
    return figure


def write_page(docs: Path) -> list[Path]:
    """Rewrite the tables of docs/why_lape.md and its figure; returns the paths."""
    scores = scores_of(docs / "data" / "study_lape_place.csv")
    found, page = contrasts(scores), docs / "why_lape.md"
    text = between(page.read_text(encoding="utf-8"), "means", means_table(scores))
    text = between(text, "contrasts", contrasts_table(found))
    return [
        write_text(page, text),
        save_figure(forest_plot(found), docs / "figures" / "why_lape.png"),
    ]


if __name__ == "__main__":
    print("wrote", *write_page(Path("docs")))
