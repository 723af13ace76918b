"""The optimization of a task with Lightning: steps, schedules, sums over an epoch, and the progress of a run."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from torch import Tensor, nn

from graticule.lab.data.sampling import BatchOrder
from graticule.lab.training.recipe import TrainingRecipe
from graticule.lab.training.task import Task
from graticule.lab.training.validation import Sums, exact_dtype


class TrainingModule(L.LightningModule):
    """A model and its task, trained according to the recipe.

    Args:
        task: loss and score.
        model: the model.
        batches: the examples of each batch of this process.
    """

    def __init__(self, task: Task[Any, Any], model: nn.Module, batches: BatchOrder) -> None:
        super().__init__()
        self.task = task
        self.model = model
        self.recipe = task.recipe
        self.batches = batches
        self._loss: Tensor | float = 0.0  # sums over the epoch so far, in this process
        self._count = 0.0
        self._held_out = Sums()
        self._unchecked: tuple[Tensor, int, torch.cuda.Event] | None = None  # of a step on a GPU

    def on_train_epoch_start(self) -> None:
        """Reset the sums."""
        self._loss, self._count = 0.0, 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Make dropout and mixing functions of seed, step and process, so that a resumed run draws the same."""
        if batch_idx % self.recipe.accumulate == 0:
            # Lightning does this after the forward pass, which then cannot reuse their memory: 2 % of a small step
            self.trainer.optimizers[0].zero_grad(set_to_none=True)
        process = [self.global_rank] if self.global_rank else []
        key = [self.recipe.seed, self.current_epoch, batch_idx, *process]
        seed = np.random.SeedSequence(key).generate_state(1)[0]
        random.seed(int(seed))
        np.random.seed(seed)
        torch.default_generator.manual_seed(int(seed))  # torch.manual_seed stores a traceback before CUDA starts
        if self.device.type != "cpu":
            torch.manual_seed(int(seed))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        loss, count = self.task.loss(self.model, batch, self.current_epoch), len(batch[0])
        self._check_finite(loss, batch_idx)
        self._loss = self._loss + loss.detach() * count
        self._count += count
        weight = self.batches.weight(batch_idx)
        return loss if weight == 1 else loss * weight

    def _check_finite(self, loss: Tensor, batch_idx: int) -> None:
        """Check that the loss is finite: on a GPU that of the step before, so that it never waits.

        If it is not in one process, all raise a FloatingPointError, so that none waits for another.
        """
        if loss.device.type != "cuda":
            return self._stop_unless_finite(loss.detach(), batch_idx)
        self._check_last()
        # the copy to pinned memory ends with this forward pass, while the backward pass is already being computed
        last = torch.empty((), dtype=loss.dtype, pin_memory=True).copy_(loss.detach(), non_blocking=True)
        self._unchecked = last, batch_idx, torch.cuda.Event()
        self._unchecked[-1].record()
        return None

    def _check_last(self) -> None:
        """Check the loss of the last step on a GPU, if there is one; a checkpoint never has weights from after it."""
        if self._unchecked is not None:
            (last, number, copied), self._unchecked = self._unchecked, None
            copied.synchronize()
            self._stop_unless_finite(last, number)

    def _stop_unless_finite(self, loss: Tensor, batch_idx: int) -> None:
        here = torch.isfinite(loss)
        finite = here
        if self.batches.world_size > 1:
            finite = self.trainer.strategy.reduce((~here).float().to(self.device), reduce_op="max") == 0
        if finite:
            return
        reason = "the loss of another process is not finite" if here else f"the loss is {loss.item()}"
        raise FloatingPointError(
            f"{reason} in epoch {self.current_epoch + 1}, batch {batch_idx + 1}; a smaller `lr`, a longer warm-up or "
            "`clip_grad` may help. The last checkpoint is intact."
        )

    def on_validation_epoch_start(self) -> None:
        """Reset the sums of validation."""
        self._check_last()
        self._held_out = Sums()
        self.task.start_validation()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add the values of a held-out batch."""
        self._held_out.add(self.task.validate(self.model, batch))

    def on_validation_epoch_end(self) -> None:
        """Log `train_loss`, `val_loss` and the metric of the task, over all processes, and the highest rate."""
        loss, trained_on = _total(self._gathered(self._loss, self._count))
        names = list(self._held_out.values)
        *totals, count = _total(self._gathered(*self._held_out.values.values(), self._held_out.count))
        sums = dict(zip(names, totals, strict=True))
        metrics = {"train_loss": loss / max(trained_on, 1.0)}
        if "loss" in sums:
            metrics["val_loss"] = sums["loss"] / max(count, 1.0)
        rates = {"lr": max(group["lr"] for group in self.trainer.optimizers[0].param_groups)}
        self.log_dict(metrics | {self.task.metric.column: self.task.score(sums, int(count))} | rates)

    def _gathered(self, *values: Tensor | float) -> list[list[float]]:
        """Return these values for each process."""
        here = torch.tensor([float(value) for value in values], dtype=exact_dtype(self.device), device=self.device)
        if self.trainer.world_size > 1:
            return self.trainer.strategy.all_gather(here).tolist()
        return [here.tolist()]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the sums of the current epoch, and the progress of the run."""
        self._check_last()
        sums = self._gathered(self._loss, self._count)
        progress: Any = self.trainer.fit_loop.epoch_progress.current
        within = progress.processed < progress.ready
        checkpoint["progress"] = {
            "epoch": progress.processed,
            "batches": self.trainer.fit_loop.epoch_loop.batch_progress.current.ready if within else 0,
            "sums": sums,  # per process
            "accumulate": self.recipe.accumulate,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the counts of a checkpoint, per process; if their number differs now, the first process gets all."""
        sums = checkpoint["progress"]["sums"]
        if len(sums) != self.trainer.world_size:
            sums = [_total(sums), *[[0.0, 0.0]] * (self.trainer.world_size - 1)]
        self._loss, self._count = sums[self.global_rank]

    def configure_optimizers(self) -> Any:
        """Build the optimizer and its schedule by step."""
        recipe, optimizer = self.recipe, build_optimizer(self.recipe, self.model)
        steps = self.batches.steps
        warmup = recipe.warmup(steps)
        scheduler, _ = create_scheduler_v2(
            optimizer,
            sched="multistep" if recipe.schedule == "step" else recipe.schedule,
            # in steps, as the following arguments; timm does not count a warm-up that is a prefix
            num_epochs=recipe.epochs * steps - (warmup if recipe.warmup_prefix else 0),
            min_lr=recipe.min_lr,
            warmup_lr=recipe.warmup_lr,
            warmup_epochs=warmup,
            warmup_prefix=recipe.warmup_prefix,
            k_decay=recipe.k_decay,
            cooldown_epochs=recipe.cooldown_epochs * steps,
            decay_milestones=[epoch * steps + 1 for epoch in recipe.decay_epochs],  # timm decays one step earlier
            decay_rate=recipe.poly_power if recipe.schedule == "poly" else 0.1,
            step_on_epochs=False,
            updates_per_epoch=1,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Move timm's schedule to the next step."""
        scheduler.step_update(self.global_step)


def build_optimizer(recipe: TrainingRecipe, model: nn.Module) -> torch.optim.Optimizer:
    """Build timm's optimizer, without decay for parameters that the model excludes."""
    eps: dict[str, Any] = {} if recipe.optimizer_eps is None else {"eps": recipe.optimizer_eps}
    excluded: set[str] = set() if recipe.decay_position else getattr(model, "no_weight_decay", set)()
    groups: Any = param_groups_weight_decay
    if recipe.layer_decay:  # 0 freezes the layers instead
        groups = partial(param_groups_layer_decay, layer_decay=recipe.layer_decay)
    return create_optimizer_v2(
        model,
        opt=recipe.optimizer,
        lr=recipe.lr,
        momentum=0.9,
        param_group_fn=partial(groups, weight_decay=recipe.weight_decay, no_weight_decay_list=excluded),
        **eps,
    )


def _total(rows: list[list[float]]) -> list[float]:
    """Add up the values of all processes."""
    return [sum(column) for column in zip(*rows, strict=True)]
