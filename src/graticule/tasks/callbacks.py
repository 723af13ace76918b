"""What happens beside the training steps: a history, a progress bar, checkpoints that are whole."""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from tqdm.auto import tqdm

from graticule.files import write_text, write_whole
from graticule.surgery import read_checkpoint


class WholeFileCheckpoints(TorchCheckpointIO):
    """Checkpoints that are whole or not there, and are read without running code that is in them."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write beside `path`, then put in its place."""
        write_whole(Path(path), lambda temporary: torch.save(checkpoint, temporary))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read tensors and plain values only, whatever `weights_only` says."""
        return read_checkpoint(path)


class History(L.Callback):
    """One row an epoch, kept in the checkpoint and in a CSV file, so that a resumed run has a whole history."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, float]] = []
        self._start = 0.0

    @property
    def state_key(self) -> str:
        """The name under which a checkpoint keeps the rows."""
        return "History"

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add the row of the epoch and write the file, whole or not at all."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        seconds = time.perf_counter() - self._start
        self.rows = [row for row in self.rows if row["epoch"] <= trainer.current_epoch]
        self.rows.append({"epoch": trainer.current_epoch + 1, **metrics, "seconds": seconds})
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.rows[-1]), restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_text(self.path, text.getvalue())

    def state_dict(self) -> dict[str, Any]:
        """The rows so far."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the rows of a checkpoint."""
        self.rows = list(state_dict["rows"])


class Progress(L.Callback):
    """One bar for the whole run, with the time that is left, the epoch, the loss and the best top-1."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._best = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar where training stands."""
        self._bar = tqdm(
            total=int(trainer.estimated_stepping_batches),
            initial=trainer.global_step,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5,
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the bar on by a step."""
        if self._bar is not None:
            self._bar.update()
            if batch_idx == 0:
                self._bar.set_description(f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}", refresh=False)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show what the epoch came to."""
        metrics = trainer.callback_metrics
        self._best = max(self._best, float(metrics.get("val_top1", 0.0)))
        if self._bar is not None:
            self._bar.set_postfix(
                loss=f"{float(metrics['train_loss']):.3f}",
                top1=f"{float(metrics.get('val_top1', 0.0)):.2f}",
                best=f"{self._best:.2f}",
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Close the bar."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
