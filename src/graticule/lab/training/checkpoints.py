"""The checkpoints of a run and their contents.

A checkpoint is a file, `step-000001234.ckpt`. The last few are kept, and the checkpoint of the best epoch, which
`best.json` names.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Annotated, Any, NotRequired

import torch
from pydantic import Field
from torch import nn
from typing_extensions import TypedDict

from graticule.checkpoints.load import load_checkpoint, load_own
from graticule.checkpoints.read import read_checkpoint
from graticule.lab.training.results import Metric
from graticule.registry.fields import Count, Epochs, NotNegative, Number, Whole, check_value, read_typed
from graticule.system.files import write_json, write_whole

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

    score: Number
    name: str | None


class _History(TypedDict):
    """The row of each epoch, and the seconds of the current one."""

    rows: list[dict[str, Number]]
    seconds: NotNegative


class State(TypedDict):
    """The contents of a checkpoint; `current_model_state`, if `state_dict` is a moving average."""

    state_dict: dict[str, Any]
    current_model_state: NotRequired[dict[str, Any]]
    optimizer: dict[str, Any]
    precision: dict[str, Any]
    progress: _Progress
    history: _History
    best: BestScore


class Checkpoints:
    """The checkpoints of a run, of which the last few and the best are kept.

    Args:
        folder: of the checkpoints.
        keep: number of last ones that are kept.
        metric: the score that determines the best.
        writes: whether this process writes files.
    """

    def __init__(self, folder: Path, keep: int, metric: Metric, writes: bool) -> None:
        self.folder, self.keep, self.metric, self.writes = folder, keep, metric, writes
        self.best = BestScore(score=metric.worst, name=None)

    def restore(self, best: BestScore) -> None:
        """Restore the best score, and point to its checkpoint again, if the process was killed after saving it."""
        self.best = best
        if self.writes and best["name"] is not None and (self.folder / best["name"]).exists():
            self._point()

    def is_best(self, score: float) -> bool:
        """Return whether a score is better than that of all epochs so far."""
        return self.metric.better(score, self.best["score"])

    def save(self, state: dict[str, Any], step: int, score: float | None = None) -> None:
        """Save `state` after a step, completely or not at all; with a score, it may be the best."""
        name = f"step-{step:09d}.ckpt"
        best = score is not None and self.is_best(score)
        if best and score is not None:
            self.best = BestScore(score=score, name=name)
        if not self.writes:
            return
        state = {**state, "best": self.best}
        write_whole(self.folder / name, lambda temporary: torch.save(state, temporary))
        if best:
            self._point()
        named = self.folder / self.best["name"] if self.best["name"] else best_checkpoint(self.folder)
        for old in saved_checkpoints(self.folder)[: -self.keep]:
            if old not in (self.folder / name, named):
                old.unlink()

    def _point(self) -> None:
        pointer = {"checkpoint": self.best["name"], self.metric.column: self.best["score"]}
        write_json(self.folder / "best.json", pointer)


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


def read_training(path: Path) -> State:
    """Read a checkpoint from which a run is resumed."""
    try:
        if path.is_file():
            check_sums(path)
        return check_value(State, read_checkpoint(path), f"{path} is damaged")
    except (ValueError, FileNotFoundError) as error:
        older = [other.name for other in saved_checkpoints(path.parent) if other != path]
        advice = f"remove it to resume from {older[-1]}" if older else "there is no older one"
        reason = str(error).rstrip(".")
        raise ValueError(f"`run` cannot be resumed from the checkpoint {path}: {reason}; {advice}.") from None


def load_weights(model: nn.Module, path: Path) -> nn.Module:
    """Load the weights of a checkpoint into `model`, and return it; refuse one that is damaged or does not fit."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; if the run is being trained, a newer one may have replaced it."
        )
    if path.suffix == ".ckpt":
        check_sums(path)
    return load_checkpoint(model, path) if hasattr(model, "position") else load_own(model, path)
