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
    """Capture the kernels of `function` as a CUDA graph, without running them; returns what replays them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


class StepGraph:
    """A training step that runs as usual a few times, is then captured, and is replayed from then on.

    A graph reads and writes fixed addresses, so each batch is copied into the tensors of the first batch, and the
    learning rates are copied into tensors on the device. Random numbers come from the default generator of the device.
    PyTorch registers this generator with each graph, and a replay starts from its current seed, so dropout draws the
    same numbers as without the graph. A batch of another shape, such as a smaller last batch, runs without the graph.
    If the capture fails, all steps do. Both are reported in one sentence. The moving average of the weights and the
    check of the loss are outside the graph.

    Args:
        compute: makes a step for a batch, from the forward pass to the step of the optimizer; returns the loss. It must
            depend on tensors alone, and never wait for the device.
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
        self._on_gpu, self._stream = device.type == "cuda", None if device.type != "cuda" else torch.cuda.Stream(device)
        dtype = torch.float32 if self._on_gpu else torch.float64  # that of the fused kernels, and of Python's floats
        self._rates = [torch.zeros((), dtype=dtype, device=device) for _ in optimizer.param_groups]
        self._batch: list[Tensor] = []
        self._loss = torch.zeros((), device=device)  # with the precision of the steps before the capture
        self._warm, self._failed, self._reported = 0, False, False
        self._replay: Callable[[], object] | None = None

    def __call__(self, batch: Sequence[Tensor]) -> Tensor:
        """Make a step for a batch, of which each element is a tensor with an entry per example; returns the loss."""
        for rate, group in zip(self._rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        usual = self._has_usual_shapes(batch)
        if not usual and not self._reported:
            self.say(f"no CUDA graph for batches of {len(batch[0])} examples, since that of a step is for others")
            self._reported = True
        if self._failed or not usual or self._warm < WARM_UP:
            self._warm += usual
            loss = self._run(batch)
            if self._replay is None:
                self._loss = torch.zeros_like(loss)
            return loss
        for static, tensor in zip(self._batch, batch, strict=True):
            static.copy_(tensor)
        if self._replay is None and not self._capture():
            return self._run(batch)
        assert self._replay is not None
        self._replay()
        return self._loss

    def _has_usual_shapes(self, batch: Sequence[Tensor]) -> bool:
        """Return whether the graph is for such a batch; the first one with all examples determines its shapes."""
        if not self._batch and len(batch[0]) == self.batch_size:
            self._batch = [tensor.clone() for tensor in batch]
        shapes, static = ([(x.shape, x.dtype) for x in tensors] for tensors in (batch, self._batch))
        return shapes == static

    def _capture(self) -> bool:
        """Capture the step; returns whether that succeeded."""
        try:
            self._replay = capture(self._compute_static)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            self.say(f"no CUDA graph of a step, since its capture failed: {type(error).__name__}: {reason}")
            self._failed = True
        return not self._failed

    def _compute_static(self) -> None:
        """Make a step on the tensors of the graph."""
        with self._values(capturable=True):
            self._loss.copy_(self.compute(self._batch))

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
            group["lr"] = rate
            if self._on_gpu:
                group["fused"] = True
                group.update({"capturable": capturable} if "capturable" in group else {})
        if self._on_gpu:
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
    recipe, hooks = task.recipe, ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    reasons = {
        f"{processes} processes share a step": processes > 1,
        f"a step has {recipe.accumulate} micro-batches": recipe.accumulate > 1,
        "activations are recomputed (`grad_checkpointing`)": recipe.grad_checkpointing,
        "training images have several sizes": len(getattr(recipe, "train_sizes", ())) > 1,
        f"the loss of the task {recipe.task} depends on more than tensors": not _is_mixed_loss(task),
        f"the optimizer {recipe.optimizer} has no fused step": not isinstance(optimizer, _FUSED),
        "16-mixed precision clips gradients without a fused step": recipe.precision == "16-mixed"
        and recipe.clip_grad is not None,
        "the model has hooks": any(getattr(part, name) for part in model.modules() for name in hooks),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _is_mixed_loss(task: Task[Any, Any]) -> bool:
    """Return whether the class that defines the task's loss also defines `mixed_loss`; a subclass may define one."""
    owner = next(cls for cls in type(task).__mro__ if {"loss", "mixed_loss"} & vars(cls).keys())
    return "mixed_loss" in vars(owner) and task.mixed_loss is not None
