"""The state of a training: a model, its moving average, the optimizer and the schedule, on Lightning Fabric."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from graticule.lab.data.sampling import BatchOrder
from graticule.lab.training.graph import StepGraph, obstacle
from graticule.lab.training.optimization import build_optimizer, build_schedule
from graticule.lab.training.sharding import full_state, is_sharded, sharded_optimizer_state, sharded_state, unsharded
from graticule.lab.training.task import Task
from graticule.lab.training.validation import Sums, exact_dtype


class Loss(nn.Module):
    """The loss of a batch as a module, so that strategy and precision hold for all of its computation."""

    def __init__(self, task: Task[Any, Any], model: nn.Module) -> None:
        super().__init__()
        self.task = task
        self.model = model

    def forward(self, batch: Any, epoch: int | None, parts: int) -> tuple[Tensor, Tensor]:
        """Return the mean loss of a batch in an epoch, counted from 0, divided by the parts of a step, and detached.

        Without an epoch, the batch is mixed already.
        """
        if epoch is None:
            loss: Tensor = self.task.mixed_loss(self.model, batch)
        else:
            loss = self.task.loss(self.model, batch, epoch)
        return loss if parts == 1 else loss / parts, loss.detach()


class Training:
    """A model and its task, with all that the steps of its training change.

    Args:
        fabric: devices and precision.
        task: loss and score.
        model: the model.
        batches: the examples of each batch of this process.
        say: gets a sentence if steps run without a CUDA graph.

    epoch, batches_done: epochs that have ended, and micro-batches of the current one.
    """

    def __init__(
        self,
        fabric: Fabric,
        task: Task[Any, Any],
        model: nn.Module,
        batches: BatchOrder,
        say: Callable[[str], object] = print,
    ) -> None:
        self.fabric, self.task, self.recipe, self.batches = fabric, task, task.recipe, batches
        if task.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.loss = Loss(task, model)
        decay = self.recipe.ema_decay
        self.average = None if decay is None else ModelEmaV3(self.loss, decay)  # copied before it is sharded
        self._loss = fabric.setup_module(self.loss)
        if self.average is not None:
            copy = fabric.strategy.precision.convert_module(self.average.module)
            (fabric.strategy.setup_module if is_sharded(self.loss) else fabric.to_device)(copy)
        self.optimizer = build_optimizer(self.recipe, model)
        self._optimizer: Any = fabric.setup_optimizers(self.optimizer)
        self.schedule = build_schedule(self.recipe, self.optimizer, batches.steps)
        self.epoch = self.batches_done = 0
        self._sum: Tensor | float = 0.0  # of the losses of the epoch so far, in this process
        self._count = 0.0
        self._unchecked: tuple[Tensor, int, torch.cuda.Event] | None = None  # of a step on a GPU
        self._graph: StepGraph | None = None
        if self.recipe.cuda_graph and fabric.device.type == "cuda":
            if reason := obstacle(task, model, self.optimizer, fabric.world_size):
                say(f"no CUDA graph of a step, since {reason}")
            else:
                self._graph = StepGraph(self._whole_step, self.optimizer, self.recipe.batch_size, say)

    @property
    def steps(self) -> int:
        return self.epoch * self.batches.steps + self.batches_done // self.recipe.accumulate

    @property
    def evaluated(self) -> Loss:
        """Return the module that is evaluated: the moving average, if there is one."""
        return self.loss if self.average is None else self.average.module

    def start_epoch(self) -> None:
        """Clear the sums of the epoch."""
        self.batches_done, self._sum, self._count = 0, 0.0, 0.0

    def step(self, batch: Any) -> bool:
        """Compute the gradient of a micro-batch, and make a step after the last of a step; returns whether it did."""
        number, parts = self.batches_done, self.recipe.accumulate
        if number % parts == 0 and self._graph is None:
            self._optimizer.zero_grad(set_to_none=True)
        self._seed(number)
        batch = self.fabric.to_device(batch)
        full = (number + 1) % parts == 0
        if self._graph is not None:
            precision = self.fabric.strategy.precision
            with precision.forward_context():
                batch = self.task.mix(precision.convert_input(batch), self.epoch)
            loss = self._graph(batch)
            self._check_finite(loss, number)
        elif full:
            loss = self._backward(batch, number)
            self._update()
        else:
            with self.fabric.no_backward_sync(self._loss):
                loss = self._backward(batch, number)
        self._sum = self._sum + loss * len(batch[0])
        self._count += len(batch[0])
        self.batches_done += 1
        if full:
            self.schedule.step_update(self.steps)
            if self.average is not None:
                self.average.update(self.loss)
        return full

    def _backward(self, batch: Any, number: int) -> Any:
        """Add the gradient of a micro-batch; returns its loss."""
        share, loss = self._loss(batch, self.epoch, self.recipe.accumulate)
        self._check_finite(loss, number)
        self.fabric.backward(share)
        return loss

    def _update(self) -> None:
        """Clip the gradient and make a step of the optimizer."""
        if self.recipe.clip_grad is not None:
            limit = self.recipe.clip_grad
            self.fabric.clip_gradients(self._loss, self._optimizer, max_norm=limit, error_if_nonfinite=False)
        self._optimizer.step()

    def _whole_step(self, batch: Any) -> Tensor:
        """Make a step for a mixed batch, as a function of tensors alone; returns its loss."""
        self._optimizer.zero_grad(set_to_none=True)
        share, loss = self._loss(batch, None, 1)
        self.fabric.backward(share)
        self._update()
        result: Tensor = loss
        return result

    def _seed(self, number: int) -> None:
        """Make dropout and mixing functions of seed, batch and process, so that a resumed run draws the same."""
        process = [self.fabric.global_rank] if self.fabric.global_rank else []
        seed = np.random.SeedSequence([self.recipe.seed, self.epoch, number, *process]).generate_state(1)[0]
        random.seed(int(seed))
        np.random.seed(seed)
        torch.default_generator.manual_seed(int(seed))  # torch.manual_seed stores a traceback before CUDA starts
        if self.fabric.device.type != "cpu":
            torch.manual_seed(int(seed))

    def _check_finite(self, loss: Tensor, number: int) -> None:
        """Check that the loss is finite: on a GPU, the loss of the step before, so that it never waits.

        If it is not in one process, all raise a FloatingPointError, so that none waits for another.
        """
        if loss.device.type != "cuda":
            return self._stop_unless_finite(loss, number)
        self.check_last()
        # the copy to pinned memory ends with this forward pass, while the backward pass is already being computed
        last = torch.empty((), dtype=loss.dtype, pin_memory=True).copy_(loss, non_blocking=True)
        self._unchecked = last, number, torch.cuda.Event()
        self._unchecked[-1].record()
        return None

    def check_last(self) -> None:
        """Check the loss of the last step on a GPU, if there is one; a checkpoint never has weights from after it."""
        if self._unchecked is not None:
            (last, number, copied), self._unchecked = self._unchecked, None
            copied.synchronize()
            self._stop_unless_finite(last, number)

    def _stop_unless_finite(self, loss: Tensor, number: int) -> None:
        here = torch.isfinite(loss)
        if not self.any_process(not here) if self.fabric.world_size > 1 else here:
            return
        reason = "the loss of another process is not finite" if here else f"the loss is {loss.item()}"
        raise FloatingPointError(
            f"{reason} in epoch {self.epoch + 1}, batch {number + 1}; a smaller `lr`, a longer warm-up or "
            "`clip_grad` may help. The last checkpoint is intact."
        )

    def any_process(self, value: Any) -> bool:
        """Return whether `value` is true in any process."""
        if self.fabric.world_size == 1:
            return bool(value)
        flag = torch.tensor(float(value), device=self.fabric.device)
        return bool(self.fabric.all_reduce(flag, reduce_op="max"))

    @torch.inference_mode()
    def validate(self, loader: Any) -> dict[str, float]:
        """Return `train_loss` of the epoch, `val_loss` and the metric of the task over all processes, and the rate."""
        self.check_last()
        task, held_out, precision = self.task, Sums(), self.fabric.strategy.precision
        task.start_validation()
        modes = {part: part.training for part in self.evaluated.modules()}
        self.evaluated.eval()
        with unsharded(self.evaluated):
            for batch in loader:
                batch = precision.convert_input(self.fabric.to_device(batch))
                with precision.forward_context():
                    held_out.add(task.validate(self.evaluated.model, batch))
        for part, mode in modes.items():
            part.training = mode
        loss, trained_on = total(self._gathered(self._sum, self._count))
        *totals, count = total(self._gathered(*held_out.values.values(), held_out.count))
        sums = dict(zip(held_out.values, totals, strict=True))
        scores = {"train_loss": loss / max(trained_on, 1.0)}
        if "loss" in sums:
            scores["val_loss"] = sums["loss"] / max(count, 1.0)
        scores[task.metric.column] = float(task.score(sums, int(count)))
        scores["lr"] = max(group["lr"] for group in self.optimizer.param_groups)
        return scores

    def _gathered(self, *values: Tensor | float) -> list[list[float]]:
        """Return these values for each process."""
        device = self.fabric.device
        here = torch.tensor([float(value) for value in values], dtype=exact_dtype(device), device=device)
        if self.fabric.world_size > 1:
            gathered: Any = self.fabric.all_gather(here)
            rows: list[list[float]] = gathered.tolist()
            return rows
        return [here.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs; its `state_dict` has the weights that are evaluated."""
        self.check_last()
        return {
            "state_dict": full_state(self.evaluated.state_dict()),
            **({} if self.average is None else {"current_model_state": full_state(self.loss.state_dict())}),
            "optimizer": full_state(self.optimizer.state_dict()),
            "precision": self.fabric.strategy.precision.state_dict(),
            "progress": {
                "epoch": self.epoch,
                "batches": self.batches_done,
                "sums": self._gathered(self._sum, self._count),  # per process
                "accumulate": self.recipe.accumulate,
            },
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore the state of `state_dict`; with another number of processes, the first one gets all sums."""
        self.evaluated.load_state_dict(sharded_state(state["state_dict"], self.evaluated))
        if self.average is not None:
            self.loss.load_state_dict(sharded_state(state["current_model_state"], self.loss))
        self.optimizer.load_state_dict(sharded_optimizer_state(state["optimizer"], self.optimizer))
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        progress, processes = state["progress"], self.fabric.world_size
        sums = progress["sums"]
        if len(sums) != processes:
            sums = [total(sums), *[[0.0, 0.0]] * (processes - 1)]
        self._sum, self._count = sums[self.fabric.global_rank]
        self.epoch, self.batches_done = progress["epoch"], progress["batches"]
        self.schedule.step_update(self.steps)


def total(rows: list[list[float]]) -> list[float]:
    """Add up the values of all processes."""
    return [sum(column) for column in zip(*rows, strict=True)]
