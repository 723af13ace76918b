"""A run folder, the names of the files in it, and locks of folders between processes, without PyTorch."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from graticule.registry.checks import check


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
            what = "has no recipe.json, so it is not a run" if run.folder.is_dir() else "does not exist"
            beside = {path.name: str(path) for path in runs_in(run.folder.parent)}
            near = [repr(beside[name]) for name in difflib.get_close_matches(run.folder.name, beside, n=3)]
            hint = f"; did you mean {' or '.join(near)}?" if near else "."
            raise FileNotFoundError(f"`run` must be the folder of a run, got {str(folder)!r}, which {what}{hint}")
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
        """The folder of the checkpoints."""
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
        """Return whether training is finished."""
        return self.result_file.is_file()


def runs_in(folder: Path) -> Iterator[Path]:
    """Yield the runs directly in `folder`, sorted by name; none if it does not exist."""
    if folder.is_dir():
        yield from (path for path in sorted(folder.iterdir()) if RunFolder(path).recipe_file.is_file())


@contextlib.contextmanager
def locked(folder: Path, wait: float = 0) -> Iterator[bool]:
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
