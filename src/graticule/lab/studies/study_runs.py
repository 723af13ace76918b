"""Runs of a study: training and measuring those that its table lacks, and writing the table after each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graticule.lab.studies.execution import Submits, train_runs
from graticule.lab.studies.plan import PlannedRun, check_choices, plan
from graticule.lab.studies.study import (
    TRAINED,
    Measured,
    Row,
    Study,
    origin,
    place,
    read_table,
    recipe_hash,
    run_hash,
    write_table,
)
from graticule.lab.training.run_folder import locked

if TYPE_CHECKING:
    from graticule.lab.training.run import Run

#: Seconds that another process may take to add its rows to a table.
_PATIENCE = 60.0


def missing_runs(
    study: Study, rows: Sequence[Row], folder: Path, *, quick: bool = False, data_root: Path | None = None
) -> list[PlannedRun]:
    """List the runs that a table lacks, seed by seed.

    Raises:
        ValueError: if the table has scores of another recipe.
    """
    recipes = study.recipes(quick=quick, data_root=data_root)
    hashes = {study.cells[name]: recipe_hash(recipe) for name, recipe in recipes.items()}
    for row in rows:
        now = hashes.get((row.choice, row.variant))
        if now is not None and now != row.recipe.partition("-")[0]:
            raise ValueError(
                f"`study` must have the recipes of its table, got another one for {row.choice!r}"
                f"{f', {row.variant}' if row.variant else ''}, seed {row.seed}: recipe {now}, not {row.recipe}; move "
                "the table away, or remove these rows."
            )
    kept = {row.cell for row in rows}
    return [
        dataclasses.replace(one, guess=study.seconds_of(study.cells[one.choice][1]))
        for one in plan(recipes, study.seeds, folder)
        if (*study.cells[one.choice], one.recipe.seed) not in kept
    ]


def run_study(
    study: Study,
    folder: Path,
    table: Path,
    *,
    part: tuple[int, int] | None = None,
    quick: bool = False,
    data_root: Path | None = None,
    executor: Submits | None = None,
    progress: bool = True,
) -> int:
    """Train and measure the runs that `table` lacks, and write it after every run; returns the number of runs left.

    Finished runs in `folder` are measured and not trained again, so an interrupted study resumes where it stopped.

    Args:
        study: the study.
        folder: of the runs.
        table: the CSV file of the results.
        part: (k, n): train only the k-th of n parts of the runs; the table is written by the process that finds all
            runs finished.
        quick: only a few steps per run.
        data_root: folder of the data set.
        executor: trains the runs, as in `compare`.
        progress: whether progress is printed.

    Raises:
        ValueError: if a choice cannot be built, or the table has scores of another recipe or of other data; before any
            work.
    """
    rows = read_table(table)
    missing = missing_runs(study, rows, folder, quick=quick, data_root=data_root)
    _check_data(study, rows, quick=quick, data_root=data_root)
    parameters, _ = check_choices(missing, study.sizes, study.modes)
    if part is not None and (left := train_runs(missing, executor, part=part, progress=progress)):
        return left

    def measure(one: PlannedRun) -> None:
        _add_rows(table, measured_rows(study, one, parameters[one.choice]), folder)

    for seed in study.seeds:
        missing = missing_runs(study, read_table(table), folder, quick=quick, data_root=data_root)
        wanted = [one for one in missing if one.recipe.seed == seed]
        if not wanted:
            continue
        # an executor gets all runs at once, so that no worker waits for the last run of a seed
        train_runs(wanted if executor is None else missing, executor, progress=progress, ended=measure)
        for one in missing_runs(study, read_table(table), folder, quick=quick, data_root=data_root):
            if one.recipe.seed == seed:  # trained earlier, and not measured
                measure(one)
    return 0


def _check_data(study: Study, rows: Sequence[Row], *, quick: bool, data_root: Path | None) -> None:
    """Check that the scores of a table are of the data of the study, as far as the table has their hashes."""
    from graticule.lab.training.task import build_data

    recipes = {study.cells[name]: recipe for name, recipe in study.recipes(quick=quick, data_root=data_root).items()}
    hashes: dict[tuple[str, str], str] = {}
    for row in rows:
        cell = row.choice, row.variant
        if "-" not in row.recipe or cell not in recipes:
            continue
        if cell not in hashes:
            hashes[cell] = run_hash(recipes[cell], build_data(recipes[cell]).fingerprint())
        if hashes[cell] != row.recipe:
            raise ValueError(
                f"`data_root` must be of the data of the table, got others for {row.choice!r}, seed {row.seed}: "
                f"{hashes[cell]}, not {row.recipe} (recipe-data); restore the data, move the table away, or remove "
                "these rows."
            )


def _add_rows(table: Path, rows: Sequence[Row], folder: Path) -> None:
    """Add the rows of runs that `table` lacks; other processes may have added the same since it was read.

    Raises:
        OSError: if another process holds the lock of `folder`.
    """
    with locked(folder, wait=_PATIENCE) as free:
        if not free:
            raise OSError(f"{folder} is in use by another process; end it and start again. The runs are finished.")
        there = read_table(table)
        known = {row.cell for row in there}
        write_table(table, [*there, *(row for row in rows if row.cell not in known)])


def measured_rows(study: Study, planned: PlannedRun, parameters: int) -> list[Row]:
    """Measure a finished run; returns its rows of the table."""
    from graticule.lab.training.run import Run

    run = Run(planned.folder)
    choice, variant = study.cells[planned.choice]
    result = run.result()
    common: dict[str, Any] = {
        "choice": choice,
        "variant": variant,
        "seed": planned.recipe.seed,
        "parameters": parameters,
        "seconds": round(result["seconds"], 1),
        **origin(run),
    }
    scores = [(planned.recipe.metric.key, TRAINED, result[f"last_{planned.recipe.metric.key}"])]
    scores += [*_at_sizes(study, run), *(study.measure(run) if study.measure else ())]
    return [Row(metric=metric, at=at, value=value, **common) for metric, at, value in scores]


def _at_sizes(study: Study, run: Run) -> Iterator[Measured]:
    """Measure the last weights at the sizes of the study."""
    import torch

    from graticule.lab.tasks.parts.image_scores import evaluate
    from graticule.lab.training.validation import in_precision

    if not study.sizes:
        return
    data = run.data()
    gpu = run.recipe().accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    model = in_precision(run.model(data, "last"), run.recipe().precision, device)
    for mode in study.modes:
        sizes = [(h, w) for h, w in study.sizes if mode != "crop" or (h <= data.size[0] and w <= data.size[1])]
        for score in evaluate(model, data, sizes, device=device, mode=mode, measure_cost=False, progress=False):
            yield "top1", place(mode, score.size), score.top1
            yield "loss", place(mode, score.size), round(score.loss, 5)
