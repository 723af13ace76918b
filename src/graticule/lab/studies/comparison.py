"""Comparisons: training every choice with every seed, and the scores of the runs as rows of a table."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from pandas import DataFrame

from graticule.lab.data.transforms import Mode
from graticule.lab.studies.execution import train_runs
from graticule.lab.studies.plan import PlannedRun, check_choices, plan
from graticule.lab.studies.results import TRAINED, Results, place
from graticule.lab.tasks.parts.image_scores import evaluate
from graticule.lab.training.recipe import RUNTIME_FIELDS, TrainingRecipe
from graticule.lab.training.run import Run, surroundings
from graticule.lab.training.task import recipe_plugins
from graticule.lab.training.validation import with_precision
from graticule.system.files import read_json, write_json


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

    The choices are tested against the first. Finished runs are not trained again, so an interrupted comparison resumes
    where it stopped. The run of a choice and a seed is in FOLDER/CHOICE/seed-SEED, where all characters of CHOICE
    except letters, digits, _, =, + and - are replaced by -.

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
    parameters = check_choices(runs, sizes=sizes)
    train_runs(runs, executor, progress=progress)
    rows = [row for run in runs for row in run_rows(run, parameters[run.choice], sizes, (mode,))]
    results = Results(choices, DataFrame(rows), folder, sizes, mode)
    results.write(folder)
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
        "parameters": parameters,
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


def run_rows(
    planned: PlannedRun,
    parameters: int,
    sizes: Sequence[tuple[int, int]] = (),
    modes: Sequence[Mode] = ("zoom",),
) -> list[dict[str, Any]]:
    """Measure a finished run; returns a row per score, with the recipe, date, versions and machine of the run."""
    run, metric = Run(planned.folder), planned.recipe.metric.key
    result, described = run.result(), read_json(run.recipe_file)
    versions, machine = described.get("versions", {}), described.get("machine", {})
    about = {
        "parameters": parameters,
        "seconds": round(result["seconds"], 1),
        "recipe": run_hash(run.recipe(), described.get("data")),
        "date": datetime.fromtimestamp(run.result_file.stat().st_mtime).date().isoformat(),
        **{name: str(versions.get(name, "")) for name in ("graticule", "torch", "timm")},
        "machine": str(machine.get("gpu", machine.get("processor", ""))),
        "threads": int(machine.get("threads", 0)),
    }
    scores = [(metric, TRAINED, result[f"last_{metric}"]), *_at_conditions(run, sizes, modes)]
    cell = {"choice": planned.choice, "seed": planned.recipe.seed}
    return [{**cell, "metric": key, "at": at, "value": value, **about} for key, at, value in scores]


def _at_conditions(
    run: Run, sizes: Sequence[tuple[int, int]], modes: Sequence[Mode]
) -> Iterator[tuple[str, str, float]]:
    """Measure the last weights at other sizes: yields metric, condition and value."""
    if not sizes:
        return
    data = run.data()
    gpu = run.recipe().accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    model = with_precision(run.model(data, "last"), run.recipe().precision, device)
    for mode in modes:
        for score in evaluate(model, data, sizes, device=device, mode=mode, measure_cost=False, progress=False):
            at = place(mode, score.size)
            yield "top1", at, score.top1
            yield "loss", at, round(score.loss, 5)


def recipe_hash(recipe: TrainingRecipe) -> str:
    """Return the first 12 digits of the SHA-256 of a recipe: of all fields that differ from their defaults.

    The seed is left out, and so are fields that only describe the machine. A field that a later version adds changes no
    hash as long as it has its default. The plugins that define classes of the recipe are included.
    """
    written = recipe.to_dict()
    relevant: dict[str, Any] = {"task": recipe.task}
    if plugins := recipe_plugins(recipe):
        relevant["plugins"] = plugins
    for entry in dataclasses.fields(recipe):
        default = entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
        if entry.name not in (*RUNTIME_FIELDS, "seed") and getattr(recipe, entry.name) != default:
            relevant[entry.name] = written[entry.name]
    return _digits(relevant)


def run_hash(recipe: TrainingRecipe, data: Mapping[str, Any] | None) -> str:
    """Return the hash of a recipe, followed by a hyphen and the hash of its data, if it is known.

    Sizes and times of files are left out, so that it is the same for a copy.
    """
    if not data:
        return recipe_hash(recipe)
    parts = {split: {name: known[name] for name in ("examples", "sha256")} for split, known in data.items()}
    return f"{recipe_hash(recipe)}-{_digits(parts)}"


def _digits(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
