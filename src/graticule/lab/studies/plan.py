"""Plan of the runs of a comparison: every choice with every seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from graticule.lab.studies.runs import read_metrics
from graticule.lab.tasks.parts.image_scores import check_sizes
from graticule.lab.training.recipe import TrainingRecipe
from graticule.lab.training.run import Run
from graticule.lab.training.run_folder import RunFolder
from graticule.lab.training.task import task_of


@dataclass(frozen=True)
class PlannedRun:
    """One run, which need not exist yet."""

    choice: str
    recipe: TrainingRecipe
    folder: Path

    @property
    def run(self) -> RunFolder:
        """Return its folder with the names of its files."""
        return RunFolder(self.folder)

    @property
    def epochs(self) -> int:
        """Return the number of epochs of its recipe."""
        return self.recipe.epochs + self.recipe.cooldown_epochs

    def epoch_seconds(self) -> list[float]:
        """Return the wall time of every finished epoch."""
        try:
            return [value for value in read_metrics(self.run.metrics_file).get("seconds", []) if math.isfinite(value)]
        except (OSError, ValueError):  # no epoch yet, or a damaged file, which training will report
            return []


def plan(choices: Mapping[str, TrainingRecipe], seeds: Sequence[int], folder: str | Path) -> list[PlannedRun]:
    """List the runs of a comparison, seed by seed, so that an interruption leaves complete pairs.

    Raises:
        ValueError: if there are no choices or seeds, a seed is repeated, two choices have the same folder, or choices
            have different metrics.
    """
    if not (isinstance(choices, Mapping) and choices and seeds) or len(set(seeds)) < len(seeds):
        raise ValueError(
            "`choices` must be a dictionary, name -> recipe, with entries, and `seeds` must not be empty and differ, "
            f"got {list(choices)}, {list(seeds)}."
        )
    metric = next(iter(choices.values())).metric
    if other := [name for name, recipe in choices.items() if recipe.metric != metric]:
        raise ValueError(f"`choices` must all be judged by {metric.label}, got {other[0]!r}, which is not.")
    folders: dict[str, str] = {}
    for name in choices:
        if (same := folders.setdefault(_folder_name(name), name)) != name:
            raise ValueError(f"`choices` must have different letters and digits, got {same!r} and {name!r}.")
    return [
        PlannedRun(name, dataclasses.replace(recipe, seed=seed), Path(folder) / _folder_name(name) / f"seed-{seed}")
        for seed in seeds
        for name, recipe in choices.items()
    ]


def seconds_left(runs: Sequence[PlannedRun]) -> list[float | None]:
    """Estimate the wall time that is left of each run of a plan; None without a finished epoch."""
    measured = [run.epoch_seconds() for run in runs]
    of_choices: dict[str, list[float]] = {}
    for run, seconds in zip(runs, measured, strict=True):
        of_choices.setdefault(run.choice, []).extend(seconds)
    paces = {choice: fmean(seconds) for choice, seconds in of_choices.items() if seconds}
    left = []
    for run, seconds in zip(runs, measured, strict=True):
        pace = fmean(seconds) if seconds else paces.get(run.choice, fmean(paces.values()) if paces else None)
        estimate = None if pace is None else pace * (run.epochs - len(seconds))
        left.append(0.0 if run.run.finished else estimate)
    return left


def planned_rows(runs: Sequence[PlannedRun]) -> list[tuple[str, ...]]:
    """Return a header, one row per run with its state and an estimate of the time left, and a row of their sum."""
    rows: list[tuple[str, ...]] = [("choice", "seed", "folder", "state", "time left")]
    times = seconds_left(runs)
    for run, left in zip(runs, times, strict=True):
        state = "finished" if run.run.finished else f"epoch {len(run.epoch_seconds())} of {run.epochs}"
        time = "unknown" if left is None else format_seconds(left)
        rows.append((run.choice, str(run.recipe.seed), str(run.folder), state, time))
    total = "unknown" if None in times else format_seconds(sum(filter(None, times)))
    return [*rows, ("all", "", "", f"{sum(left == 0 for left in times)} of {len(runs)} finished", total)]


def check_choices(
    runs: Sequence[PlannedRun],
    *,
    sizes: Sequence[tuple[int, int]] = (),
    inspect: Callable[[str, Any, int], object] = lambda name, model, images: None,
) -> tuple[dict[str, int], int | None]:
    """Check that choices can be built and take the sizes, and that existing runs have this recipe and data.

    `inspect` is called with the name of each choice, its untrained model and its images per epoch.

    Returns the parameters of every choice, and the number of test examples: None if these differ or are not known.
    """
    parameters, examples, data_of = {}, set(), {}
    for name, recipe in {planned.choice: planned.recipe for planned in runs}.items():
        task = task_of(recipe)
        data = data_of[name] = task.build_data()
        order = data.train_order()
        recipe.warmup(order.steps)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = task.build_model(task.describe(data))
        inspect(name, model, order.examples)
        parameters[name] = sum(parameter.numel() for parameter in model.parameters())
        check_sizes(model, sizes)
        examples.add(getattr(data, "num_test", None))
    for planned in runs:
        run = Run(planned.folder)
        run.check_use(planned.recipe, resume=True)
        run.check_data(data_of[planned.choice])
    return parameters, examples.pop() if len(examples) == 1 else None


def _folder_name(choice: str) -> str:
    """Return the name of the folder of a choice."""
    return "".join(c if c.isalnum() or c in "-_=+" else "-" for c in choice)


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
