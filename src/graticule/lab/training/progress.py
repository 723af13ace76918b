"""The output of a training: a row per epoch, a log, TensorBoard's file, and a progress bar."""

from __future__ import annotations

import csv
import io
import sys
import time
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter
from tqdm.auto import tqdm

from graticule.lab.terminal import PlainProgress
from graticule.lab.terminal import bar as progress_bar
from graticule.lab.training.results import Metric
from graticule.lab.training.run_folder import RunFolder
from graticule.system.files import write_text


class History:
    """One row per epoch, stored in the checkpoint and in a CSV file, so that a resumed run has a complete history.

    A plain log gets a line per epoch, and one when the run starts, is resumed or stops; TensorBoard's file gets the
    numbers.

    Args:
        run: the folder of the run.
        writes: whether this process writes the files.
    """

    def __init__(self, run: RunFolder, writes: bool) -> None:
        self.run, self.writes = run, writes
        self.rows: list[dict[str, float]] = []
        self._before, self._start = 0.0, time.perf_counter()
        self._events: SummaryWriter | None = None

    def say(self, text: str) -> None:
        """Add a line to the log, with date and time."""
        if self.writes:
            with self.run.log_file.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")

    def start_epoch(self, before: float = 0.0) -> None:
        """Start the clock of an epoch, of which `before` seconds were spent before the run was resumed."""
        self._before, self._start = before, time.perf_counter()

    @property
    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._start

    def add(self, scores: dict[str, float], epoch: int, epochs: int, step: int) -> dict[str, float]:
        """Add the row of an epoch, counted from 1, and write the file; returns the row."""
        values = {name: float(str(np.float32(value))) for name, value in scores.items()}  # 37.8, not 37.79999923706055
        row = {"epoch": epoch, **values, "seconds": self.seconds}
        self.rows = [*(row for row in self.rows if row["epoch"] < epoch), row]
        if not self.writes:
            return row
        text = io.StringIO()
        writer = csv.DictWriter(text, list(row), restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_text(self.run.metrics_file, text.getvalue())
        if self._events is None:
            self._events = SummaryWriter(str(self.run.events))
        for name, value in row.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()
        line = ", ".join(f"{name} {value:.6g}" for name, value in row.items() if name != "epoch")
        self.say(f"epoch {epoch} of {epochs}: {line}")
        return row

    def close(self) -> None:
        """Close the file of TensorBoard."""
        if self._events is not None:
            self._events.close()


class Progress:
    """One bar for the whole run: images or tokens so far and per second, remaining time, loss, best score.

    Without a terminal, as in the log of a cluster, it prints one line per epoch, and one every 30 seconds.

    Args:
        metric: the score.
        rate: the unit that is counted, and its number per step.
        epoch: epochs that have ended.
        epochs: of the run.
        step: steps so far.
        steps: of the run.
    """

    def __init__(
        self,
        metric: Metric,
        rate: tuple[str, int],
        *,
        epoch: int,
        epochs: int,
        step: int,
        steps: int,
    ) -> None:
        self.metric, self.epochs, (unit, self.amount) = metric, epochs, rate
        self._best, self._start, self._first = metric.worst, time.monotonic(), epoch
        self._bar: tqdm[Any] = progress_bar(
            desc=f"epoch {epoch + 1}/{epochs}",
            total=steps * self.amount,
            initial=step * self.amount,
            unit=unit,
            unit_scale=True,
            dynamic_ncols=True,
            mininterval=0.5,
        )

    def step(self) -> None:
        """Advance the bar by a step."""
        self._bar.update(self.amount)

    def end_epoch(self, row: dict[str, float]) -> None:
        """Show the scores of an epoch."""
        score = row[self.metric.column]
        if self.metric.better(score, self._best):
            self._best = score
        values = {
            "loss": f"{row['train_loss']:.3f}",
            self.metric.key: self.metric.show(score, unit=False),
            "best": self.metric.show(self._best, unit=False),
        }
        epoch = int(row["epoch"])
        self._bar.set_description(f"epoch {min(epoch + 1, self.epochs)}/{self.epochs}", refresh=False)
        if isinstance(self._bar, PlainProgress):
            seconds = time.monotonic() - self._start
            left = seconds / (epoch - self._first) * (self.epochs - epoch)
            scores = ", ".join(f"{name} {value}" for name, value in values.items())
            line = f"epoch {epoch}/{self.epochs}: {scores}, {seconds:.0f} s, about {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.set_postfix(values)

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()
