"""The score of a model on held-out data: sums over examples, at the precision of the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graticule.external.traced_model import view_of
from graticule.lab.terminal import bar as progress_bar
from graticule.lab.training.results import Evaluated, Evaluation, Metric, SizeOptions
from graticule.registry.checks import parse_sizes


class Sums:
    """Sums over held-out examples, in float64 if the device supports it.

    values: name -> its sum over the examples so far.
    count: number of examples.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor | float] = {}
        self.count = 0

    def add(self, values: dict[str, Tensor]) -> None:
        """Add the values of some examples, (n,) each, and count these."""
        self.count += max((len(value) for value in values.values()), default=0)
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + value.sum(dtype=exact_dtype(value.device))

    def means(self) -> dict[str, float]:
        """Return the mean of every value over the examples."""
        return {name: float(value) / self.count for name, value in self.values.items()}


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums: float64, or float32 on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64


def with_precision(model: nn.Module, precision: Any, device: torch.device | str) -> nn.Module:
    """Let a model compute in Fabric's `precision`, as in training; 16-mixed is for GPUs. Returns it."""
    from lightning_fabric.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

    kind = torch.device(device).type
    if precision == "32-true" or (precision == "16-mixed" and kind == "cpu"):
        return model
    plugin: Precision
    if precision.endswith("mixed"):
        plugin = MixedPrecision(precision, kind)
    else:
        plugin = DoublePrecision() if precision == "64-true" else HalfPrecision(precision)
    contexts: list[Any] = []

    def enter(module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        contexts.append(plugin.forward_context())
        contexts[-1].__enter__()
        return plugin.convert_input(arguments)

    def leave(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    model = plugin.convert_module(model)
    model.register_forward_pre_hook(enter)  # of the module, so that copies of it for other sizes have them
    model.register_forward_hook(leave, always_call=True)
    return model


@torch.inference_mode()
def batch_results(
    compute: Callable[[Any], Any], batches: Iterable[Any], label: str, device: torch.device | str, progress: bool
) -> Iterator[tuple[Any, Any]]:
    """Yield each batch, on `device`, and the result of `compute` for it."""
    from lightning_fabric.utilities import move_data_to_device  # takes seconds, and most commands do not need it

    for batch in progress_bar(batches, label, wanted=progress, leave=False):
        moved = move_data_to_device(batch, torch.device(device))
        yield moved, compute(moved)


@dataclass(frozen=True)
class HeldOut:
    """The score of a model on the held-out data, computed as in training."""

    score: float
    loss: float
    examples: int
    size: tuple[int, int] | None = None
    """(height, width) of the images, if they were resized"""


@torch.inference_mode()
def held_out_sums(
    task: Any,
    model: nn.Module,
    data: Any,
    size: tuple[int, int] | None = None,
    *,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> Sums:
    """Return the sums of `Task.validate` of `model`, in evaluation mode, over the held-out data.

    `size` is the (height, width) of the images, by default the training size.
    """
    device = torch.device(device)
    task.setup(model.to(device), data, device)
    task.start_validation()
    sums = Sums()
    label = "held out" if size is None else f"{size[0]}x{size[1]}"
    loader = data.eval_dataloader(size or data.size)
    for _, values in batch_results(partial(task.validate, model), loader, label, device, progress):
        sums.add(values)
    return sums


def held_out(task: Any, model: nn.Module, data: Any, size: tuple[int, int] | None = None, **options: Any) -> HeldOut:
    """Score `model` on the held-out data, as `held_out_sums` does; the loss is NaN if the task has none."""
    sums = held_out_sums(task, model, data, size, **options)
    totals = {name: float(value) for name, value in sums.values.items()}
    return HeldOut(task.score(totals, sums.count), totals.get("loss", math.nan) / sums.count, sums.count, size)


class HeldOutEvaluation(SizeOptions, Evaluation[HeldOut]):
    """The evaluation on the held-out data, as in the validation of training, also at other sizes of the images."""

    def check(self, task: Any, model: Any, data: Any) -> None:
        """Check that the data have a size, and that the model accepts the others."""
        if self.sizes and not isinstance(getattr(data, "size", None), tuple):
            sizes = " ".join(self.sizes)
            raise ValueError(
                f"`sizes` must be left out with {type(data).__name__}, which resizes nothing, got {sizes}."
            )
        for size in parse_sizes(self.sizes):
            view_of(model).resized_to(size)

    def scores(self, task: Any, model: Any, data: Any, *, device: str) -> list[HeldOut]:
        results: list[HeldOut] = []
        sizes: list[tuple[int, int] | None] = [*parse_sizes(self.sizes)]
        for size in sizes or [None]:
            sized = model if size is None else view_of(model).resized_to(size).model
            results.append(held_out(task, sized, data, size, device=device))
        return results

    def rows(self, run: Evaluated[HeldOut]) -> Iterator[dict[str, str]]:
        """Yield size, score, loss and number of examples."""
        for score in run.scores:
            size = {} if score.size is None else {"size": f"{score.size[0]}x{score.size[1]}"}
            metric: Metric = run.recipe.metric
            scores = {metric.title: metric.show(score.score, unit=False), "loss": f"{score.loss:.4g}"}
            yield {**size, **scores, "examples": f"{score.examples:,}"}
