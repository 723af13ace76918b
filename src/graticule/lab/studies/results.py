"""Results of a study or a comparison: means, paired tests, figures and a text, all made of the rows of one table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import sub
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.figure import Figure

from graticule.lab.figures.save import save_figures
from graticule.lab.figures.scores import MOST_LINES, resolution_plot, score_plot
from graticule.lab.studies.arms import Arm, arms_table, read_arms
from graticule.lab.studies.plan import format_seconds, plan
from graticule.lab.studies.significance import (
    LEAST,
    LEVEL,
    POWER,
    Outcome,
    format_p,
    holm,
    paired_outcomes,
    power,
    seeds_needed,
    spread,
)
from graticule.lab.studies.study import TRAINED, UNPLACED, Study, StudyRow, place, read_table
from graticule.lab.studies.tables import Rows, markdown
from graticule.lab.training.results import Metric
from graticule.lab.training.run import Run
from graticule.lab.training.task import metric_of
from graticule.system.files import write_text
from graticule.system.tables import PrintedTable

#: A choice in a variant -> seed -> value.
Values = dict[tuple[str, str], dict[int, float]]


@dataclass(frozen=True)
class Tested(Outcome):
    """Test of the difference between two choices in a variant, or between two such differences.

    differences: of the seeds that both have.
    """

    choice: str
    reference: str
    variant: str
    differences: tuple[float, ...]

    @property
    def conclusion(self) -> str:
        """The conclusion, or why there is no test."""
        if self.test is not None or not all(map(math.isfinite, self.differences)):
            return super().conclusion
        few = f"fewer than {LEAST} seeds"
        return f"not tested: {few if len(self.differences) < LEAST else 'the same difference in all seeds'}"

    @property
    def label(self) -> str:
        """The tested choice, with its variant."""
        return f"{self.choice}, {self.variant}" if self.variant else self.choice

    @property
    def name(self) -> str:
        """Both choices, with the variant."""
        return f"{self.label} against {self.reference}"


@dataclass(frozen=True, repr=False)
class Results(PrintedTable):
    """Scores of the runs of a study, or of a comparison; printed, the endpoint of each choice and its first test.

    name: of the study, and of its files.
    study: the choices, seeds, conditions and tests.
    rows: the rows of its table.
    folder: of its runs; None if only the table is known.
    arms: what its choices are.
    """

    name: str
    study: Study
    rows: Sequence[StudyRow]
    folder: Path | None = None
    arms: Sequence[Arm] = ()

    @classmethod
    def of_table(cls, name: str, study: Study, table: Path, folder: Path | None = None) -> Results:
        """Read the results of the choices of a study from its table, and their arms from the file beside it."""
        arms, cells = {(arm.choice, arm.variant): arm for arm in read_arms(table)}, study.cells.values()
        rows = [row for row in read_table(table) if row.cell[:2] in cells]
        return cls(name, study, rows, folder, [arms[cell] for cell in cells if cell in arms])

    @property
    def metric(self) -> str:
        """The metric of the endpoint."""
        return self.study.endpoint.metric or next((row.metric for row in self.rows if row.at == TRAINED), "score")

    @property
    def endpoint(self) -> str:
        """The name of the endpoint."""
        end, metric = self.study.endpoint, metric_of(self.metric)
        if end.minus is None:
            return f"{_title(self.metric)} {_place(end.at)}"
        name, unit = (metric.label, metric.unit) if metric else (self.metric, "")
        unit = f" ({'points' if unit == '%' else unit})" if unit else ""
        return f"{name} {_place(end.at)} minus that {_place(end.minus)}{unit}"

    @property
    def runs(self) -> dict[str, list[Run]]:
        """The finished runs of every choice in every variant, if their folder is known."""
        members: dict[str, list[Run]] = {}
        for planned in plan(self.study.recipes(), self.study.seeds, self.folder) if self.folder else ():
            if planned.run.finished:
                members.setdefault(planned.choice, []).append(Run(planned.folder))
        return members

    def values(self, at: str) -> Values:
        """Return the values of the metric measured at `at`."""
        values: Values = {}
        for row in self.rows:
            if (row.metric, row.at) == (self.metric, at) and row.choice in self.study.choices:
                values.setdefault((row.choice, row.variant), {})[row.seed] = row.value
        return values

    @property
    def heading(self) -> str:
        """The endpoint."""
        return f"{self.endpoint}: mean ± s.d., and differences from the choice of number 'from'"

    @property
    def footer(self) -> list[str]:
        """What is missing."""
        return [text] if (text := self.interim()) else []

    def summary(self) -> Rows:
        """Return a header, then a row per choice and variant: endpoint, and its first test."""
        rows: Rows = [("choice", "seeds", "endpoint", "from", "difference [95 %]", "p (Holm)", "finding")]
        cells, values, places = list(self.study.cells.values()), self.endpoints(), self.study.decimals
        tests = {(tested.choice, tested.variant): tested for tested in reversed(self.tests())}
        for number, cell in enumerate(cells, 1):
            scores, test = list(values.get(cell, {}).values()), ("",) * 4
            if (tested := tests.get(cell)) is not None and (paired := tested.test) is not None:
                reference = (tested.reference, tested.variant)
                limits = f"[{paired.low:+.{places}f}, {paired.high:+.{places}f}]"
                finding = "no difference found" if paired.p >= LEVEL else "not after correction"
                finding = "beyond chance" if tested.supported else finding
                order = str(cells.index(reference) + 1 if reference in cells else "-")
                test = (order, f"{paired.difference:+.{places}f} {limits}", format_p(tested.adjusted), finding)
            elif tested is not None:
                test = ("", "", "", tested.conclusion)
            rows.append((f"{number} {', '.join(filter(None, cell))}", str(len(scores)), spread(scores, places), *test))
        return rows

    def scores(self, at: str | None = None) -> dict[str, list[float]]:
        """Return the values of every choice over seeds, at a condition, or else of the endpoint."""
        values = self.endpoints() if at is None else self.values(at)
        return {name: list(values[cell].values()) for name, cell in self.study.cells.items() if values.get(cell)}

    def endpoints(self) -> Values:
        """Return the endpoint of every run that has it."""
        end = self.study.endpoint
        values = self.values(end.at)
        if end.minus is None:
            return values
        less = self.values(end.minus)
        return {cell: _less(by, less.get(cell, {})) for cell, by in values.items()}

    def conditions(self) -> list[str]:
        """Return the conditions that the metric was measured at."""
        return list(dict.fromkeys(row.at for row in self.rows if row.metric == self.metric))

    def tests(self) -> list[Tested]:
        """Test the endpoint of the pairs and interactions in every variant, over the seeds that all have."""
        values = self.endpoints()
        pairs: list[tuple[str, str, tuple[str, ...]]] = [(*pair, pair) for pair in self.study.tested]
        pairs += [(f"({a}) - ({b})", f"({c}) - ({d})", (a, b, c, d)) for a, b, c, d in self.study.interactions]
        asked, scores = [], []
        for variant, (choice, reference, names) in product(self.study.variants, pairs):
            seeded = [values.get((name, variant), {}) for name in names]
            left, right = seeded if len(names) == 2 else (_less(*seeded[:2]), _less(*seeded[2:]))
            seeds = sorted(left.keys() & right.keys())
            scores.append(([left[seed] for seed in seeds], [right[seed] for seed in seeds]))
            asked.append((choice, reference, variant, tuple(map(sub, *scores[-1]))))
        outcomes = zip(asked, paired_outcomes(scores), strict=True)
        return [Tested(test.test, test.adjusted, test.tests, *pair) for pair, test in outcomes]

    def means(self) -> Rows:
        """Return a header, then one row per choice: mean and deviation over seeds in each variant and condition.

        A mean of fewer seeds than others in its row is marked with their number.
        """
        tables = {at: self.values(at) for at in self.conditions()}
        measured = [(variant, at) for variant in self.study.variants for at in tables]
        columns = [(v, at) for v, at in measured if any((choice, v) in tables[at] for choice in self.study.choices)]
        header = [" ".join(filter(None, (variant, at * (len(tables) > 1)))) for variant, at in columns]
        rows: Rows = [("choice", "seeds", "parameters", *(name or _title(self.metric) for name in header))]
        parameters = {(row.choice, row.variant): row.parameters for row in self.rows}
        for choice in self.study.choices:
            cells = [tables[at].get((choice, variant), {}) for variant, at in columns]
            if any(cells):
                most = max(map(len, cells))
                sizes = sorted({parameters[choice, v] for v in self.study.variants if (choice, v) in parameters})
                numbers = " to ".join(f"{size:,}" for size in dict.fromkeys((sizes[0], sizes[-1])))
                spreads = [spread(list(cell.values()), self.study.decimals) for cell in cells]
                fewer = [f" (n = {len(cell)})" if 0 < len(cell) < most else "" for cell in cells]
                rows.append((choice, str(most), numbers, *map("".join, zip(spreads, fewer, strict=True))))
        return rows

    def findings(self) -> Rows:
        """Return a header, then a row per test: difference with interval, p, p adjusted, finding."""
        rows: Rows = [("choice", "against", "seeds", "difference", "95 % interval", "p", "p (Holm)", "finding")]
        places = self.study.decimals
        for tested in self.tests():
            if not tested.differences:
                continue
            values = ["-"] * 4
            if (test := tested.test) is not None:
                interval = f"{test.low:+.{places}f} to {test.high:+.{places}f}"
                p = (format_p(test.p), format_p(tested.adjusted))
                values = [f"{test.difference:+.{places}f}", interval, *p]
            elif all(map(math.isfinite, tested.differences)):
                values[0] = f"{fmean(tested.differences):+.{places}f}"
            seeds = str(len(tested.differences))
            rows.append((tested.label, tested.reference, seeds, *values, tested.conclusion))
        return rows

    def differences(self) -> Rows:
        """Return the tests of every choice against the first at every further condition, a family of its own.

        A header, then one row per choice: mean difference, p, and p adjusted; no row if there is one condition.
        """
        first, *others = self.study.choices
        places = [at for at in self.conditions() if at != TRAINED]
        values = {at: {cell: list(by.values()) for cell, by in self.values(at).items()} for at in places}
        pairs = [(values[at].get((name, ""), []), values[at].get((first, ""), [])) for name in others for at in places]
        if not pairs or any(len(scores) != len(reference) or not scores for scores, reference in pairs):
            return []
        tests, decimals = paired_outcomes(pairs), self.study.decimals
        cells = [
            f"{fmean(scores) - fmean(reference):+.{decimals}f} (p {format_p(test.p)}; {format_p(test.adjusted)})"
            for (scores, reference), test in zip(pairs, tests, strict=True)
        ]
        rows = [(name, *cells[len(places) * n : len(places) * (n + 1)]) for n, name in enumerate(others)]
        return [("against the first", *places), *rows]

    def power(self) -> Rows:
        """Return a header, then a row per planned test: power to find the margin, seeds that are needed, and hours.

        The standard deviation is that of the table, or else the expected one of the study. The level is that of the
        smallest p in Holm's method for all planned tests.
        """
        study, level = self.study, LEVEL / max(planned_tests(self.study), 1)
        rows: Rows = [("test", "s.d.", "margin", "seeds", "power", f"seeds for {POWER:.0%}", "hours for them")]
        for test in self.tests():
            deviation = stdev(test.differences) if len(test.differences) > 1 else study.deviation
            seeds, spread_text, numbers = len(study.seeds), "unknown", ["-"] * 3
            if deviation:
                needed = seeds_needed(deviation, study.margin, level)
                hours = needed * 2 * (study.seconds_of(test.variant) or math.nan) / 3600
                spread_text = f"{deviation:.{study.decimals}f}"
                numbers = [f"{power(deviation, study.margin, seeds, level):.0%}", str(needed), f"{hours:.1f}"]
            rows.append((test.name, spread_text, f"{study.margin:g}", str(seeds), *numbers))
        return rows

    def notes(self) -> list[str]:
        """Return sentences on the tests, on missing runs, and on scores that are not alike."""
        tests = self.tests()
        count = tests[0].tests if tests else 0
        notes = [f"Endpoint: {self.endpoint}; p of a paired t-test over seeds, p (Holm) adjusted for {count} tests."]
        if not count:
            notes = (
                [f"Differences are not tested: fewer than {LEAST} seeds, or the same difference in all."]
                if tests
                else []
            )
        if any(test.test is not None and test.test.p < LEVEL and not test.supported for test in tests):
            notes.append(
                "The intervals are not adjusted: if one excludes zero and the adjusted p is 0.05 or more, the result "
                "is inconclusive."
            )
        if choices := dict.fromkeys(row.choice for row in self.rows if row.metric == UNPLACED):
            notes.append(f"With the position of a whole image, since they cannot encode a crop: {', '.join(choices)}.")
        return [*notes, *filter(None, [self.interim()])]

    def interim(self) -> str:
        """Return sentences on the missing runs and tests; empty if no run is missing.

        Findings of tests that were made are also adjusted for all planned tests, as if p of the others were 1: Holm's
        method for the made tests alone is less strict than for the family that was planned.
        """
        runs = {(*cell, seed) for cell in self.study.cells.values() for seed in self.study.seeds}
        missing, tests = len(runs - {row.cell for row in self.rows}), self.tests()
        if not missing:
            return ""
        tested, planned = tests[0].tests if tests else 0, planned_tests(self.study)
        text = f"This is an interim result: {missing:,} of {len(runs):,} planned runs are missing"
        if tested == planned:
            return f"{text}, and findings may change when they are added."
        text += f", and p (Holm) is adjusted for {tested} of {planned} planned tests."
        together = holm([*(test.p for test in tests), *[1.0] * (planned - tested)])
        adjusted = zip(tests, together, strict=False)
        if lost := [test.name for test, p in adjusted if test.supported and (p is None or p >= LEVEL)]:
            text += f" Adjusted for all {planned}, these would not be beyond chance: {'; '.join(lost)}."
        return text

    def provenance(self) -> str:
        """Describe the number, dates, versions and machine of the runs."""
        runs = {row.cell: row for row in self.rows}
        if not runs:
            return f"none of {len(self.study.cells) * len(self.study.seeds)} runs."
        dates = sorted({row.date for row in runs.values()})
        versions = sorted({f"torch {row.torch}" + f", timm {row.timm}" * bool(row.timm) for row in runs.values()})
        machines = sorted({f"{row.machine}, {row.threads} thread{'s' * (row.threads != 1)}" for row in runs.values()})
        planned = len(self.study.cells) * len(self.study.seeds)
        number = str(len(runs)) if len(runs) >= planned else f"{len(runs)} of {planned}"
        when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        seconds = [row.seconds for row in runs.values() if math.isfinite(row.seconds)]
        took = f", {format_seconds(fmean(seconds))} per run" if seconds else ""
        return f"{number} runs, {when}{took}, {'; '.join(machines)}; {'; '.join(versions)}."

    def tables(self) -> dict[str, tuple[str, Rows]]:
        """Return the tables of the page by name, each with its title; a header and rows."""
        measured = f"{_title(self.metric)}, mean and standard deviation over seeds"
        shared, arms = arms_table(self.arms)
        tables = {"arms": (f"As built; all have {shared}", arms), "means": (measured, self.means())}
        tables["tests"] = (f"Tests of {self.endpoint}", self.findings())
        if rows := self.differences():
            count = sum(cell.count("(p ") - cell.count("(p -") for row in rows for cell in row)
            title = f"Differences from the first (p; adjusted by Holm's method for {count} tests)"
            tables["differences"] = (title, rows)
        return {name: table for name, table in tables.items() if len(table[1]) > 1}

    def markdown(self, figures: Iterable[str] = ()) -> str:
        """Return the text: question, origin of the numbers, tables, figures, limits."""
        study = self.study
        follows = f" Based on {study.follows}." if study.follows else ""
        text = [f"**{study.question}**{follows}"] if study.question else []
        if not self.rows:
            seconds = len(study.seeds) * sum(study.seconds_of(variant) or 0.0 for _, variant in study.cells.values())
            return "\n\n".join([*text, f"Not run. It takes about {format_seconds(seconds)} on one core."])
        text += [self.provenance(), study.controls]
        for title, rows in self.tables().values():
            text += [f"{title}:", markdown(rows)]
        text += [" ".join(self.notes()), *(f"![{self.endpoint}]({figure})" for figure in figures), study.limits]
        return "\n\n".join(filter(None, text))

    def figures(self) -> dict[str, Figure]:
        """Draw the endpoint of every choice and seed, and the scores at other sizes."""
        figures = {}
        scores, values = self.scores(), self.endpoints()
        if scores:
            variants = [variant for choice, variant in self.study.cells.values() if values.get((choice, variant))]
            groups = [variants.count(variant) for variant in dict.fromkeys(variants)]
            figures[""] = score_plot(scores, self.endpoint, groups=groups)
        if set(self.study.variants) != {""} or len(scores) > MOST_LINES or not self.folder:
            return figures
        recipe = next(iter(self.study.recipes().values()))
        for mode in self.study.modes if self.study.sizes else ():
            by_size = self._by_condition({place(mode, size): size for size in self.study.sizes})
            figures[f"_{mode}"] = resolution_plot(by_size, trained_at=recipe.img_size)
        return figures

    def _by_condition(self, names: Mapping[str, Any]) -> dict[str, dict[Any, list[float]]]:
        """Return choice -> value of the condition -> values over seeds, for the conditions `names`."""
        scores = {at: self.scores(at) for at in names}
        return {of: {names[at]: by[of] for at, by in scores.items() if of in by} for of in self.scores()}

    def write(self, folder: Path) -> list[Path]:
        """Write table, text and figures into `folder`; returns the paths."""
        written: list[Path] = []
        for suffix, figure in self.figures().items():
            written += save_figures(figure, folder / f"{self.name}{suffix}")
        figures = [path.name for path in written if path.suffix == ".png"]
        return [*written, write_text(folder / f"{self.name}.md", self.markdown(figures) + "\n")]


def supported_decimals(metric: Metric, examples: int | None, seeds: int = 1) -> int:
    r"""Return the number of decimals that `examples` support in a mean over `seeds`.

    A share of n examples is a multiple of 100 / n percent, so the result is the smallest d for which

    .. math:: 10^{-d} \le \frac{100}{n \cdot \text{seeds}},

    and at most 3. A metric that is not a percentage, or of an unknown number of examples, has its own decimals.
    """
    if metric.unit != "%" or examples is None:
        return metric.decimals
    return min(3, max(0, math.ceil(math.log10(examples * seeds / 100) - 1e-9)))


def planned_tests(study: Study) -> int:
    """Return the number of tests whose choices are all planned in the variant."""
    groups, cells = [*study.tested, *study.interactions], set(study.cells.values())
    return sum(all((name, variant) in cells for name in group) for variant in study.variants for group in groups)


def _less(values: Mapping[int, float], others: Mapping[int, float]) -> dict[int, float]:
    """Return the differences of the seeds that both have."""
    return {seed: value - others[seed] for seed, value in values.items() if seed in others}


def _place(at: str) -> str:
    return "after the last epoch" if at == TRAINED else f"at {at}"


def _title(key: str) -> str:
    metric = metric_of(key)
    return key if metric is None else metric.title
