"""The score of a model on held-out data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from graticule.lab.terminal import bar as progress_bar


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
        # a plain sum: the metrics of Lightning are rounded to the precision of the model and skip NaN
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + value.sum(dtype=exact_dtype(value.device))


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums: float64, or float32 on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64


def in_precision(model: nn.Module, precision: Any, device: torch.device | str) -> nn.Module:
    """Let a model compute in Lightning's `precision`, as in training; 16-mixed is for GPUs. Returns it."""
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
) -> Iterator[tuple[Any, Any, float]]:
    """Yield each batch, what `compute` returns for it on `device`, and the seconds of this computation."""
    for batch in progress_bar(batches, label, wanted=progress, leave=False):
        moved = move_data_to_device(batch, torch.device(device))
        start = time.perf_counter()
        result = compute(moved)
        yield batch, result, time.perf_counter() - start


@torch.inference_mode()
def held_out(
    task: Any,
    model: nn.Module,
    data: Any,
    size: tuple[int, int] | None = None,
    *,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> tuple[float, float, int]:
    """Return score, mean loss (NaN if the task has none) and number of examples of `model` on the held-out data.

    The model is in evaluation mode; `size` is the (height, width) of the images, by default that of the training.
    """
    device = torch.device(device)
    task.setup(model.to(device), data, device)
    task.start_validation()
    sums = Sums()
    loader = data.eval_dataloader(size or data.size)
    for _, values, _ in batch_results(partial(task.validate, model), loader, "held out", device, progress):
        sums.add(values)
    totals = {name: float(value) for name, value in sums.values.items()}
    return task.score(totals, sums.count), totals.get("loss", math.nan) / sums.count, sums.count
