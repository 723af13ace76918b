"""Plan of the runs of a comparison: every choice with every seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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


def planned_rows(runs: Sequence[PlannedRun]) -> list[tuple[str, ...]]:
    """Return a header, and one row per run with its state."""
    rows: list[tuple[str, ...]] = [("choice", "seed", "folder", "state")]
    for run in runs:
        state = "finished" if run.run.finished else "started" if run.run.recipe_file.exists() else "new"
        rows.append((run.choice, str(run.recipe.seed), str(run.folder), state))
    return rows


def check_choices(
    runs: Sequence[PlannedRun],
    *,
    sizes: Sequence[tuple[int, int]] = (),
    inspect: Callable[[str, Any, int], object] = lambda name, model, images: None,
) -> dict[str, int]:
    """Check that choices can be built and take the sizes, and that existing runs have this recipe and data.

    `inspect` is called with the name of each choice, its untrained model and its images per epoch.

    Returns the parameters of every choice.
    """
    parameters, data_of = {}, {}
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
    for planned in runs:
        run = Run(planned.folder)
        run.check_use(planned.recipe, resume=True)
        run.check_data(data_of[planned.choice])
    return parameters


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
