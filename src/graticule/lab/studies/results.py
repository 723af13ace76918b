"""Results of a comparison: means, paired tests, figures and a text, all made of the rows of one table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pandas import DataFrame

from graticule.lab.data.transforms import Mode
from graticule.lab.figures.save import FORMATS, save_figure
from graticule.lab.figures.scores import MOST_LINES, resolution_plot, score_plot
from graticule.lab.studies.plan import format_seconds, plan
from graticule.lab.studies.significance import LEAST, LEVEL, conclusion, format_p, paired, spread
from graticule.lab.training.results import Metric
from graticule.lab.training.run import Run
from graticule.system.files import write_text
from graticule.system.tables import PrintedTable, Rows, markdown

#: Condition of the score of the last epoch of training.
TRAINED = "trained"


def place(mode: str, size: tuple[int, int]) -> str:
    """Return the name of a mode and a size, (height, width): 'canvas 40', 'zoom 32x36'."""
    height, width = size
    return f"{mode} {height}" + f"x{width}" * (height != width)


@dataclass(frozen=True, repr=False)
class Results(PrintedTable):
    """Scores of the runs of a comparison; printed, the last score of each choice and its test against the first.

    choices: name -> recipe.
    rows: a row per score: choice, seed, metric, at (the condition of its measurement), value, parameters, seconds,
        recipe and data (a hash), date, versions, machine.
    folder: of the runs.
    sizes, mode: of the conditions.
    """

    choices: Mapping[str, Any]
    rows: DataFrame
    folder: Path
    sizes: Sequence[tuple[int, int]] = ()
    mode: Mode = "zoom"

    @property
    def metric(self) -> Metric:
        return next(iter(self.choices.values())).metric

    @property
    def endpoint(self) -> str:
        return f"{self.metric.title} after the last epoch"

    @property
    def runs(self) -> dict[str, list[Run]]:
        members: dict[str, list[Run]] = {}
        for planned in plan(self.choices, self.rows.seed.unique().tolist(), self.folder):
            if planned.run.finished:
                members.setdefault(planned.choice, []).append(Run(planned.folder))
        return members

    @property
    def _scores(self) -> DataFrame:
        return self.rows[self.rows.metric == self.metric.key]

    def conditions(self) -> list[str]:
        """Return the conditions that the metric was measured at."""
        return list(self._scores["at"].unique())

    def scores(self, at: str = TRAINED) -> dict[str, list[float]]:
        """Return the values of every choice over seeds, at a condition."""
        rows = self._scores
        return {name: [*by.value] for name, by in rows[rows["at"] == at].groupby("choice", sort=False)}

    def tests(self, trained: bool = True) -> DataFrame:
        """Test every choice against the first (`paired`) after training, or else at all other conditions."""
        rows = self._scores
        return paired(rows[(rows["at"] == TRAINED) == trained], next(iter(self.choices)))

    @property
    def heading(self) -> str:
        return f"{self.endpoint}: mean ± s.d., and differences from the first"

    def summary(self) -> Rows:
        """Return a header, then a row per choice: its score, and its test."""
        rows: Rows = [("choice", "seeds", "score", "difference [95 %]", "p (Holm)", "finding")]
        tests = {name: texts for name, _, _, *texts in self._texts(self.tests())}
        for name, scores in self.scores().items():
            difference, low, high, _, adjusted, finding = tests.get(name, ("", "", "", "", "", ""))
            cells = (f"{difference} [{low}, {high}]", adjusted) if low not in ("", "-") else ("", "")
            rows.append((name, str(len(scores)), spread(scores, self.metric.decimals), *cells, finding))
        return rows

    def findings(self, tests: DataFrame) -> Rows:
        """Return a header, then a row per test of `tests()`: difference, interval, p, p adjusted, finding."""
        rows: Rows = [("choice", "against", "seeds", "difference", "95 % interval", "p", "p (Holm)", "finding")]
        first = next(iter(self.choices))
        for choice, at, seeds, difference, low, high, *texts in self._texts(tests):
            name = choice if at == TRAINED else f"{choice}, {at}"
            rows.append((name, first, seeds, difference, "-" if low == "-" else f"{low} to {high}", *texts))
        return rows

    def _texts(self, tests: DataFrame) -> Iterator[tuple[str, ...]]:
        """Yield the columns of `paired` as text, and the conclusion; a dash for a number that is not finite."""
        count = tests.p.count()
        for choice, at, seeds, *numbers, p, adjusted in tests.itertuples(index=False, name=None):
            texts = [f"{value:+.{self.metric.decimals}f}" if math.isfinite(value) else "-" for value in numbers]
            finding = conclusion(seeds, numbers[0], p, adjusted, count)
            yield choice, at, str(seeds), *texts, format_p(p), format_p(adjusted), finding

    def answer(self) -> str:
        """Return the findings in a sentence: how much each choice is above or below the first."""
        parts = []
        for choice, _, _, difference, low, high, _, _, finding in self._texts(self.tests()):
            interval = "" if low == "-" else f" [{low}, {high}]"
            parts.append(f"{choice} {difference}{interval}, {finding}")
        return f"{self.endpoint}, against {next(iter(self.choices))}: {'; '.join(parts)}." if parts else ""

    def notes(self) -> list[str]:
        """Return sentences on the tests, and on scores that are not alike."""
        tests = self.tests()
        count = int(tests.p.count())
        family = f"{count} test{'s' * (count != 1)}"
        notes = [f"Compared score: {self.endpoint}; p of a paired t-test over seeds, p (Holm) adjusted for {family}."]
        if not count:
            few = f"Differences are not tested: fewer than {LEAST} seeds, or the same difference in all."
            notes = [few] * (len(tests) > 0)
        if ((tests.p < LEVEL) & (tests["p (Holm)"] >= LEVEL)).any():
            notes.append(
                "The intervals are not adjusted: if one excludes zero and the adjusted p is 0.05 or more, the result "
                "is inconclusive."
            )
        return notes

    def provenance(self) -> str:
        """Describe the number, dates, versions and machine of the runs."""
        return provenance(self.rows)

    def tables(self) -> dict[str, tuple[str, Rows]]:
        """Return the tables of the page by name, each with its title; a header and rows."""
        header, *means = mean_table(self._scores, self.metric.decimals)
        if len(self.conditions()) == 1:
            header = (*header[:3], self.metric.title)
        tables = {"means": (f"{self.metric.title}, mean and standard deviation over seeds", [header, *means])}
        tables["tests"] = (f"Tests of {self.endpoint}", self.findings(self.tests()))
        others = self.tests(trained=False)
        title = f"Tests at other conditions; p (Holm) adjusted for {others.p.count()} tests"
        tables["differences"] = (title, self.findings(others))
        return {name: table for name, table in tables.items() if len(table[1]) > 1}

    def markdown(self, figures: Iterable[str] = ()) -> str:
        """Return the text: origin of the numbers, tables, notes, figures."""
        text = [self.answer(), self.provenance()]
        for title, rows in self.tables().values():
            text += [f"{title}:", markdown(rows)]
        text += [" ".join(self.notes()), *(f"![{self.endpoint}]({figure})" for figure in figures)]
        return "\n\n".join(filter(None, text))

    def figures(self) -> dict[str, Figure]:
        """Draw the scores of every choice and seed, and those at other sizes."""
        figures = {"": score_plot(self.scores(), self.endpoint)}
        if self.sizes and len(self.choices) <= MOST_LINES:
            scores = {size: self.scores(place(self.mode, size)) for size in self.sizes}
            by_size = {of: {size: by[of] for size, by in scores.items() if of in by} for of in self.choices}
            trained_at = next(iter(self.choices.values())).img_size
            figures[f"_{self.mode}"] = resolution_plot(by_size, trained_at=trained_at)
        return figures

    def write(self, folder: Path) -> list[Path]:
        """Write table, text and figures into `folder`; returns the paths."""
        written = [write_text(folder / "comparison.csv", self.rows.to_csv(index=False, lineterminator="\n"))]
        for suffix, figure in self.figures().items():
            written += [save_figure(figure, folder / f"comparison{suffix}.{kind}") for kind in FORMATS]
        figures = [path.name for path in written if path.suffix == ".png"]
        return [*written, write_text(folder / "comparison.md", self.markdown(figures) + "\n")]


def mean_table(rows: DataFrame, decimals: int) -> Rows:
    """Return a header, then a row per choice: seeds, parameters, mean and deviation over seeds at each condition.

    A mean of fewer seeds than others in its row is marked with their number.

    Args:
        rows: of one metric.
        decimals: of means and deviations.
    """
    places = [*rows["at"].unique()]
    table: Rows = [("choice", "seeds", "parameters", *places)]
    for choice, scores in rows.groupby("choice", sort=False):
        values = {at: [*by.value] for at, by in scores.groupby("at")}
        most, cells = max(map(len, values.values())), []
        for at in places:
            fewer = f" (n = {len(values[at])})" if at in values and len(values[at]) < most else ""
            cells.append(spread(values.get(at, []), decimals) + fewer)
        table.append((choice, str(most), f"{scores.parameters.iloc[0]:,}", *cells))
    return table


def provenance(rows: DataFrame, planned: int = 0) -> str:
    """Describe the number, dates, versions and machine of runs, of which so many are planned."""
    runs = rows.drop_duplicates([name for name in ("choice", "variant", "seed") if name in rows])
    dates = sorted(runs.date)
    versions = sorted({f"torch {run.torch}" + f", timm {run.timm}" * bool(run.timm) for run in runs.itertuples()})
    machines = sorted({f"{run.machine}, {run.threads} thread{'s' * (run.threads != 1)}" for run in runs.itertuples()})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    seconds = runs.seconds.mean()
    took = f", {format_seconds(seconds)} per run" if math.isfinite(seconds) else ""
    number = f"{len(runs)} of {planned}" if len(runs) < planned else str(len(runs))
    return f"{number} runs, {when}{took}, {'; '.join(machines)}; {'; '.join(versions)}."
