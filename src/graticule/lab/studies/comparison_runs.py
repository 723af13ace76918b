"""Training of several choices with several seeds, and the plan of their runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from graticule.lab.studies.comparison import Comparison, format_seconds, write_comparison
from graticule.lab.studies.execution import Submits, train_runs
from graticule.lab.studies.runs import read_metrics
from graticule.lab.training.module import warmup_of
from graticule.lab.training.recipe import TrainingRecipe
from graticule.lab.training.run import Run
from graticule.lab.training.task import task_of
from graticule.system.files import read_json


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison."""

    choice: str
    recipe: TrainingRecipe
    folder: Path

    def seconds_left(self, known: Mapping[str, float], guess: float | None = None) -> float | None:
        """Estimate the wall time that is left; None without a finished epoch or a guess.

        Args:
            known: choice -> seconds per epoch, measured in other runs.
            guess: seconds of a whole run, used if no epoch was measured.
        """
        run = Run(self.folder)
        if run.finished:
            return 0.0
        done = _epoch_seconds(run)
        pace = fmean(done) if done else known.get(self.choice, fmean(known.values()) if known else None)
        epochs = self.recipe.epochs + self.recipe.cooldown_epochs
        return guess if pace is None else pace * (epochs - len(done))


def plan(choices: Mapping[str, TrainingRecipe], seeds: Sequence[int], folder: str | Path) -> list[PlannedRun]:
    """List the runs of a comparison, seed by seed, so that an interruption leaves complete pairs.

    Raises:
        ValueError: if there are no choices or seeds, a seed is repeated, two choices have the same folder, or choices
            have different metrics.
    """
    if not choices or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(
            f"`choices` and `seeds` must not be empty, and seeds must differ, got {list(choices)}, {list(seeds)}."
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


def planned_rows(runs: Sequence[PlannedRun], guesses: Mapping[str, float] | None = None) -> list[tuple[str, ...]]:
    """Return a header, one row per run with its state and an estimate of the time left, and a row of their sum.

    Args:
        runs: a plan.
        guesses: choice -> seconds of a run, used if no epoch was measured.
    """
    found = [(one, _epoch_seconds(Run(one.folder))) for one in runs]
    known = {
        choice: fmean(seconds)
        for choice in dict.fromkeys(one.choice for one in runs)
        if (seconds := [value for one, times in found if one.choice == choice for value in times])
    }
    rows: list[tuple[str, ...]] = [("choice", "seed", "folder", "state", "time left")]
    lefts = [one.seconds_left(known, (guesses or {}).get(one.choice)) for one in runs]
    for (one, done), left in zip(found, lefts, strict=True):
        epochs = one.recipe.epochs + one.recipe.cooldown_epochs
        state = "finished" if Run(one.folder).finished else f"epoch {len(done)} of {epochs}"
        time = "unknown" if left is None else format_seconds(left)
        rows.append((one.choice, str(one.recipe.seed), str(one.folder), state, time))
    total = "unknown" if None in lefts else format_seconds(sum(left for left in lefts if left is not None))
    rows.append(("all", "", "", f"{sum(left == 0 for left in lefts)} of {len(runs)} finished", total))
    return rows


def compare(
    choices: Mapping[str, TrainingRecipe],
    seeds: Sequence[int],
    folder: str | Path,
    *,
    progress: bool = True,
    command: str = "",
    replace: bool = False,
    executor: Submits | None = None,
) -> Comparison:
    """Train every choice with every seed under `folder`, and write `comparison.md`, .csv, .tex, .png and .json there.

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
        executor: trains the runs, as any `concurrent.futures.Executor`, a Dask client or an executor of submitit; this
            process by default, one run after the other.

    Raises:
        ValueError: before any work, if a choice cannot be built or has another metric than the first, an existing run
            has another recipe, or the folder has a comparison with further choices.
    """
    runs, parameters, examples = _prepare(choices, seeds, Path(folder), replace)
    train_runs(runs, executor, progress=progress)
    comparison = _collect(choices, seeds, runs, parameters, examples)
    write_comparison(comparison, choices, Path(folder), command)
    return comparison


def train_part(
    choices: Mapping[str, TrainingRecipe],
    seeds: Sequence[int],
    folder: str | Path,
    part: tuple[int, int],
    *,
    progress: bool = True,
    replace: bool = False,
    executor: Submits | None = None,
) -> int:
    """Train the k-th of n parts of the runs of a comparison, part = (k, n); returns the number of unfinished runs.

    The parts can be trained by several machines that share `folder`; `compare` then writes the tables.

    Raises:
        ValueError: as in `compare`.
    """
    number, parts = part
    if not 1 <= number <= parts:
        raise ValueError(f"`part` must be K/N with K from 1 to N, such as 2/4, got {number}/{parts}.")
    runs, *_ = _prepare(choices, seeds, Path(folder), replace)
    train_runs(runs[number - 1 :: parts], executor, progress=progress)
    return sum(not Run(one.folder).finished for one in runs)


def _prepare(
    choices: Mapping[str, TrainingRecipe], seeds: Sequence[int], folder: Path, replace: bool
) -> tuple[list[PlannedRun], dict[str, int], int | None]:
    """Check everything before any work; returns the runs, the parameters of every choice and the test examples."""
    runs = plan(choices, seeds, folder)
    if not replace:
        _check_replaced(folder, choices, seeds)
    return runs, *check_choices(choices, runs)


def check_choices(
    choices: Mapping[str, TrainingRecipe], runs: Sequence[PlannedRun]
) -> tuple[dict[str, int], int | None]:
    """Check that every choice can be built and that no existing run has another recipe.

    Returns the number of parameters of every choice, and of test examples: None if the latter differ or are not known.
    """
    parameters, examples = {}, set()
    for name, recipe in choices.items():
        task = task_of(recipe)
        data = task.build_data()
        warmup_of(recipe, data.train_order().steps)
        with torch.device("meta"):
            model = task.build_model(task.describe(data))
        parameters[name] = sum(p.numel() for p in model.parameters())
        examples.add(getattr(data, "num_test", None))
    for one in runs:
        run = Run(one.folder)
        if run.recipe_file.exists():
            run.check_plugins()
        run.check_recipe(one.recipe)
    return parameters, examples.pop() if len(examples) == 1 else None


def _collect(
    choices: Mapping[str, TrainingRecipe],
    seeds: Sequence[int],
    planned: Sequence[PlannedRun],
    parameters: dict[str, int],
    examples: int | None,
) -> Comparison:
    """Read the results of finished runs."""
    metric = next(iter(choices.values())).metric
    runs = {name: [Run(one.folder) for one in planned if one.choice == name] for name in choices}
    results = {name: [run.result() for run in members] for name, members in runs.items()}
    scores = {name: [result[f"last_{metric.key}"] for result in found] for name, found in results.items()}
    seconds = {name: [result["seconds"] for result in found] for name, found in results.items()}
    return Comparison(tuple(seeds), scores, parameters, runs, metric, seconds, examples)


def _check_replaced(folder: Path, choices: Mapping[str, TrainingRecipe], seeds: Sequence[int]) -> None:
    """Check that no comparison in `folder` has choices or seeds that are not given now.

    Raises:
        ValueError: if one has; the message names them.
    """
    file = folder / "comparison.json"
    if not file.is_file():
        return
    kept = read_json(file)
    if not isinstance(kept, dict):
        raise ValueError(f"{file} is damaged: it must be a JSON object.")
    if missing := [*_lost(kept, "choices", choices), *(f"seed {seed}" for seed in _lost(kept, "seeds", seeds))]:
        raise ValueError(
            f"`folder` must not have a comparison with further choices or seeds, got {str(folder)!r}, which also has "
            f"{', '.join(missing)}; give them as well, choose another folder, or replace it (--replace)."
        )


def _lost(kept: Mapping[str, Iterable[object]], key: str, now: Collection[object]) -> list[str]:
    """Return the choices or seeds of an existing comparison that are not given now."""
    return [str(one) for one in kept.get(key, ()) if one not in now]


def _epoch_seconds(run: Run) -> list[float]:
    """Return the wall time of every finished epoch of a run."""
    try:
        return [value for value in read_metrics(run.metrics_file).get("seconds", []) if math.isfinite(value)]
    except (OSError, ValueError):  # no epoch yet, or a damaged file, which training will report
        return []


def _folder_name(choice: str) -> str:
    """Return the name of the folder of a choice."""
    return "".join(c if c.isalnum() or c in "-_=+" else "-" for c in choice)
