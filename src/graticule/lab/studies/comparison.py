"""Scores of a comparison: mean, standard deviation, and paired tests against the first choice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from graticule.lab.figures.save import save_figures
from graticule.lab.figures.scores import score_plot
from graticule.lab.studies.significance import Outcome, format_p, holm_note, paired_outcomes
from graticule.lab.studies.study_table import origin
from graticule.lab.studies.tables import csv_text, latex_table, markdown
from graticule.lab.training.metric import Metric
from graticule.lab.training.recipe import TrainingRecipe
from graticule.lab.training.run import Run
from graticule.lab.training.surroundings import surroundings
from graticule.system.files import write_json, write_text


@dataclass(frozen=True)
class Comparison:
    """The scores of every choice and seed: `scores[choice][i]` is that of `seeds[i]`.

    The score is that of the last epoch: the best epoch is selected on the test data, so its score would be too
    optimistic.

    seconds: wall time of each run, in the form of `scores`.
    examples: number of examples of a percentage; None for another metric, or if it is not known.
    """

    seeds: tuple[int, ...]
    scores: dict[str, list[float]]
    parameters: dict[str, int]
    runs: dict[str, list[Run]]
    metric: Metric
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    examples: int | None = None

    @property
    def decimals(self) -> int:
        """Return the number of decimals of a mean that the number of examples and seeds supports."""
        return supported_decimals(self.metric, self.examples, len(self.seeds))

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the headers of the rows."""
        unit = f" ({self.metric.unit})" if self.metric.unit else ""
        mean = f"{self.metric.label}, mean{unit}" + ("" if self.metric.highest else ", lower is better")
        tests = ("against the first", "p (paired t)", "p (Holm)")
        return ("choice", "parameters", "seeds", mean, "s.d.", *tests, "time per run")

    def rows(self) -> list[tuple[str, ...]]:
        """Return one row per choice, as in `columns`; a dash for values that need more seeds."""
        places = self.decimals
        first = next(iter(self.scores.values()))
        outcomes = dict(zip(list(self.scores)[1:], self.outcomes, strict=True))
        rows: list[tuple[str, ...]] = []
        for name, scores in self.scores.items():
            deviation = f"{stdev(scores):.{places}f}" if len(scores) > 1 else "-"
            difference, p, adjusted = "-", None, None
            if name in outcomes:
                difference = f"{fmean(scores) - fmean(first):+.{places}f}"
                p, adjusted = outcomes[name].p, outcomes[name].adjusted
            time = format_seconds(fmean(self.seconds[name])) if self.seconds.get(name) else "-"
            numbers = (f"{self.parameters[name]:,}", str(len(scores)), f"{fmean(scores):.{places}f}", deviation)
            rows.append((name, *numbers, difference, format_p(p), format_p(adjusted), time))
        return rows

    @property
    def outcomes(self) -> list[Outcome]:
        """Return the test of every choice but the first against the first."""
        first, *others = self.scores.values()
        return paired_outcomes([(scores, first) for scores in others])

    def markdown(self) -> str:
        """Return the table in Markdown."""
        return markdown([self.columns, *self.rows()])

    def verdict(self) -> list[str]:
        """Return a sentence per choice on its test against the first, at 5 percent over all, and one on the tests."""
        first, *names = self.scores
        if not names:
            return []
        said = []
        for name, outcome in zip(names, self.outcomes, strict=True):
            difference = fmean(self.scores[name]) - fmean(self.scores[first])
            if math.isfinite(difference):
                shown = outcome.finding(self.decimals)
                said.append(f"{name} against {first}: {difference:+.{self.decimals}f}, {shown}.")
            else:
                said.append(f"{name} against {first}: a score is not a finite number.")
        return [*said, f"{holm_note(self.outcomes[0].tests)}."]


def supported_decimals(metric: Metric, examples: int | None, seeds: int = 1) -> int:
    r"""Return the number of decimals that `examples` support in a mean over `seeds`.

    A share of n examples is a multiple of 100 / n percent, so the result is the smallest d for which

    .. math:: 10^{-d} \le \frac{100}{n \cdot \text{seeds}},

    and at most 3. A metric that is not a percentage, or of an unknown number of examples, has its own decimals.
    """
    if metric.unit != "%" or examples is None:
        return metric.decimals
    return min(3, max(0, math.ceil(math.log10(examples * seeds / 100) - 1e-9)))


def format_seconds(seconds: float) -> str:
    """Write a duration.

    >>> [format_seconds(seconds) for seconds in (3.21, 59, 61, 7260)]
    ['3.2 s', '59 s', '1 min 1 s', '2 h 1 min']
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def write_comparison(
    comparison: Comparison, recipes: Mapping[str, TrainingRecipe], folder: Path, command: str = ""
) -> list[Path]:
    """Write `comparison.md`, .csv, .tex, .png, .pdf, .svg and .json in `folder`; returns the paths."""
    verdict = "\n".join(comparison.verdict())
    return [
        write_text(folder / "comparison.md", f"{comparison.markdown()}\n\n{verdict}\n"),
        write_text(folder / "comparison.csv", csv_of(comparison, folder)),
        write_text(folder / "comparison.tex", latex_table(comparison.columns, comparison.rows())),
        *save_figures(score_plot(comparison.scores, comparison.metric.title), folder / "comparison"),
        write_json(folder / "comparison.json", _record(comparison, recipes, folder, command)),
    ]


def csv_of(comparison: Comparison, folder: Path) -> str:
    """Return one row per run: choice, seed, score, wall time in seconds, parameters, folder, and its origin."""
    records: list[dict[str, Any]] = []
    for name, scores in comparison.scores.items():
        seconds, runs = comparison.seconds[name], comparison.runs[name]
        for seed, score, wall, run in zip(comparison.seeds, scores, seconds, runs, strict=True):
            place = {"parameters": comparison.parameters[name], "folder": run.folder.relative_to(folder)}
            values = {comparison.metric.key: score, "seconds": f"{wall:.1f}", **place}
            records.append({"choice": name, "seed": seed, **values, **origin(run)})
    return csv_text(records, records[0])


def _record(
    comparison: Comparison, recipes: Mapping[str, TrainingRecipe], folder: Path, command: str
) -> dict[str, Any]:
    """Return the values needed to repeat a comparison, and its numbers."""
    values = {name: {k: v for k, v in recipe.to_dict().items() if k != "seed"} for name, recipe in recipes.items()}
    first, *others = values.values()
    common = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    return {
        "command": command,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "recipe": common,
        "choices": {name: {k: v for k, v in of.items() if k not in common} for name, of in values.items()},
        "seeds": list(comparison.seeds),
        "metric": dataclasses.asdict(comparison.metric),
        "examples": comparison.examples,
        comparison.metric.key: comparison.scores,
        "seconds": comparison.seconds,
        "parameters": comparison.parameters,
        "runs": {name: [str(run.folder.relative_to(folder)) for run in runs] for name, runs in comparison.runs.items()},
        **surroundings(),
    }
