"""Progress and results of runs, read from recipe and metrics alone."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from graticule.lab.training.results import Metric
from graticule.lab.training.run_folder import RunFolder
from graticule.registry.fields import Epochs, read_typed
from graticule.system.files import read_utf8

#: Column -> its value in every epoch, NaN for an empty cell.
Metrics = dict[str, list[float]]
State = Literal["finished", "running", "stopped", "no epoch yet", "damaged"]

_LARGEST = 64 << 20  # bytes of a file of metrics


def find_runs(folder: Path) -> Iterator[Path]:
    """Find the run folders in `folder`, which may be one itself.

    Links are not followed, and hidden folders and the folders in a run are not searched.
    """
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"`folders` must be folders with runs, got {str(folder)!r}, which {problem}.")
    for place, folders, files in os.walk(folder):
        if "recipe.json" in files:
            folders.clear()
            yield Path(place)
        else:
            folders[:] = sorted(name for name in folders if not name.startswith("."))


@with_config(ConfigDict(extra="allow"))
class _Epochs(TypedDict):
    """The values that are read from a recipe, whatever version wrote it."""

    epochs: Epochs
    cooldown_epochs: NotRequired[Epochs]


class _RecordedRun(TypedDict):
    """The part of recipe.json that is read."""

    recipe: _Epochs
    position: NotRequired[dict[str, str]]
    metric: NotRequired[Metric]


@dataclass(frozen=True)
class RunSummary:
    """State and results of a run.

    state: damaged, if its recipe or metrics cannot be read; `damage` then says why.
    recipe, metrics: empty if they cannot be read.
    position: the encoding and the joining of the built model; empty if they are not recorded.
    metric: the score that it is judged by; None if it is not recorded.
    changed: time of the last change of its metrics or its log, in seconds since 1970.
    """

    folder: Path
    state: State
    recipe: dict[str, Any]
    position: dict[str, str]
    metrics: Metrics
    metric: Metric | None
    changed: float
    damage: str = ""

    @property
    def epoch(self) -> int:
        """Return the last finished epoch; 0 before the first."""
        return int(self.metrics["epoch"][-1]) if self.metrics.get("epoch") else 0

    @property
    def epochs(self) -> int | None:
        """Return the number of epochs of the recipe; None if it cannot be read."""
        return self.recipe["epochs"] + self.recipe.get("cooldown_epochs", 0) if self.recipe else None

    @property
    def best(self) -> tuple[float, int] | None:
        """Return the best score and its epoch, the first one of equal scores; None if no epoch has one."""
        if self.metric is None or not any(map(math.isfinite, self._scores)):
            return None
        rows = zip(self._scores, self.metrics["epoch"], strict=True)
        row = self.metric.best({self.metric.column: score, "epoch": epoch} for score, epoch in rows)
        return row[self.metric.column], int(row["epoch"])

    @property
    def last(self) -> float | None:
        """Return the score of the last epoch; None if it has none."""
        return self._scores[-1] if self._scores and math.isfinite(self._scores[-1]) else None

    @property
    def seconds(self) -> float | None:
        """Return the seconds of training and evaluation so far; None if an epoch has none."""
        column = self.metrics.get("seconds", [])
        return sum(column) if column and all(map(math.isfinite, column)) else None

    @property
    def _scores(self) -> list[float]:
        return [] if self.metric is None else self.metrics.get(self.metric.column, [])


def summarize(folder: Path) -> RunSummary:
    """Read the progress and the results of the run in `folder`; damage is part of the summary and raises no error."""
    run = RunFolder(folder)
    damage: list[str] = []

    def attempt(read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return read(*arguments)
        except (OSError, ValueError) as error:
            damage.append(str(error).rstrip("."))
            return {}

    described = attempt(read_typed, run.recipe_file, _RecordedRun)
    metrics = attempt(read_metrics, run.metrics_file) if run.metrics_file.exists() else {}  # none in the first epoch
    recipe, metric, position = described.get("recipe", {}), described.get("metric"), described.get("position", {})
    state: State = "stopped" if metrics.get("epoch") else "no epoch yet"
    if damage:
        state = "damaged"
    elif run.finished:
        state = "finished"
    elif _is_locked(folder):
        state = "running"
    changed = max(map(_read_time, (run.metrics_file, run.log_file))) or _read_time(run.recipe_file)
    return RunSummary(folder, state, recipe, position, metrics, metric, changed, "; ".join(damage))


def read_metrics(path: Path) -> Metrics:
    """Read the metrics of a run: columns of equal length, one of them `epoch`; an empty cell is NaN.

    Raises:
        FileNotFoundError: if there are none yet.
        ValueError: if the file is no such table.
    """
    text = read_utf8(path, _LARGEST)
    try:
        header, *rows = csv.reader(io.StringIO(text, newline=""))
        columns = zip(*rows, strict=True) if rows else [()] * len(header)
        metrics = {
            name: [float(cell or "nan") for cell in column] for name, column in zip(header, columns, strict=True)
        }
        epochs = metrics["epoch"]
        if epochs != sorted({float(int(epoch)) for epoch in epochs}):
            raise ValueError
    except (ValueError, OverflowError, KeyError, csv.Error):
        raise ValueError(f"{path} is damaged: it must be a table of numbers with a row per epoch, in order.") from None
    return metrics


def curve(runs: Sequence[Metrics], metric: str) -> list[tuple[int, float, float | None]]:
    """Return `metric` after the epochs that all `runs` have finished: epoch, mean, and deviation if there are several.

    Both are NaN if a run has no finite value.
    """
    by_epoch = [dict(zip(run["epoch"], run[metric], strict=True)) for run in runs]
    points = []
    for epoch in sorted(set.intersection(*map(set, by_epoch))):
        values = [scores[epoch] for scores in by_epoch]
        values = values if all(map(math.isfinite, values)) else [math.nan] * len(values)
        mean = fmean(values)
        deviation = None if len(values) < 2 else math.nan if math.isnan(mean) else stdev(values)
        points.append((int(epoch), mean, deviation))
    return points


def flat_values(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return every value of a recipe by its command-line name: {"peg": {"bias": True}} -> {"peg.bias": "True"}."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flat_values(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return flat


def _is_locked(folder: Path) -> bool:
    """Return whether a process trains in `folder`, without writing to it."""
    try:
        import fcntl

        with (folder / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    return False


def _read_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
