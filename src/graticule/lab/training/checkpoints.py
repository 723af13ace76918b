"""The checkpoints of a run and their contents; `callbacks.Checkpoints` writes them.

A checkpoint is a file, `step-000001234.ckpt`. The last few are kept, and that of the best epoch, which `best.json`
names.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Annotated

from pydantic import Field
from torch import nn
from typing_extensions import TypedDict

from graticule.checkpoints.load import load_checkpoint, load_own
from graticule.checkpoints.read import read_checkpoint
from graticule.registry.fields import Count, Epochs, NotNegative, Number, Whole, check_value, read_typed

_NAME = re.compile(r"step-(\d{9})\.ckpt")


class _Pointer(TypedDict):
    """The fields of best.json besides the score."""

    checkpoint: str


def saved_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in `folder`, newest last."""
    return sorted(path for path in folder.glob("step-*.ckpt") if _NAME.fullmatch(path.name))


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint of the best epoch, None before the first."""
    pointer = folder / "best.json"
    if not pointer.is_file():
        return None
    name: str = read_typed(pointer, _Pointer)["checkpoint"]
    if not _NAME.fullmatch(name):
        raise ValueError(f"{pointer} must name a checkpoint beside it, such as step-000000100.ckpt, got {name!r}.")
    return folder / name


class _Progress(TypedDict):
    """The progress of a run; sums: of the losses and the examples of the epoch so far, per process."""

    epoch: Epochs
    batches: Whole
    sums: Annotated[list[tuple[Number, NotNegative]], Field(min_length=1)]
    accumulate: Count


class BestScore(TypedDict):
    """The best score of a run so far, and the name of its checkpoint; None before the first."""

    best: Number
    best_name: str | None


class _Rows(TypedDict):
    rows: list[dict[str, Number]]
    seconds: NotNegative


class _Callbacks(TypedDict):
    Checkpoints: BestScore
    History: _Rows


class Rest(TypedDict):
    """The values that this library stores in a checkpoint besides weights and optimizer."""

    progress: _Progress
    callbacks: _Callbacks


def check_sums(path: Path) -> None:
    """Check the check sums of the contents of a checkpoint, which PyTorch writes and does not read."""
    if not zipfile.is_zipfile(path):
        return  # named as damaged when it is read
    try:
        with zipfile.ZipFile(path) as file:
            compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in file.infolist())
            damaged = "a compressed entry" if compressed else file.testzip()
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        damaged = str(error)
    if damaged:
        raise ValueError(f"{path} is damaged: its check sums do not fit its contents ({damaged}).")


def read_rest(path: Path) -> Rest:
    """Read a checkpoint's progress, history and best score."""
    if path.is_file():
        check_sums(path)
    return check_value(Rest, read_checkpoint(path), f"{path} is damaged")


def load_weights(model: nn.Module, path: Path) -> nn.Module:
    """Load the weights of a checkpoint into `model`, and return it; refuse one that is damaged or does not fit."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; if the run is being trained, a newer one may have replaced it."
        )
    if path.suffix == ".ckpt":
        check_sums(path)
    return load_checkpoint(model, path) if hasattr(model, "position") else load_own(model, path)
