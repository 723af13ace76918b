"""The weights that a run starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from graticule.data import check_vocabulary
from graticule.surgery import Transfer, load_position, transfer
from graticule.tasks.machines import read_shards
from graticule.tasks.run import Run
from graticule.tasks.text_recipe import TextRecipe
from graticule.tasks.training_recipe import TrainingRecipe


def start(model: nn.Module, recipe: TrainingRecipe, data: Any) -> Transfer | None:
    """Take the weights that a recipe starts from; returns what was taken from a whole checkpoint.

    Raises:
        FileNotFoundError: if they are not there.
        ValueError: if they cannot be read or do not fit, or are of a run whose tokens stand for other text.
    """
    taken = None
    source = recipe.start_from
    if source is not None:
        if isinstance(recipe, TextRecipe):
            _check_tokens(source, data)
        if Run(source).recipe_file.is_file():
            found = Run(source).best
            if found is None:
                raise FileNotFoundError(f"`start_from` must be a run that saved something, got {str(source)!r}.")
            taken = transfer(model, found if found.is_file() else read_shards(found))
        elif not source.exists():
            raise FileNotFoundError(
                f"`start_from` must be a run or a checkpoint, got {str(source)!r}, which is not there."
            )
        else:
            taken = transfer(model, source)
    if recipe.position_from is not None:
        load_position(model, recipe.position_from)
    return taken


def _check_tokens(source: Path, data: Any) -> None:
    """Check that the run that a checkpoint is of, if it lies in one, has the vocabulary of the data."""
    folders = [source, source.parent, *([source.parent.parent] if source.parent.name == "checkpoints" else [])]
    run = next((Run(folder) for folder in folders if Run(folder).recipe_file.is_file()), None)
    if run is None:
        return
    if not isinstance(run.recipe(), TextRecipe):
        raise ValueError(f"`start_from` must be of a run on text, got {str(source)!r}, which is of one on images.")
    try:
        check_vocabulary(data.tokenizer, run.tokenizer().fingerprint, str(run.folder))
    except ValueError as error:
        advice = f"; --tokenizer {run.tokenizer_file} takes that of the run" if run.tokenizer_file.is_file() else ""
        raise ValueError(f"{str(error).rstrip('.')}{advice}.") from None
