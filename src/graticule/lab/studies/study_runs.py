"""Runs of a study or a comparison: training and measuring those that a table lacks, and writing it after each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from graticule.lab.studies.arms import Arm, read_arms, write_arms
from graticule.lab.studies.execution import train_runs
from graticule.lab.studies.plan import PlannedRun, check_choices, plan
from graticule.lab.studies.results import Results, supported_decimals
from graticule.lab.studies.study import (
    TRAINED,
    UNPLACED,
    Measured,
    Study,
    StudyRow,
    origin,
    place,
    read_table,
    recipe_hash,
    run_hash,
    write_table,
)
from graticule.lab.tasks.parts.image_scores import Mode, evaluate
from graticule.lab.training.recipe import TrainingRecipe
from graticule.lab.training.run import Run, surroundings
from graticule.lab.training.run_folder import lock_folder
from graticule.lab.training.task import build_data
from graticule.lab.training.validation import in_precision
from graticule.system.files import make_folder, read_json, write_json

#: Seconds that another process may take to add its rows to a table.
_PATIENCE = 60.0


def compare(
    choices: Mapping[str, TrainingRecipe],
    seeds: Sequence[int],
    folder: str | Path,
    *,
    progress: bool = True,
    command: str = "",
    replace: bool = False,
    executor: Executor | None = None,
    sizes: Sequence[tuple[int, int]] = (),
    mode: Mode = "zoom",
) -> Results:
    """Train every choice with every seed under `folder`, and write `comparison.md`, .csv, .png and .json there.

    A comparison is a study without a file, whose choices are tested against the first. Finished runs are not trained
    again, so an interrupted comparison resumes where it stopped. The run of a choice and a seed is in
    FOLDER/CHOICE/seed-SEED, where all characters of CHOICE except letters, digits, _, =, + and - are replaced by -.

    Args:
        choices: name -> recipe.
        seeds: the seeds of every choice.
        folder: of the runs and the tables.
        progress: whether progress is printed.
        command: recorded in `comparison.json`.
        replace: whether a comparison in `folder` that has further choices or seeds may be replaced.
        executor: trains the runs, such as any `concurrent.futures.Executor`; this process by default, one run after the
            other.
        sizes: (height, width) of further images that the last weights are tested at.
        mode: how images are changed to those sizes.

    Raises:
        ValueError: before any work, if a choice cannot be built or has another metric than the first, an existing run
            has another recipe, or the folder has a comparison with further choices.
    """
    runs, folder = plan(choices, seeds, folder), Path(folder)
    if not replace:
        _check_replaced(folder, choices, seeds)
    first = next(iter(choices.values()))
    if other := [name for name, recipe in choices.items() if type(recipe) is not type(first)]:
        raise ValueError(f"`choices` must be recipes of one task, {first.task}, got {other[0]!r}, which is not.")
    fields = [field.name for field in dataclasses.fields(first) if field.name != "seed"]
    changes = {
        name: {key: getattr(recipe, key) for key in fields if getattr(recipe, key) != getattr(first, key)}
        for name, recipe in choices.items()
    }
    study = Study(
        question="",
        recipe=first,
        choices=changes,
        seconds=None,
        seeds=tuple(seeds),
        sizes=tuple(sizes),
        modes=(mode,),
    )
    arms, examples = check_choices(study, runs)
    study = dataclasses.replace(study, decimals=supported_decimals(first.metric, examples, len(seeds)))
    train_runs(runs, executor, progress=progress)
    rows = [row for run in runs for row in measured_rows(study, run, arms[run.choice].parameters)]
    results = Results("comparison", study, rows, folder=folder, arms=list(arms.values()))
    results.write(folder)
    write_arms(write_table(folder / "comparison.csv", rows), arms.values())
    values = {name: {k: v for k, v in recipe.to_dict().items() if k != "seed"} for name, recipe in choices.items()}
    common = {k: v for k, v in values[next(iter(values))].items() if all(of.get(k) == v for of in values.values())}
    record = {
        "command": command,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "recipe": common,
        "choices": {name: {k: v for k, v in of.items() if k not in common} for name, of in values.items()},
        "seeds": list(seeds),
        "metric": dataclasses.asdict(first.metric),
        first.metric.key: results.scores(),
        "parameters": {name: arm.parameters for name, arm in arms.items()},
        **surroundings(),
    }
    write_json(folder / "comparison.json", record)
    return results


def _check_replaced(folder: Path, choices: Mapping[str, TrainingRecipe], seeds: Sequence[int]) -> None:
    """Check that no comparison in `folder` has choices or seeds that are not given now."""
    file = folder / "comparison.json"
    record = read_json(file) if file.is_file() else {}
    if not isinstance(record, dict):
        raise ValueError(f"{file} is damaged: it must be a JSON object.")
    lost = [name for name in record.get("choices", ()) if name not in choices]
    if missing := [*lost, *(f"seed {seed}" for seed in record.get("seeds", ()) if seed not in seeds)]:
        raise ValueError(
            f"`folder` must not have a comparison with further choices or seeds, got {str(folder)!r}, which also has "
            f"{', '.join(missing)}; give them as well, choose another folder, or replace it (--replace)."
        )


def missing_runs(
    study: Study, rows: Sequence[StudyRow], folder: Path, *, quick: bool = False, data_root: Path | None = None
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
    measured = {row.cell for row in rows}
    return [
        dataclasses.replace(run, guess=study.seconds_of(study.cells[run.choice][1]))
        for run in plan(recipes, study.seeds, folder)
        if (*study.cells[run.choice], run.recipe.seed) not in measured
    ]


def run_study(
    study: Study,
    folder: Path,
    table: Path,
    *,
    quick: bool = False,
    data_root: Path | None = None,
    executor: Executor | None = None,
    progress: bool = True,
) -> None:
    """Train and measure the runs that `table` lacks, and write it after every run.

    Finished runs in `folder` are measured and not trained again, so an interrupted study resumes where it stopped.

    Args:
        study: the study.
        folder: of the runs.
        table: the CSV file of the results.
        quick: only a few steps per run.
        data_root: folder of the data set.
        executor: trains the runs, as in `compare`.
        progress: whether progress is printed.

    Raises:
        ValueError: if a choice cannot be built, or not as the study expects, or the table has scores of another recipe,
            of other data, or of another model; before any work.
    """
    rows = read_table(table)
    missing = missing_runs(study, rows, folder, quick=quick, data_root=data_root)
    _check_data(study, rows, quick=quick, data_root=data_root)
    arms, _ = check_choices(study, missing, quick=quick)
    if arms:
        _add_arms(table, arms.values(), folder)

    def measure(run: PlannedRun) -> None:
        _add_rows(table, measured_rows(study, run, arms[run.choice].parameters), folder)

    for run in missing:  # trained earlier, and not measured
        if run.run.finished:
            measure(run)
    train_runs(missing, executor, progress=progress, ended=measure)


def _check_data(study: Study, rows: Sequence[StudyRow], *, quick: bool, data_root: Path | None) -> None:
    """Check that the scores of a table are of the data of the study, as far as the table has their hashes."""
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


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Lock `folder`, whose tables other processes may write meanwhile.

    Raises:
        OSError: if another process holds the lock of `folder`.
    """
    make_folder(folder)
    with lock_folder(folder, wait=_PATIENCE) as free:
        if not free:
            raise OSError(f"{folder} is in use by another process; end it and start again. Finished runs are kept.")
        yield


