"""What is written during training: checkpoints, a history, a log, a progress bar."""

from __future__ import annotations

import contextlib
import csv
import io
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.tensorboard import SummaryWriter
from tqdm.auto import tqdm

from graticule.checkpoints.read import read_checkpoint
from graticule.lab.terminal import Lines
from graticule.lab.terminal import bar as progress_bar
from graticule.lab.training.checkpoints import BestScore, best_checkpoint, saved_checkpoints
from graticule.lab.training.results import Metric
from graticule.lab.training.run_folder import SIGNALS, Preempted, RunFolder, handling_signals
from graticule.system.files import append, remove, write_json, write_text, write_whole


class WholeFileCheckpoints(TorchCheckpointIO):
    """Checkpoints that are written atomically, and read without running code from them."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a temporary file, then rename it to `path`."""
        write_whole(Path(path), lambda temporary: torch.save(checkpoint, temporary))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read tensors and plain values only, for any `weights_only`."""
        return read_checkpoint(path)


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
        state: BestScore = checkpoint["callbacks"][self.state_key]
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


class History(L.Callback):
    """One row per epoch, stored in the checkpoint and in a CSV file, so that a resumed run has a complete history.

    A plain log gets a line per epoch, and one when the run starts, is resumed or stops; TensorBoard's file gets the
    numbers.
    """

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.rows: list[dict[str, float]] = []
        self._before = 0.0  # seconds of the epoch before the run was resumed
        self._start = time.perf_counter()
        self._events: SummaryWriter | None = None

    def say(self, text: str) -> None:
        """Add a line to the log, with date and time."""
        append(self.run.log_file, f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n".encode())

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock, and log the step."""
        self._start = time.perf_counter()
        if trainer.is_global_zero:
            start = f"resumed after step {trainer.global_step}" if trainer.global_step else "starts"
            devices = f"{trainer.world_size} device{'s' * (trainer.world_size > 1)}"
            self.say(f"{start} on {devices}, {trainer.strategy.root_device.type}")

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._start, self._before = time.perf_counter(), 0.0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add the row of the epoch and write the file atomically."""
        metrics = {
            name: float(str(np.float32(value.item()))) if value.dtype == torch.float32 else value.item()
            for name, value in trainer.callback_metrics.items()  # 37.8, not 37.79999923706055
        }
        seconds = self._before + time.perf_counter() - self._start
        self.rows = [row for row in self.rows if row["epoch"] <= trainer.current_epoch]
        self.rows.append({"epoch": trainer.current_epoch + 1, **metrics, "seconds": seconds})
        if not trainer.is_global_zero:
            return
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.rows[-1]), restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_text(self.run.metrics_file, text.getvalue())
        if self._events is None:
            self._events = SummaryWriter(str(self.run.events))
        for name, value in self.rows[-1].items():
            self._events.add_scalar(name, value, trainer.global_step)
        self._events.flush()
        values = ", ".join(f"{name} {value:.6g}" for name, value in self.rows[-1].items() if name != "epoch")
        self.say(f"epoch {trainer.current_epoch + 1} of {trainer.max_epochs}: {values}")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the file of TensorBoard."""
        if self._events is not None:
            self._events.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Log the reason why the run stopped."""
        self.on_train_end(trainer, pl_module)
        if trainer.is_global_zero:
            with contextlib.suppress(OSError):  # a full disk may be the reason
                reason = str(exception).strip().splitlines()
                self.say(f"stopped by {type(exception).__name__}{': ' + reason[0] if reason else ''}")

    def state_dict(self) -> dict[str, Any]:
        """Return the rows so far, and the seconds of the current epoch."""
        return {"rows": self.rows, "seconds": self._before + time.perf_counter() - self._start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the rows of a checkpoint."""
        self.rows = list(state_dict["rows"])
        self._before = state_dict.get("seconds", 0.0)


class Progress(L.Callback):
    """One bar for the whole run: remaining time, images or tokens per second, memory, loss, best score.

    Without a terminal, as in the log of a cluster, it prints one line per epoch, and one every 30 seconds.
    """

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._bar: tqdm[Any] | None = None
        self._best = metric.worst
        self._values: dict[str, str] = {}
        self._start, self._first = time.monotonic(), 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar at the current step."""
        if trainer.is_global_zero:
            self._bar = progress_bar(
                desc=f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}",
                total=int(trainer.estimated_stepping_batches),
                initial=trainer.global_step,
                unit="step",
                dynamic_ncols=True,
                mininterval=0.5,
            )
            self._start, self._first = time.monotonic(), trainer.current_epoch

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Advance the bar by a step."""
        bar = self._bar
        if bar is None or trainer.global_step == bar.n:
            return
        if time.time() - bar.last_print_t >= bar.mininterval:  # it will be drawn
            bar.set_description(f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}", refresh=False)
            if rate := bar.format_dict["rate"]:
                unit, amount = pl_module.task.rate
                self._values[unit] = f"{rate * amount:,.0f}"
            self._values["mem"] = f"{memory(trainer.strategy.root_device) / 2**30:.1f}G"
            bar.set_postfix(self._values, refresh=False)
        bar.update(trainer.global_step - bar.n)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the scores of the epoch."""
        metrics = trainer.callback_metrics
        score = float(metrics[self.metric.column])
        if self.metric.better(score, self._best):
            self._best = score
        self._values |= {
            "loss": f"{float(metrics['train_loss']):.3f}",
            self.metric.key: self.metric.show(score, unit=False),
            "best": self.metric.show(self._best, unit=False),
        }
        if isinstance(self._bar, Lines):
            epoch, epochs = trainer.current_epoch + 1, trainer.max_epochs or 0
            seconds = time.monotonic() - self._start
            left = seconds / (epoch - self._first) * (epochs - epoch)
            values = ", ".join(f"{name} {value}" for name, value in self._values.items())
            line = f"epoch {epoch}/{epochs}: {values}, {seconds:.0f} s, about {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)
        elif self._bar is not None:
            self._bar.set_postfix(self._values)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Close the bar."""
        self.on_train_end(trainer, pl_module)


def memory(device: torch.device) -> int:
    """Return the peak of the bytes in use: tensors on a GPU, the whole process on a CPU; 0 on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
