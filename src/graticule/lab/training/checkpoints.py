"""Checkpoints, written atomically: after epochs, every few steps, and when a cluster preempts the run.

A checkpoint is a file, `step-000001234.ckpt`. The last few are kept, and that of the best epoch, which `best.json`
names.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from pydantic import Field
from torch import nn
from typing_extensions import TypedDict

from graticule.checkpoints.load import load_checkpoint, load_own
from graticule.checkpoints.read import read_checkpoint
from graticule.lab.training.results import Metric
from graticule.lab.training.run_folder import SIGNALS, Preempted, handling_signals
from graticule.registry.fields import Count, Epochs, NotNegative, Number, Whole, check_value, read_typed
from graticule.system.files import remove, write_json, write_whole

_NAME = re.compile(r"step-(\d{9})\.ckpt")


class _Pointer(TypedDict):
    """The fields of best.json besides the score."""

    checkpoint: str


class WholeFileCheckpoints(TorchCheckpointIO):
    """Checkpoints that are written atomically, and read without running code from them."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a temporary file, then rename it to `path`."""
        write_whole(Path(path), lambda temporary: torch.save(checkpoint, temporary))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read tensors and plain values only, for any `weights_only`."""
        return read_checkpoint(path)


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


class _Best(TypedDict):
    best: Number
    best_name: str | None


class _Rows(TypedDict):
    rows: list[dict[str, Number]]
    seconds: NotNegative


class _Callbacks(TypedDict):
    Checkpoints: _Best
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


class Checkpoints(Checkpoint):
    """Saves checkpoints in `folder`, keeps the last few and the best, and stops gracefully on a signal.

    A signal takes effect after the current step; during an epoch's last step or its validation, after the epoch; before
    the first step, at once.

    Args:
        folder: the folder of the checkpoints.
        keep: number of last checkpoints that are kept.
        every: number of steps between checkpoints within an epoch; None for none.
        metric: the score that determines the best.
    """

    def __init__(self, folder: Path, keep: int, every: int | None, metric: Metric) -> None:
        self.folder, self.keep, self.every, self.metric = folder, keep, every, metric
        self.best = metric.worst
        self.best_name: str | None = None
        self.signalled: int | None = None
        """the last signal that this process received"""
        self._at_once = True

    def state_dict(self) -> dict[str, Any]:
        """Return the best score so far, and its checkpoint."""
        return {"best": self.best, "best_name": self.best_name}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the best score, and point to its checkpoint again, if the process was killed after saving it."""
        state: _Best = checkpoint["callbacks"][self.state_key]
        self.best, self.best_name = state["best"], state["best_name"]
        if trainer.is_global_zero and self.best_name is not None and (self.folder / self.best_name).exists():
            self._point(self.best_name)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to the signals within the block, in the main thread only.

        A signal shortly before the end of the run does not stop it; the previous handler receives it after the block.
        """
        with handling_signals(self._note):
            yield
        if self.signalled is not None and callable(handler := signal.getsignal(self.signalled)):
            handler(self.signalled, None)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Replace Lightning's handlers, which would stop without saving."""
        self._at_once = False
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.signalled = number
        if self._at_once:  # nothing to save yet
            raise Preempted

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after a step if it is due, or after a signal."""
        if trainer.fit_loop._should_accumulate():
            return
        stop = self._agreed(trainer)
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return  # saved at the end of the epoch
        if stop or (self.every is not None and trainer.global_step % self.every == 0):
            self._save(trainer)
        if stop:
            raise Preempted

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save after an epoch, and record whether it is the best."""
        score = float(trainer.callback_metrics[self.metric.column])
        better = self.metric.better(score, self.best)
        if better:
            self.best, self.best_name = score, self._name(trainer)
        self._save(trainer, better)
        if self._agreed(trainer):
            raise Preempted

    def _agreed(self, trainer: L.Trainer) -> bool:
        """Return whether any process received a signal."""
        signalled = self.signalled is not None
        if trainer.world_size == 1:
            return signalled
        noted = torch.tensor(int(signalled), device=trainer.strategy.root_device)
        return bool(trainer.strategy.reduce(noted, reduce_op="max"))

    @staticmethod
    def _name(trainer: L.Trainer) -> str:
        return f"step-{trainer.global_step:09d}.ckpt"

    def _point(self, name: str) -> None:
        write_json(self.folder / "best.json", {"checkpoint": name, self.metric.column: self.best})

    def _save(self, trainer: L.Trainer, best: bool = False) -> None:
        path = self.folder / self._name(trainer)
        trainer.save_checkpoint(path, weights_only=False)
        if not trainer.is_global_zero:
            return
        if best:
            self._point(path.name)
        named = self.folder / self.best_name if self.best_name else best_checkpoint(self.folder)
        for old in saved_checkpoints(self.folder)[: -self.keep]:
            if old not in (path, named):
                remove(old)