def _add_rows(table: Path, rows: Sequence[StudyRow], folder: Path) -> None:
    """Add the rows of runs that `table` lacks; other processes may have added the same since it was read."""
    with _writing(folder):
        before = read_table(table)
        known = {row.cell for row in before}
        write_table(table, [*before, *(row for row in rows if row.cell not in known)])


def _add_arms(table: Path, arms: Iterable[Arm], folder: Path) -> None:
    """Write arms to the file beside `table`; those with scores in the table must be as they are there."""
    with _writing(folder):
        measured = {row.cell[:2] for row in read_table(table)}
        known = {(arm.choice, arm.variant): arm for arm in read_arms(table)}
        for arm in arms:
            stored = known.get(cell := (arm.choice, arm.variant))
            if stored is None or cell not in measured:
                known[cell] = arm
            elif wrong := arm.differences(vars(stored)):
                raise ValueError(
                    f"`study` must build the models of its table, got another one for {arm.choice!r}, which must have "
                    f"{'; '.join(wrong)}; restore it, or move {table.name} and {table.stem}_arms.csv away."
                )
        write_arms(table, known.values())


def measured_rows(study: Study, planned: PlannedRun, parameters: int) -> list[StudyRow]:
    """Measure a finished run; returns its rows of the table."""
    run = Run(planned.folder)
    cell = (*study.cells[planned.choice], planned.recipe.seed)
    result, metric = run.result(), planned.recipe.metric.key
    scores = [(metric, TRAINED, result[f"last_{metric}"]), *_at_conditions(study, run)]
    scores += study.measure(run) if study.measure else ()
    about: dict[str, Any] = {"parameters": parameters, "seconds": round(result["seconds"], 1), **origin(run)}
    return [StudyRow(*cell, *score, **about) for score in scores]


def _at_conditions(study: Study, run: Run) -> Iterator[Measured]:
    """Measure the last weights at the sizes of the study."""
    if not study.sizes:
        return
    data = run.data()
    gpu = run.recipe().accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    model = in_precision(run.model(data, "last"), run.recipe().precision, device)
    for mode in study.modes:
        sizes = [(h, w) for h, w in study.sizes if mode != "crop" or (h <= data.size[0] and w <= data.size[1])]
        for score in evaluate(model, data, sizes, device=device, mode=mode, measure_cost=False, progress=False):
            at = place(mode, score.size)
            yield "top1", at, score.top1
            yield "loss", at, round(score.loss, 5)
            if score.placed is False:
                yield UNPLACED, at, 1.0
