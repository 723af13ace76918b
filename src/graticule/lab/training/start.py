"""The start of a run: its weights, and its record."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from graticule.checkpoints.load import load_position
from graticule.checkpoints.transfer import Transfer
from graticule.hub.config import classes_within
from graticule.lab.data.sampling import BatchOrder
from graticule.lab.training.opening import label_names, open_backbone
from graticule.lab.training.run import Run, run_of, surroundings
from graticule.lab.training.task import Task, recipe_plugins
from graticule.system.files import write_json


def starting_weights(task: Task[Any, Any], model: nn.Module, data: Any) -> Transfer | None:
    """Load the weights that a recipe starts from; returns the report on a whole checkpoint."""
    recipe, run, report = task.recipe, None, None
    names: tuple[str, ...] = ()
    source: Path | None = recipe.start_from
    weights: Any = source
    if source is not None:
        if not source.exists():
            raise FileNotFoundError(f"`start_from` must be a run or a checkpoint, got {str(source)!r}, no such file.")
        run, names = run_of(source), label_names(source)
        if run is not None and run.folder == source and (weights := run.best) is None:
            raise FileNotFoundError(f"`start_from` must be a run with a checkpoint, got {str(source)!r}.")
    elif recipe.of_source:
        opened = open_backbone(recipe.model)
        weights, names = opened.state_dict(), label_names(opened)
        known, used = opened.pretrained_cfg.get("mean"), getattr(getattr(data, "info", None), "mean", None)
        if known and used and tuple(known) != tuple(used):
            print(
                f"images are normalized with the mean {used} of {data.info.name}, and {recipe.model} was trained with "
                f"{tuple(known)}",
                file=sys.stderr,
            )
    if weights is not None:
        same = task.same_outputs(run, names, data)
        report = task.take_weights(model, weights, same)
        if not same:
            rows = (row._replace(detail="other classes") if row.detail == "as asked" else row for row in report.rows)
            report = Transfer(tuple(rows))
    if recipe.position_from is not None:
        load_position(getattr(model, "backbone", model), recipe.position_from)
    return report


def record_run(run: Run, task: Task[Any, Any], data: Any, model: nn.Module, described: Mapping[str, Any]) -> None:
    """Remove the incomplete files of a killed process, and write the recipe of a new run."""
    for left in (*run.checkpoints.glob(".*.tmp"), *run.folder.glob(f".{run.weights.name}.*.tmp")):
        left.unlink()
    if run.recipe_file.exists():
        return
    task.save(data, run.folder)
    plugins = recipe_plugins(task.recipe, classes_within(model.modules()))
    created = getattr(getattr(model, "backbone", model), "created", None)
    position = {name: str(created["arguments"][name]) for name in ("encoding", "joining")} if created else {}
    values = {
        "recipe": task.recipe.to_dict(),
        "position": position,
        "metric": dataclasses.asdict(task.metric),
        **described,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        **({"data": data.fingerprint()} if hasattr(data, "fingerprint") else {}),
        **surroundings(),
        **({"plugins": plugins} if plugins else {}),
    }
    write_json(run.recipe_file, values)


def notes_of(task: Task[Any, Any], data: Any, batches: BatchOrder) -> list[str]:
    """Return sentences on examples that a run leaves out, and values that it changes."""
    notes = [*task.notes(data), *batches.notes()]
    if (warmup := task.recipe.warmup(batches.steps)) < task.recipe.warmup_steps:
        notes.append(f"the warm-up of the recipe, {task.recipe.warmup_steps} steps, is shortened to {warmup}")
    return notes
