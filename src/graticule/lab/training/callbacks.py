"""The output during training: a history, a log, a progress bar."""

from __future__ import annotations

import contextlib
import csv
import io
import sys
import time
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm.auto import tqdm

from graticule.lab.terminal import Lines
from graticule.lab.terminal import bar as progress_bar
from graticule.lab.training.results import Metric
from graticule.lab.training.run_folder import RunFolder
from graticule.system.files import append, write_text


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
            done, epochs = trainer.current_epoch + 1, trainer.max_epochs or 0
            seconds = time.monotonic() - self._start
            left = seconds / (done - self._first) * (epochs - done)
            values = ", ".join(f"{name} {value}" for name, value in self._values.items())
            line = f"epoch {done}/{epochs}: {values}, {seconds:.0f} s, about {left:.0f} s left"
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
