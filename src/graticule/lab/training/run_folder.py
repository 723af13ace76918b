"""A run without PyTorch: the names of the files in its folder, the lock of the folder, and its interruption."""

from __future__ import annotations

import contextlib
import difflib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from graticule.registry.checks import check

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]

#: The exit code that means "try again" to a scheduler: EX_TEMPFAIL of sysexits.h.
REQUEUE = 75
#: The exit code for a stop by the user, as in shells for SIGINT.
STOPPED = 130


class Interrupted(Exception):
    """Training was stopped; the run can be resumed."""


class Preempted(Interrupted):
    """The run was preempted (SIGTERM, or SIGUSR1 from SLURM); a checkpoint was saved first."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run."""

    folder: Path

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Open an existing run.

        Raises:
            FileNotFoundError: if the folder does not exist, or does not contain a run.
        """
        check("folder", folder, str | Path)
        run = cls(Path(folder))
        if not run.recipe_file.is_file():
            problem = "has no recipe.json, so it is not a run" if run.folder.is_dir() else "does not exist"
            beside = {path.name: str(path) for path in runs_in(run.folder.parent)}
            near = [repr(beside[name]) for name in difflib.get_close_matches(run.folder.name, beside, n=3)]
            hint = f"; did you mean {' or '.join(near)}?" if near else "."
            raise FileNotFoundError(f"`run` must be the folder of a run, got {str(folder)!r}, which {problem}{hint}")
        return run

    @property
    def recipe_file(self) -> Path:
        """JSON file with the resolved recipe, the metric, the sizes of the data, versions and machine."""
        return self.folder / "recipe.json"

    @property
    def metrics_file(self) -> Path:
        """CSV file with one line per epoch."""
        return self.folder / "metrics.csv"

    @property
    def log_file(self) -> Path:
        """The log file; each line has a date and a time."""
        return self.folder / "log.txt"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def events(self) -> Path:
        """The folder of the files for TensorBoard."""
        return self.folder / "tensorboard"

    @property
    def weights(self) -> Path:
        """The best weights, under the names of the model's state dict."""
        return self.folder / "weights.safetensors"

    @property
    def result_file(self) -> Path:
        """JSON file with the results of a finished run."""
        return self.folder / "result.json"

    @property
    def finished(self) -> bool:
        return self.result_file.is_file()


def runs_in(folder: Path) -> Iterator[Path]:
    """Yield the runs directly in `folder`, sorted by name; none if it does not exist."""
    if folder.is_dir():
        yield from (path for path in sorted(folder.iterdir()) if RunFolder(path).recipe_file.is_file())


@contextlib.contextmanager
def lock_folder(folder: Path, wait: float = 0) -> Iterator[bool]:
    """Lock `folder` until the block or the process ends, in whatever way; yield whether the lock was acquired.

    It is a lock of the operating system on the file .lock. That file is kept: removing it could take the lock from
    another process.

    Args:
        folder: an existing folder.
        wait: seconds to wait for another process that has the lock.

    Raises:
        OSError: if `folder` cannot be written to, or its file system has no locks.
    """
    from filelock import FileLock, Timeout

    with contextlib.ExitStack() as stack:
        try:  # a soft lock, used on file systems without locks, would outlive a killed process
            stack.enter_context(FileLock(folder / ".lock", timeout=wait, fallback_to_soft=False))
            free = True
        except Timeout:
            free = False
        yield free


class Signals:
    """The signals with which a cluster stops a run: before its first step at once, then after a step.

    number: the last one that this process received; None before the first.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.at_once = True

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen within the block, in the main thread only, and restore the handlers after it.

        A signal shortly before the end of the run does not stop it; the previous handler receives it after the block.
        """
        with handling_signals(self._note):
            yield
        if self.number is not None and callable(handler := signal.getsignal(self.number)):
            handler(self.number, None)

    def _note(self, number: int, frame: object) -> None:
        self.number = number
        if self.at_once:  # nothing to save yet
            raise Preempted


@contextlib.contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Pass the signals to `handler` within the block, and restore their handlers after it; only in the main thread."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in SIGNALS if in_main}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


def requeue_code() -> int:
    """Return the exit code of a command that a signal stopped."""
    # if a process started by Fabric failed, Fabric would kill the first one before that has ended
    return 0 if int(os.environ.get("LOCAL_RANK", 0)) else REQUEUE
