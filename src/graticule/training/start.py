"""The weights that a run starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from graticule.checkpoints import Transfer, load_position
from graticule.training.devices import read_shards
from graticule.training.run import run_of
from graticule.training.task import Task


def start(task: Task[Any, Any], model: nn.Module, data: Any) -> Transfer | None:
    """Load the weights that a recipe starts from; returns the report on a whole checkpoint.

    Raises:
        FileNotFoundError: if they do not exist.
        ValueError: if they cannot be read or do not fit, or belong to a run whose inputs have another meaning.
    """
    taken = None
    recipe = task.recipe
    source = recipe.start_from
    if source is not None:
        if not source.exists():
            raise FileNotFoundError(
                f"`start_from` must be a run or a checkpoint, got {str(source)!r}, which does not exist."
            )
        run = run_of(source)
        same = run is None or task.same_outputs(run, data)
        found: Path | None = run.best if run is not None and run.folder == source else source
        if found is None:
            raise FileNotFoundError(f"`start_from` must be a run with a checkpoint, got {str(source)!r}.")
        held = found if run is None or found.is_file() else read_shards(found)
        taken = task.take_weights(model, held, same)
        if not same:
            rows = (row._replace(detail="other classes") if row.detail == "as asked" else row for row in taken.rows)
            taken = Transfer(tuple(rows))
    if recipe.position_from is not None:
        load_position(getattr(model, "backbone", model), recipe.position_from)
    return taken
