"""Comparison of choices: their runs, and their scores with standard deviations and tests against the first choice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from graticule.lab.figures.save import save_figures
from graticule.lab.figures.scores import score_plot
from graticule.lab.studies.execution import Submits, train_runs
from graticule.lab.studies.plan import check_choices, format_seconds, plan, with_guesses
from graticule.lab.studies.significance import Outcome, format_p, holm_note, paired_outcomes
from graticule.lab.studies.study import origin
from graticule.lab.studies.tables import csv_text, markdown
from graticule.lab.training.recipe import TrainingRecipe
from graticule.lab.training.results import Metric
from graticule.lab.training.run import Run, surroundings
from graticule.system.files import read_json, write_json, write_text

if TYPE_CHECKING:
    from graticule.lab.tasks.parts.image_scores import Mode


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


def write_comparison(
    comparison: Comparison, recipes: Mapping[str, TrainingRecipe], folder: Path, command: str = ""
) -> list[Path]:
    """Write `comparison.md`, .csv, .png, .pdf, .svg and .json in `folder`; returns the paths."""
    table, verdict = markdown([comparison.columns, *comparison.rows()]), "\n".join(comparison.verdict())
    return [
        write_text(folder / "comparison.md", f"{table}\n\n{verdict}\n"),
        write_text(folder / "comparison.csv", csv_of(comparison, folder)),
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


def compare(
    choices: Mapping[str, TrainingRecipe],
    seeds: Sequence[int],
    folder: str | Path,
    *,
    progress: bool = True,
    command: str = "",
    replace: bool = False,
    executor: Submits | None = None,
    part: tuple[int, int] | None = None,
    sizes: Sequence[tuple[int, int]] = (),
    mode: Mode = "zoom",
) -> Comparison | None:
    """Train every choice with every seed under `folder`, and write `comparison.md`, .csv, .png and .json there.

    Finished runs are not trained again, so an interrupted comparison resumes where it stopped. Several machines may
    run the same comparison in a shared folder: each takes runs that no other process trains. The run of a choice and a
    seed is in FOLDER/CHOICE/seed-SEED, where all characters of CHOICE except letters, digits, _, =, + and - are
    replaced by -.

    Args:
        choices: name -> recipe.
        seeds: the seeds of every choice.
        folder: of the runs and the tables.
        progress: whether progress is printed.
        command: recorded in `comparison.json`.
        replace: whether a comparison in `folder` that has further choices or seeds may be replaced.
        executor: trains the runs, such as any `concurrent.futures.Executor`; this
            process by default, one run after the other.
        part: (k, n): train only the k-th of n parts of the runs, for several machines that share `folder`. The result
            is None until all runs are finished.
        sizes: (height, width) of further images that every choice must be able to take.
        mode: how images are changed to those sizes.

    Raises:
        ValueError: before any work, if a choice cannot be built or has another metric than the first, an existing run
            has another recipe, or the folder has a comparison with further choices.
    """
    runs = plan(choices, seeds, folder)
    if not replace:
        _check_replaced(Path(folder), choices, seeds)
    parameters, examples = check_choices(runs, sizes, (mode,))
    if progress and executor is None:
        runs = with_guesses(runs)
    if train_runs(runs, executor, part=part or (1, 1), progress=progress):
        return None
    metric = next(iter(choices.values())).metric
    trained = {name: [Run(one.folder) for one in runs if one.choice == name] for name in choices}
    results = {name: [run.result() for run in members] for name, members in trained.items()}
    scores = {name: [result[f"last_{metric.key}"] for result in found] for name, found in results.items()}
    seconds = {name: [result["seconds"] for result in found] for name, found in results.items()}
    comparison = Comparison(tuple(seeds), scores, parameters, trained, metric, seconds, examples)
    write_comparison(comparison, choices, Path(folder), command)
    return comparison


def _check_replaced(folder: Path, choices: Mapping[str, TrainingRecipe], seeds: Sequence[int]) -> None:
    """Check that no comparison in `folder` has choices or seeds that are not given now."""
    file = folder / "comparison.json"
    if not file.is_file():
        return
    kept = read_json(file)
    if not isinstance(kept, dict):
        raise ValueError(f"{file} is damaged: it must be a JSON object.")
    lost = [name for name in kept.get("choices", ()) if name not in choices]
    if missing := [*lost, *(f"seed {seed}" for seed in kept.get("seeds", ()) if seed not in seeds)]:
        raise ValueError(
            f"`folder` must not have a comparison with further choices or seeds, got {str(folder)!r}, which also has "
            f"{', '.join(missing)}; give them as well, choose another folder, or replace it (--replace)."
        )
