"""Report of a study: means, tests, a figure and a text for the docs, all generated from the rows of its table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from graticule.lab.figures.save import save_figures
from graticule.lab.figures.scores import score_plot
from graticule.lab.studies.images import Correct, crossed_interval, read_images
from graticule.lab.studies.plan import format_seconds
from graticule.lab.studies.significance import (
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
from graticule.lab.studies.study import TRAINED, Row, Study, read_table
from graticule.lab.studies.tables import Rows, markdown
from graticule.lab.training.task import metric_of
from graticule.system.files import write_text

#: A choice in a variant -> seed -> value.
Values = dict[tuple[str, str], dict[int, float]]


@dataclass(frozen=True)
class Tested(Outcome):
    """Test of the difference between two choices in a variant, or between two such differences.

    differences: of the seeds that both have.
    images: 95 % interval over other seeds and other test images; None if the latter are not known.
    """

    choice: str
    reference: str
    variant: str
    differences: tuple[float, ...]
    images: tuple[float, float] | None = None

    @property
    def seeds(self) -> int:
        """The number of seeds that both have."""
        return len(self.differences)

    @property
    def label(self) -> str:
        """The tested choice, with its variant."""
        return f"{self.choice}, {self.variant}" if self.variant else self.choice

    @property
    def name(self) -> str:
        """The two choices, with the variant."""
        return f"{self.label} against {self.reference}"


@dataclass(frozen=True)
class StudyReport:
    """Results of a study.

    name: of the study.
    study: the study.
    rows: the rows of its table.
    images: which test images its runs classify correctly.
    """

    name: str
    study: Study
    rows: Sequence[Row]
    images: Sequence[Correct] = ()

    @classmethod
    def of_table(cls, name: str, study: Study, table: Path) -> StudyReport:
        """Read the results of a study from its table, and the file of images beside it."""
        return cls(name, study, read_table(table), read_images(table))

    @property
    def metric(self) -> str:
        """The metric of the endpoint."""
        return self.study.endpoint.metric or next((row.metric for row in self.rows if row.at == TRAINED), "score")

    @property
    def endpoint(self) -> str:
        """The name of the endpoint."""
        end, metric = self.study.endpoint, metric_of(self.metric)
        if end.label:
            return end.label
        if end.minus is None:
            return f"{_title(self.metric)} {_place(end.at)}"
        name, unit = (metric.label, metric.unit) if metric else (self.metric, "")
        said = f"{name} {_place(end.at)} minus that {_place(end.minus)}"
        return f"{said} ({'points' if unit == '%' else unit})" if unit else said

    @property
    def measured(self) -> str:
        """Return a sentence that describes the table of means."""
        return f"{_title(self.metric)} with the recipe `{self.study.recipe}`, mean and standard deviation over seeds."

    def values(self, at: str, metric: str | None = None) -> Values:
        """Return the values measured at `at`."""
        wanted = metric or self.metric
        found: Values = {}
        for row in self.rows:
            if (row.metric, row.at) == (wanted, at) and row.choice in self.study.choices:
                found.setdefault((row.choice, row.variant), {})[row.seed] = row.value
        return found

    def endpoints(self) -> Values:
        """Return the endpoint of every run that has it."""
        end = self.study.endpoint
        found = self.values(end.at)
        if end.minus is None:
            return found
        less = self.values(end.minus)
        return {cell: _less(by, less.get(cell, {})) for cell, by in found.items()}

    def tests(self) -> list[Tested]:
        """Test the endpoint of the pairs and interactions in every variant, over the seeds that all have."""
        values = self.endpoints()
        found = []
        for variant in self.study.variants:
            given = {choice: values.get((choice, variant), {}) for choice in self.study.choices}
            pairs: list[tuple[str, str, tuple[str, ...]]] = [(*pair, pair) for pair in self.study.tested]
            pairs += [(f"({a}) - ({b})", f"({c}) - ({d})", (a, b, c, d)) for a, b, c, d in self.study.interactions]
            for choice, reference, names in pairs:
                if len(names) == 2:
                    ours, theirs = (given[name] for name in names)
                else:
                    a, b, c, d = (given[name] for name in names)
                    ours, theirs = _less(a, b), _less(c, d)
                seeds = sorted(ours.keys() & theirs.keys())
                scores = ([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
                found.append((choice, reference, variant, scores, self._over_images(names, variant, seeds)))
        outcomes = paired_outcomes([scores for *_, scores, _ in found])
        return [
            Tested(one.test, one.adjusted, one.tests, choice, reference, variant, tuple(map(sub, *scores)), images)
            for (choice, reference, variant, scores, images), one in zip(found, outcomes, strict=True)
        ]

    def _over_images(self, names: Sequence[str], variant: str, seeds: Sequence[int]) -> tuple[float, float] | None:
        """Return the interval of a - b, or (a - b) - (c - d), over seeds and images.

        None if images are missing, or the endpoint is another number than the accuracy on them.
        """
        if (self.metric, self.study.endpoint.at, self.study.endpoint.minus) != ("top1", TRAINED, None):
            return None
        correct = {(one.choice, one.variant, one.seed): one.values for one in self.images}
        runs = [[(name, variant, seed) for name in names] for seed in seeds]
        if len(seeds) < 2 or any(run not in correct for of_seed in runs for run in of_seed):
            return None
        signs = np.array((1, -1, -1, 1)[: len(names)])
        return crossed_interval([signs @ np.stack([correct[run] for run in of_seed]) for of_seed in runs])

    def means(self, metric: str | None = None) -> Rows:
        """Return a header, then one row per choice: mean and deviation over seeds in each variant and condition.

        A mean of fewer seeds than others in its row is marked with their number.

        Args:
            metric: that of the endpoint by default.
        """
        metric = metric or self.metric
        places = dict.fromkeys(row.at for row in self.rows if row.metric == metric)
        tables = {at: self.values(at, metric) for at in places}
        measured = [(variant, at) for variant in self.study.variants for at in places]
        columns = [(v, at) for v, at in measured if any((choice, v) in tables[at] for choice in self.study.choices)]
        header = [" ".join(filter(None, (variant, at if len(places) > 1 else ""))) for variant, at in columns]
        rows: Rows = [("choice", "seeds", "parameters", *(name or _title(metric) for name in header))]
        parameters = {(row.choice, row.variant): row.parameters for row in self.rows}
        for choice in self.study.choices:
            cells = [tables[at].get((choice, variant), {}) for variant, at in columns]
            if any(cells):
                counts = sorted({len(cell) for cell in cells if cell})
                sizes = sorted({parameters[choice, v] for v in self.study.variants if (choice, v) in parameters})
                spreads = [spread(list(cell.values()), self.study.decimals) for cell in cells]
                fewer = [f" (n = {len(cell)})" if 0 < len(cell) < counts[-1] else "" for cell in cells]
                shown = [f"{text}{mark}" for text, mark in zip(spreads, fewer, strict=True)]
                rows.append((choice, str(counts[-1]), _range(sizes), *shown))
        return rows

    def findings(self) -> Rows:
        """Return a header, then a row per test: difference with interval, effect size, p, p adjusted, finding."""
        rows: Rows = [
            ("choice", "against", "seeds", "difference", "95 % interval", "Hedges' g", "p", "p (Holm)", "finding")
        ]
        places, tests = self.study.decimals, self.tests()
        if images := any(one.images for one in tests):
            rows[0] = (*rows[0][:5], "over images too", *rows[0][5:])
        for one in tests:
            if not one.seeds:
                continue
            values = ["-"] * 5
            if (test := one.test) is not None:
                interval = f"{test.low:+.{places}f} to {test.high:+.{places}f}"
                effect = "-" if test.effect is None else f"{test.effect:+.1f}"
                p = (format_p(test.p), format_p(one.adjusted))
                values = [f"{test.difference:+.{places}f}", interval, effect, *p]
            if images:
                wider = "-" if one.images is None else "{:+.{p}f} to {:+.{p}f}".format(*one.images, p=places)
                values.insert(2, wider)
            rows.append((one.label, one.reference, str(one.seeds), *values, one.conclusion))
        return rows

    def power(self) -> Rows:
        """Return a header, then a row per planned test: power to find the margin, seeds that are needed, and hours.

        The standard deviation is that of the table, or else the expected one of the study. The level is that of the
        smallest p in Holm's method for all planned tests.
        """
        study, level = self.study, LEVEL / max(planned_tests(self.study), 1)
        rows: Rows = [("test", "s.d.", "margin", "seeds", "power", f"seeds for {POWER:.0%}", "hours for them")]
        for one in self.tests():
            found = stdev(one.differences) if len(one.differences) > 1 else study.deviation
            if not found:
                rows.append((one.name, "unknown", f"{study.margin:g}", str(len(study.seeds)), "-", "-", "-"))
                continue
            reached = power(found, study.margin, len(study.seeds), level)
            needed = seeds_needed(found, study.margin, level)
            hours = needed * 2 * study.seconds_of(one.variant) / 3600
            rows.append(
                (
                    one.name,
                    f"{found:.{study.decimals}f}",
                    f"{study.margin:g}",
                    str(len(study.seeds)),
                    f"{reached:.0%}",
                    str(needed),
                    f"{hours:.1f}",
                )
            )
        return rows

    def markdown(self, figure: str | None = None) -> str:
        """Return the text for the docs: question, file, origin of the numbers, tables, figure, limits."""
        study = self.study
        asked = f"**{study.question}**" + (f" Based on {study.follows}." if study.follows else "")
        file = f"`{self.name}.py{f' --data-root {study.folder}' if study.folder else ''}`"
        if not self.rows:
            return f"{asked}\n\n{file}: not run. It takes about {self.cost()} on one core."
        text = [asked, f"{file}: {self.provenance()}"]
        if study.controls:
            text.append(study.controls)
        text.append(self.measured)
        text.append(markdown(self.means()))
        for metric in self.study.described:
            text += [f"{_title(metric)}:", markdown(self.means(metric))]
        if len(rows := self.findings()) > 1:
            tests = self.tests()
            count = tests[0].tests
            said = f"Endpoint: {self.endpoint}. " + (
                f"p is from a paired t-test over seeds, and p (Holm) is adjusted by Holm's method for {count} "
                f"test{'s' * (count != 1)}."
                if count
                else "Differences are not tested, which takes two seeds."
            )
            if any(one.test is not None and one.test.p < LEVEL and not one.supported for one in tests):
                said += (
                    " The intervals are not adjusted: if one excludes zero and the adjusted p is 0.05 or more, the "
                    "result is inconclusive."
                )
            if any(one.images for one in tests):
                said += ' "Over images too" is the interval for other seeds and other test images.'
            text += [f"{said} {self.interim()}".rstrip(), markdown(rows)]
        if figure:
            text += [f"![{self.endpoint} of every choice and seed]({figure})", self.caption()]
        if study.limits:
            text.append(study.limits)
        return "\n\n".join(text)

    def interim(self) -> str:
        """Return sentences on the missing runs and tests; empty if no run is missing.

        Findings of tests that were made are also adjusted for all planned tests, as if p of the others were 1: Holm's
        method for the made tests alone is less strict than for the family that was planned.
        """
        runs, tests = planned_runs(self.study), self.tests()
        missing = runs - len({row.cell for row in self.rows})
        if missing <= 0:
            return ""
        made, planned = tests[0].tests if tests else 0, planned_tests(self.study)
        said = f"This is an interim result: {missing:,} of {runs:,} planned runs are missing"
        if made == planned:
            return f"{said}, and findings may change when they are added."
        said += (
            f", and p (Holm) is adjusted for {made} of {planned} planned tests. Findings may change with the others."
        )
        together = holm([*(one.p for one in tests), *[1.0] * (planned - made)])
        found = [(one.name, p) for one, p in zip(tests, together, strict=False) if one.supported]
        if lost := [name for name, p in found if p is None or p >= LEVEL]:
            said += f" Adjusted for all {planned}, these would not be beyond chance: {'; '.join(lost)}."
        elif found:
            said += f" Adjusted for all {planned}, the differences beyond chance remain."
        return said

    def provenance(self) -> str:
        """Describe the number, dates, versions and machine of the runs."""
        runs = {row.cell: row for row in self.rows}
        dates, versions, machines = (
            sorted({of(row) for row in runs.values()})
            for of in (
                lambda row: row.date,
                lambda row: f"torch {row.torch}, timm {row.timm}",
                lambda row: f"{row.machine}, {row.threads} thread{'s' * (row.threads != 1)}",
            )
        )
        wanted = planned_runs(self.study)
        there = len(runs) if len(runs) >= wanted else f"{len(runs)} of {wanted}"
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        took = format_seconds(fmean(row.seconds for row in runs.values()))
        return f"{there} runs, {when}, {took} per run, {'; '.join(machines)}; {'; '.join(versions)}."

    def cost(self) -> str:
        """Return an estimate of the wall time on one core of the runs that are not in the table."""
        took: dict[str, list[float]] = {}
        for row in {row.cell: row for row in self.rows}.values():
            took.setdefault(row.variant, []).append(row.seconds)
        kept = {row.cell for row in self.rows}
        left = sum(
            fmean(took[variant]) if variant in took else self.study.seconds_of(variant)
            for choice, variant in self.study.cells.values()
            for seed in self.study.seeds
            if (choice, variant, seed) not in kept
        )
        return format_seconds(left)

    def figure_scores(self) -> dict[str, list[float]]:
        """Return the endpoint over seeds by the name of choice and variant, for `graticule.lab.figures.scores`."""
        values = self.endpoints()
        return {name: list(values[cell].values()) for name, cell in self.study.cells.items() if values.get(cell)}

    def caption(self) -> str:
        """Return a sentence for each variant on what the figure shows: its highest and its lowest mean."""
        said = []
        for variant in self.study.variants:
            means: dict[str, list[str]] = {}  # written mean -> choices, from the lowest on
            found = [
                (fmean(by.values()), choice) for (choice, of), by in self.endpoints().items() if of == variant and by
            ]
            for mean, choice in sorted(found):
                means.setdefault(f"{mean:.{self.study.decimals}f}", []).append(f"'{choice}'")
            ends = [f"{' and '.join(choices)} ({mean})" for mean, choices in means.items()]
            said += [f"{variant or 'Means'}: highest {ends[-1]}, lowest {ends[0]}."] if ends else []
        return " ".join(said)

    def figure_groups(self) -> list[int]:
        """Return the number of rows of each variant in the figure; each is compared with the first of its variant."""
        values = self.endpoints()
        shown = [variant for choice, variant in self.study.cells.values() if values.get((choice, variant))]
        return [shown.count(variant) for variant in dict.fromkeys(shown)]


def write_report(report: StudyReport, folder: Path) -> list[Path]:
    """Write text and figure of a study into `folder`."""
    written: list[Path] = []
    if scores := report.figure_scores():
        figure = score_plot(scores, report.endpoint, groups=report.figure_groups())
        written += save_figures(figure, folder / f"study_{report.name}")
    text = report.markdown(written[0].name if written else None)
    return [*written, write_text(folder / f"study_{report.name}.md", text + "\n")]


def planned_runs(study: Study) -> int:
    """Return the number of planned runs."""
    return len(study.cells) * len(study.seeds)


def planned_tests(study: Study) -> int:
    """Return the number of tests whose choices are all planned in the variant."""
    groups, cells = [*study.tested, *study.interactions], set(study.cells.values())
    return sum(all((name, variant) in cells for name in group) for variant in study.variants for group in groups)


def _less(values: Mapping[int, float], others: Mapping[int, float]) -> dict[int, float]:
    """Return the differences of the seeds that both have."""
    return {seed: value - others[seed] for seed, value in values.items() if seed in others}


def _range(numbers: Iterable[int]) -> str:
    found = [f"{number:,}" for number in numbers]
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}" if found else "-"


def _place(at: str) -> str:
    return "after the last epoch" if at == TRAINED else f"at {at}"


def _title(key: str) -> str:
    metric = metric_of(key)
    return key if metric is None else metric.title
