"""The weights that a run starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from graticule.checkpoints import Transfer, load_position, transfer
from graticule.data import DatasetInfo, check_vocabulary, same_classes
from graticule.tasks.recipe import Recipe
from graticule.tasks.text_recipe import TextRecipe
from graticule.training.devices import read_shards
from graticule.training.recipe import TrainingRecipe
from graticule.training.run import Run


def start(model: nn.Module, recipe: TrainingRecipe, data: Any) -> Transfer | None:
    """Take the weights that a recipe starts from; returns what was taken from a whole checkpoint.

    Raises:
        FileNotFoundError: if they are not there.
        ValueError: if they cannot be read or do not fit, or are of a run whose tokens stand for other text.
    """
    taken = None
    source = recipe.start_from
    if source is not None:
        if not source.exists():
            raise FileNotFoundError(
                f"`start_from` must be a run or a checkpoint, got {str(source)!r}, which is not there."
            )
        run = _run_of(source)
        if run is not None and isinstance(recipe, TextRecipe):
            _check_tokens(run, data)
        found: Path | None = run.best if run is not None and run.folder == source else source
        if found is None:
            raise FileNotFoundError(f"`start_from` must be a run that saved something, got {str(source)!r}.")
        same = run is None or not isinstance(recipe, Recipe) or _same_classes(run, data.info)
        held = found if run is None or found.is_file() else read_shards(found)
        taken = transfer(model, held, classifier=same)
        if not same:
            rows = (
                row._replace(detail="other classes there") if row.detail == "as asked" else row for row in taken.rows
            )
            taken = Transfer(tuple(rows))
    if recipe.position_from is not None:
        load_position(model, recipe.position_from)
    return taken


def _run_of(source: Path) -> Run | None:
    """Return the run that `source` is, or that the checkpoint `source` lies in."""
    folders = [source, source.parent, *([source.parent.parent] if source.parent.name == "checkpoints" else [])]
    return next((Run(folder) for folder in folders if Run(folder).recipe_file.is_file()), None)


def _check_tokens(run: Run, data: Any) -> None:
    """Check that a run has the vocabulary of the data."""
    if not isinstance(run.recipe(), TextRecipe):
        raise ValueError(f"`start_from` must be of a run on text, got {str(run.folder)!r}, which is one on images.")
    try:
        check_vocabulary(data.tokenizer, run.tokenizer().fingerprint, str(run.folder))
    except ValueError as error:
        advice = f"; --tokenizer {run.tokenizer_file} takes that of the run" if run.tokenizer_file.is_file() else ""
        raise ValueError(f"{str(error).rstrip('.')}{advice}.") from None


def _same_classes(run: Run, info: DatasetInfo) -> bool:
    """Return whether the outputs of a run stand for the classes of the data, as far as these have names."""
    return not isinstance(run.recipe(), Recipe) or same_classes(run.class_names, info.class_names)
