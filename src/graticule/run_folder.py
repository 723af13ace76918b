"""A run folder and the names of the files in it, without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run."""

    folder: Path

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Open an existing run.

        Raises:
            FileNotFoundError: if the folder does not exist, or holds no run.
        """
        run = cls(Path(folder))
        if not run.recipe_file.is_file():
            what = "has no recipe.json, so it is no run" if run.folder.is_dir() else "is not there"
            raise FileNotFoundError(f"`run` must be the folder of a run, got {str(folder)!r}, which {what}.")
        return run

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe, the metric, the data's sizes, versions and machine, JSON."""
        return self.folder / "recipe.json"

    @property
    def metrics_file(self) -> Path:
        """One line per epoch, CSV."""
        return self.folder / "metrics.csv"

    @property
    def log_file(self) -> Path:
        """The log, each line with date and time."""
        return self.folder / "log.txt"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def weights(self) -> Path:
        """The best weights, under published names where there are any."""
        return self.folder / "weights.safetensors"

    @property
    def result_file(self) -> Path:
        """The results of a finished run, JSON."""
        return self.folder / "result.json"

    @property
    def finished(self) -> bool:
        """Return whether training is finished."""
        return self.result_file.is_file()

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer of a run on text, if it was learned or read from a file, JSON."""
        return self.folder / "tokenizer.json"
