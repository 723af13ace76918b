"""Helpers of the tests of commands on text: commands, and short runs on text."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from graticule.lab.recipes.load import load_recipe
from graticule.lab.tasks.options import TextRecipe
from graticule.lab.training.training import Training

#: Number of tokens for which position information is stored.
CONTEXT = 32


def short_recipe(**options: Any) -> TextRecipe:
    """Return a recipe of five steps of the smallest language model."""
    fixed = {"model": "lm_nano", "context": CONTEXT, "epochs": 1, "warmup_epochs": 0, "limit_test": 4}
    return dataclasses.replace(load_recipe("pydoc_quick").quick(), **{**fixed, **options})


@contextlib.contextmanager
def spoiled_after_first_epoch() -> Iterator[None]:
    """Draw the token embeddings of runs on text again when a later epoch starts, so that the first epoch is the best.

    Scores are measured as usual, so the best weights and the last ones also differ in their scores.
    """
    begin = Training.start_epoch

    def spoil(training: Training) -> None:
        begin(training)
        if training.epoch:
            nn.init.normal_(training.loss.model.embed.weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "start_epoch", spoil)
        yield


def write_text(path: Path) -> Path:
    """Write 4 kB of text in English and French, in lines."""
    text = (
        "the cat sat on the mat and the dog sat beside the cat.\n" * 40 + "où est le château où l'été passait?\n" * 50
    )
    path.write_text(text, encoding="utf-8")
    return path
