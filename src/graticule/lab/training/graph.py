"""A training step as one CUDA graph, which the host launches at once instead of kernel by kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from graticule.lab.training.task import Task

#: Steps before the capture, in which libraries choose kernels and the optimizer creates its state.
WARM_UP = 3
#: Optimizers of PyTorch whose fused step reads learning rate, loss scale and overflow on the device.
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def capture(function: Callable[[], object]) -> Callable[[], object]:
    """Capture the kernels of `function` as a CUDA graph, without running them; returns a function that replays them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


class StepGraph:
    """A training step that runs as usual a few times, is then captured, and is replayed from then on.

    A graph reads and writes fixed addresses, so each batch is copied into the tensors of the first batch, and the
    learning rates are copied into tensors on the device. PyTorch registers the default generator with the graph, and a
    replay starts from its current seed, so dropout draws the same numbers as without the graph. A batch of another
    shape, such as a smaller last batch, runs without the graph. If the capture fails, all steps do. Both are reported
    in one sentence. The moving average of the weights and the check of the loss are outside the graph.

    Args:
        compute: makes a step for a batch, as a function of tensors alone that never waits for the device; returns the
            loss.
        optimizer: whose step `compute` makes.
        batch_size: examples per captured step.
        say: gets the sentences.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Tensor]], Tensor],
        optimizer: torch.optim.Optimizer,
        batch_size: int,
        say: Callable[[str], object],
    ) -> None:
        self.compute, self.optimizer, self.batch_size, self.say = compute, optimizer, batch_size, say
        device = optimizer.param_groups[0]["params"][0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        dtype = torch.float64 if self._stream is None else torch.float32  # of Python's floats, and of the fused kernels
        self._rates = [torch.zeros((), dtype=dtype, device=device) for _ in optimizer.param_groups]
        self._batch: list[Tensor] = []
        self._loss = torch.zeros((), device=device)
        self._warm, self._failed, self._reported = 0, False, False
        self._replay: Callable[[], object] | None = None

    def __call__(self, batch: Sequence[Tensor]) -> Tensor:
        """Make a step for a batch, of which each element is a tensor with an entry per example; returns the loss."""
        for rate, group in zip(self._rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        if not self._batch and len(batch[0]) == self.batch_size:
            self._batch = [tensor.clone() for tensor in batch]
        usual = [(x.shape, x.dtype) for x in batch] == [(x.shape, x.dtype) for x in self._batch]
        if not usual and not self._reported:
            self.say(f"no CUDA graph for batches of {len(batch[0])} examples, since a captured step has others")
            self._reported = True
        if usual and self._warm == WARM_UP and self._replay is None and not self._failed:
            self._capture()
        if not usual or self._replay is None:
            loss = self._run(batch)
            if self._replay is None:
                self._warm, self._loss = min(self._warm + usual, WARM_UP), torch.zeros_like(loss)
            return loss
        for static, tensor in zip(self._batch, batch, strict=True):
            static.copy_(tensor)
        self._replay()
        return self._loss

    def _capture(self) -> None:
        def step() -> None:
            with self._values(capturable=True):
                self._loss.copy_(self.compute(self._batch))

        try:
            self._replay = capture(step)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            self.say(f"no CUDA graph of a step, since its capture failed: {type(error).__name__}: {reason}")
            self._failed = True

    def _run(self, batch: Sequence[Tensor]) -> Tensor:
        """Make a step without a graph, on another stream than the usual one, as the capture needs."""
        with self._values():
            if self._stream is None:
                return self.compute(batch)
            usual = torch.cuda.current_stream()
            self._stream.wait_stream(usual)
            with torch.cuda.stream(self._stream):
                loss = self.compute(batch)
            usual.wait_stream(self._stream)
            return loss

    @contextlib.contextmanager
    def _values(self, capturable: bool = False) -> Iterator[None]:
        """Give the optimizer rates in tensors and fused kernels, within a step only: checkpoints are as without."""
        optimizer: Any = self.optimizer
        before = [dict(group) for group in optimizer.param_groups]
        for rate, group in zip(self._rates, optimizer.param_groups, strict=True):
            on_gpu = {} if self._stream is None else {"fused": True, "capturable": capturable}
            group.update({"lr": rate, **{name: value for name, value in on_gpu.items() if name in group}})
        if self._stream is not None:
            optimizer._step_supports_amp_scaling = True  # as if it had been built with fused=True
            for state in optimizer.state.values():
                if "step" in state:  # of a checkpoint, it is on the CPU
                    state["step"] = state["step"].to(self._rates[0].device, torch.float32)
        try:
            yield
        finally:
            for group, values in zip(optimizer.param_groups, before, strict=True):
                group.update({name: values[name] for name in ("lr", "fused", "capturable") if name in values})


def obstacle(task: Task[Any, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer, processes: int) -> str:
    """Return the reason why a step cannot be captured; an empty string if there is none."""
    recipe, kinds = task.recipe, ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for part in model.modules() for kind in kinds for hook in getattr(part, kind).values()]
    reasons = {
        f"{processes} processes share a step": processes > 1,
        f"a step has {recipe.accumulate} micro-batches": recipe.accumulate > 1,
        "activations are recomputed (`grad_checkpointing`)": recipe.grad_checkpointing,
        "training images have several sizes": len(getattr(recipe, "train_sizes", ())) > 1,
        f"the loss of the task {recipe.task} depends on more than tensors": not _is_mixed_loss(task),
        f"the optimizer {recipe.optimizer} has no fused step": not isinstance(optimizer, _FUSED),
        "16-mixed precision clips gradients without a fused step": recipe.precision == "16-mixed"
        and recipe.clip_grad is not None,
        # the library's hooks, such as the check of a grid, change nothing from step to step
        "the model has hooks": any(not str(hook.__module__).startswith("graticule.") for hook in hooks),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _is_mixed_loss(task: Task[Any, Any]) -> bool:
    """Return whether the class that defines the task's loss also defines `mixed_loss`; a subclass may define one."""
    owner = next(cls for cls in type(task).__mro__ if {"loss", "mixed_loss"} & vars(cls).keys())
    return "mixed_loss" in vars(owner) and task.mixed_loss is not None
