"""Several choices, several seeds, one table: mean, standard deviation, and paired tests against the first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import torch

from graticule.files import write_json, write_text
from graticule.metric import Metric
from graticule.studies.significance import format_p, holm, holm_note, paired_p
from graticule.tasks import Run, TrainingRecipe, build_data, build_model, data_sizes, train


@dataclass(frozen=True)
class Comparison:
    """The metric of every choice and seed, top-1 or bits per byte: `scores[choice][i]` is that of `seeds[i]`.

    The score is that of the last epoch: the best epoch is picked by looking at the test data, and would
    flatter every choice.
    """

    seeds: tuple[int, ...]
    scores: dict[str, list[float]]
    parameters: dict[str, int]
    runs: dict[str, list[Run]]
    metric: Metric

    @property
    def columns(self) -> tuple[str, ...]:
        """Headers of the rows."""
        unit = f" ({self.metric.unit})" if self.metric.unit else ""
        mean = f"{self.metric.label}, mean{unit}" + ("" if self.metric.highest else ", the lower the better")
        return ("choice", "parameters", "seeds", mean, "s.d.", "against the first", "p (paired t)", "p (Holm)")

    def rows(self) -> list[tuple[str, ...]]:
        """One row per choice, as in `columns`; a dash where there are too few seeds to say."""
        places = self.metric.decimals
        first = next(iter(self.scores.values()))
        tests = dict(zip(list(self.scores)[1:], zip(self.tests, holm(self.tests), strict=True), strict=True))
        rows: list[tuple[str, ...]] = []
        for name, scores in self.scores.items():
            deviation = f"{stdev(scores):.{places}f}" if len(scores) > 1 else "-"
            difference = f"{fmean(scores) - fmean(first):+.{places}f}" if name in tests else "-"
            mean = self.metric.show(fmean(scores), unit=False)
            p = map(format_p, tests.get(name, (None, None)))
            rows.append((name, f"{self.parameters[name]:,}", str(len(scores)), mean, deviation, difference, *p))
        return rows

    @property
    def tests(self) -> list[float | None]:
        """p of the paired t-test of every choice but the first against it; None where there is none."""
        first, *others = self.scores.values()
        return [paired_p(scores, first) for scores in others]

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows()]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def verdict(self) -> list[str]:
        """Say for each choice what the numbers show against the first, at 5 percent over all; then how it is tested."""
        first, *names = self.scores
        said = []
        for name, p in zip(names, holm(self.tests), strict=True):
            difference = fmean(self.scores[name]) - fmean(self.scores[first])
            found = f"{name} against {first}: {difference:+.{self.metric.decimals}f}"
            if not math.isfinite(difference):
                said.append(f"{name} against {first}: a score is no number.")
            elif p is None:
                said.append(f"{found}, with too few seeds for a test.")
            elif p < 0.05:
                said.append(f"{found}, p = {p:.3g}: a difference beyond chance.")
            else:
                said.append(f"{found}, p = {p:.2g}: no difference within error.")
        count = sum(p is not None for p in self.tests)
        return [*said, f"{holm_note(count)}."] if names else said


def compare(
    choices: Mapping[str, TrainingRecipe], seeds: Sequence[int], folder: str | Path, *, progress: bool = True
) -> Comparison:
    """Train every choice with every seed under `folder`, and write `comparison.md` and `comparison.json` there.

    What is there already is not trained again, so an interrupted comparison goes on where it stood.

    Raises:
        ValueError: if a choice cannot be built or is of another task than the first, or a run that is there was made
            by another recipe; before any work.
    """
    folder = Path(folder)
    if not choices or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(
            f"`choices` and `seeds` must not be empty, nor seeds twice, got {list(choices)}, {list(seeds)}."
        )
    plan = {
        name: [(dataclasses.replace(recipe, seed=seed), _folder(folder, name, seed)) for seed in seeds]
        for name, recipe in choices.items()
    }
    metric = next(iter(choices.values())).metric
    if other := [name for name, recipe in choices.items() if recipe.metric != metric]:
        raise ValueError(f"`choices` must all be judged by {metric.label}, got {other[0]!r}, which is not.")
    parameters = {}
    for name, recipe in choices.items():
        sizes = data_sizes(build_data(recipe))
        with torch.device("meta"):
            model = build_model(recipe, *sizes)
        parameters[name] = sum(p.numel() for p in model.parameters())
        for resolved, place in plan[name]:
            Run(place).check_recipe(resolved)
    scores: dict[str, list[float]] = {name: [] for name in choices}
    runs: dict[str, list[Run]] = {name: [] for name in choices}
    for index, seed in enumerate(seeds):  # seed by seed, so that an interruption leaves pairs
        for name in choices:
            recipe, place = plan[name][index]
            if progress:
                print(f"{name}, seed {seed} -> {place}", flush=True)
            run = train(recipe, place, resume=True, progress=progress)
            scores[name].append(run.result()[f"last_{metric.key}"])
            runs[name].append(run)
    comparison = Comparison(tuple(seeds), scores, parameters, runs, metric)
    write_text(folder / "comparison.md", comparison.markdown() + "\n\n" + "\n".join(comparison.verdict()) + "\n")
    write_json(folder / "comparison.json", {"seeds": list(seeds), metric.key: scores, "parameters": parameters})
    return comparison


def _folder(folder: Path, choice: str, seed: int) -> Path:
    safe = "".join(c if c.isalnum() or c in "-_=+" else "-" for c in choice)
    return folder / safe / f"seed-{seed}"
