"""What is optimised and how, whatever is learned: steps, schedules, sums, and where a run stands."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import numpy as np
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import Tensor, nn

from graticule.data import BatchOrder
from graticule.files import write_json
from graticule.training.devices import shard
from graticule.training.recipe import TrainingRecipe

#: So many steps with a loss that is not finite may be skipped one after the other.
_MOST_SKIPPED = 50


class Task(L.LightningModule, ABC):
    """A model, trained as a recipe says.

    Args:
        model: the model.
        recipe: optimiser, schedule, what to do with a loss that is not finite.
        batches: which examples each batch of this process has.
    """

    #: What an example is, for messages.
    examples: ClassVar[str]

    def __init__(self, model: Any, recipe: TrainingRecipe, batches: BatchOrder) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe
        self.batches = batches
        self.skipped_steps = 0
        self._skipped_in_a_row = 0
        self._skip = False
        self._before: Any = None  # what a step that is skipped puts back
        self._loss: Tensor | float = 0.0  # sums over the epoch so far, in this process
        self._count = 0.0
        self._held_out: Tensor | float = 0.0  # the same for what is validated
        self._held_out_count = 0

    @property
    @abstractmethod
    def rate(self) -> tuple[str, int]:
        """The unit of speed, and how many of it a step has."""

    @abstractmethod
    def loss(self, batch: Any) -> tuple[Tensor, int]:
        """Return the mean loss of a training batch, and over how many examples it is a mean."""

    @abstractmethod
    def score(self, total: float) -> float:
        """Return the metric of the recipe over what was validated, of all processes, and begin again.

        Args:
            total: the sum of the losses that were given to `hold_out`.
        """

    def forward(self, inputs: Tensor) -> Any:
        """Call the model."""
        return self.model(inputs)

    def on_train_epoch_start(self) -> None:
        """Count from nothing."""
        self._loss, self._count = 0.0, 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Make dropout and mixing a function of seed, step and process, so that a resumed run repeats the same."""
        if batch_idx % self.recipe.accumulate == 0:
            # Lightning does it behind the forward pass, which then has to do without their memory: 2 % of a small step
            self.trainer.optimizers[0].zero_grad(set_to_none=True)
        process = [self.global_rank] if self.global_rank else []
        key = [self.recipe.seed, self.current_epoch, batch_idx, *process]
        seed = np.random.SeedSequence(key).generate_state(1)[0]
        random.seed(int(seed))
        np.random.seed(seed)
        torch.default_generator.manual_seed(int(seed))  # torch.manual_seed writes a traceback down where CUDA sleeps
        if self.device.type != "cpu":
            torch.manual_seed(int(seed))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        if self.recipe.nonfinite == "skip" and batch_idx % self.recipe.accumulate == 0:
            self._remember()
        loss, count = self.loss(batch)
        if not self._finite(loss, batch_idx):
            self._skip = True
        if self._skip:
            return self._nothing(loss)
        self._loss = self._loss + loss.detach() * count
        self._count += count
        weight = self.batches.weight(batch_idx)
        return loss if weight == 1 else loss * weight

    def _finite(self, loss: Tensor, batch_idx: int) -> bool:
        """Whether the loss is finite, in all processes.

        Raises:
            FloatingPointError: if it is not, and may not be skipped (any more); the examples are in a file by then.
        """
        here = torch.isfinite(loss.detach())
        finite = here
        if self.batches.world_size > 1:  # all skip or stop together, so that none waits for another
            finite = self.trainer.strategy.reduce((~here).float(), reduce_op="max") == 0
        if finite:
            return True
        kept = self._keep_batch(loss, batch_idx) if not here else None
        skip = self.recipe.nonfinite == "skip"
        if skip and self._skipped_in_a_row < _MOST_SKIPPED:
            return False
        row = f", in the {self._skipped_in_a_row + 1}. step in a row" if skip else ""
        found = "the loss of another process is not finite" if kept is None else f"the loss is {loss.item()}"
        named = "" if kept is None else f", and the {self.examples} of the batch are named in {kept}"
        raise FloatingPointError(
            f"{found} in epoch {self.current_epoch + 1}, batch {batch_idx + 1}{row}; a smaller `lr`, "
            "a longer warm-up or `clip_grad` may help, and `nonfinite` skip leaves such steps out. The last checkpoint "
            f"is as it was{named}."
        )

    def _keep_batch(self, loss: Tensor, batch_idx: int) -> Path:
        """Write down which examples the batch had."""
        keys = self.batches.keys(self.current_epoch, batch_idx)
        name = f"nonfinite-epoch{self.current_epoch + 1}-batch{batch_idx + 1}-process{self.global_rank}.json"
        values = {
            "epoch": self.current_epoch + 1,
            "batch": batch_idx + 1,
            "step": self.global_step,
            "process": self.global_rank,
            "loss": str(loss.item()),
            self.examples: [key[1] for key in keys],
        }
        return write_json(Path(self.trainer.default_root_dir) / name, values)

    def _remember(self) -> None:
        """Keep what the forward passes of a step change: BatchNorm's statistics, and the epoch's sums."""
        norms = [module for module in self.model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        statistics = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
        self._before = statistics, self._loss, self._count

    def _nothing(self, loss: Tensor) -> Tensor:
        """Return a loss of which every parameter has a gradient of 0, as processes wait for each other's gradients."""
        return torch.stack([p.sum() for p in self.model.parameters() if p.requires_grad]).sum() * 0.0

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Make a step, or none if it is skipped: then it changes nothing but the place in the schedule."""
        if self.recipe.nonfinite != "skip":
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            return
        result = optimizer_closure()  # forward and backward pass
        if not self._skip:
            self._skipped_in_a_row = 0
            optimizer.step(closure=lambda: result)
            return
        optimizer.zero_grad(set_to_none=True)
        statistics, self._loss, self._count = self._before
        for buffer, value in statistics:
            buffer.copy_(value)
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        self._skip = False

    def hold_out(self, losses: Tensor) -> None:
        """Count the losses of some validated examples, (n,)."""
        # a plain sum, as a metric's would be rounded to the precision of the model, and pass over what is no number
        self._held_out = self._held_out + losses.sum(dtype=_exact(losses.device))
        self._held_out_count += len(losses)

    def on_validation_epoch_start(self) -> None:
        """Count from nothing."""
        self._held_out, self._held_out_count = 0.0, 0

    def on_validation_epoch_end(self) -> None:
        """Log `train_loss`, `val_loss`, the metric of the recipe, over all processes, and the learning rate."""
        loss, count = _total(self._sums())
        total, held_out = _total(self._gathered(self._held_out, self._held_out_count))
        metrics = {"train_loss": loss / max(count, 1.0), "val_loss": total / max(held_out, 1.0)}
        rates = {"lr": self.trainer.optimizers[0].param_groups[0]["lr"]}
        self.log_dict(metrics | {self.recipe.metric.column: self.score(total)} | rates)

    def _sums(self) -> list[list[float]]:
        """For each process, the sum of the losses and the number of examples of the epoch so far."""
        return self._gathered(self._loss, self._count)

    def _gathered(self, *values: Tensor | float) -> list[list[float]]:
        """Return such values of each process."""
        here = torch.tensor([float(value) for value in values], dtype=_exact(self.device), device=self.device)
        if self.trainer.world_size > 1:
            return self.trainer.strategy.all_gather(here).tolist()
        return [here.tolist()]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what the epoch came to so far, and where in it the run stands."""
        sums = self._sums()
        progress: Any = self.trainer.fit_loop.epoch_progress.current
        within = progress.processed < progress.ready
        checkpoint["progress"] = {
            "epoch": progress.processed,
            "batches": self.trainer.fit_loop.epoch_loop.batch_progress.current.ready if within else 0,
            "sums": sums,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self._skipped_in_a_row,
            "accumulate": self.recipe.accumulate,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up the counts of a checkpoint, each process its own; where they are others now, the first takes all."""
        progress = checkpoint["progress"]
        sums = progress["sums"]
        if len(sums) == self.trainer.world_size:
            self._loss, self._count = sums[self.global_rank]
        elif self.global_rank == 0:
            self._loss, self._count = _total(sums)
        else:
            self._loss, self._count = 0.0, 0.0
        self.skipped_steps = progress["skipped_steps"]
        self._skipped_in_a_row = progress.get("skipped_in_a_row", 0)

    def configure_optimizers(self) -> Any:
        """Build timm's optimizer, sparing what the model says takes no decay, and its cosine schedule by step."""
        recipe = self.recipe
        eps: dict[str, Any] = {} if recipe.optimizer_eps is None else {"eps": recipe.optimizer_eps}
        optimizer = create_optimizer_v2(
            self.model, opt=recipe.optimizer, lr=recipe.lr, weight_decay=recipe.weight_decay, momentum=0.9, **eps
        )
        scheduler, _ = create_scheduler_v2(
            optimizer,
            sched="cosine",
            num_epochs=recipe.epochs,
            min_lr=recipe.min_lr,
            warmup_lr=recipe.warmup_lr,
            warmup_epochs=recipe.warmup_epochs,
            cooldown_epochs=recipe.cooldown_epochs,
            step_on_epochs=False,
            updates_per_epoch=self.batches.steps,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Move timm's schedule to the step that is next."""
        scheduler.step_update(self.global_step)


class Sharded(Task):
    """The same with the model's parameters shared out over the processes."""

    def configure_model(self) -> None:
        """Share them out, once."""
        if not self._shared:
            mesh: Any = self.device_mesh
            shard(self.model, mesh["data_parallel"])
            self._shared = True

    def _nothing(self, loss: Tensor) -> Tensor:
        """Go back the way that the loss came, on which parameters are put together; the gradients are dropped."""
        return loss * 0.0

    _shared = False


def _exact(device: torch.device) -> torch.dtype:
    """Return what sums are held in: float64, or float32 where there is no other."""
    return torch.float32 if device.type == "mps" else torch.float64


def _total(rows: list[list[float]]) -> list[float]:
    """Add up the values of all processes."""
    return [sum(column) for column in zip(*rows, strict=True)]
