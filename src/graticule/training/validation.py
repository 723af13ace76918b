"""The score of a model on held-out data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm


class Scored(Protocol):
    """The part of a task that scores held-out examples."""

    def setup(self, model: nn.Module, data: Any, device: torch.device) -> None:
        """Prepare for the validation of `model` on `device`."""

    def validate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return values of the examples of a batch."""

    def score(self, sums: Mapping[str, float], count: int) -> float:
        """Return the metric from the sums of these values."""


class Sums:
    """Sums over held-out examples, in float64 where the device has it.

    values: name -> its sum over the examples so far, `loss` from the start.
    count: how many examples there were.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor | float] = {"loss": 0.0}
        self.count = 0

    def add(self, values: dict[str, Tensor]) -> None:
        """Add the values of some examples, (n,) each, and count these."""
        # a plain sum: the metrics of Lightning are rounded to the precision of the model and pass over NaN
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + value.sum(dtype=exact_dtype(value.device))
        self.count += len(values["loss"])


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the type of sums: float64, or float32 on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64


@torch.inference_mode()
def held_out(
    task: Scored, model: nn.Module, data: Any, *, device: torch.device | str = "cpu", progress: bool = True
) -> tuple[float, float, int]:
    """Return score, mean loss and number of examples of `model`, in evaluation mode, on the held-out data."""
    device = torch.device(device)
    task.setup(model.to(device), data, device)
    sums = Sums()
    for batch in tqdm(data.eval_dataloader(data.size), "held out", disable=not progress, leave=False):
        on_device = [part.to(device) if isinstance(part, Tensor) else part for part in batch]
        sums.add(task.validate(model, on_device))
    totals = {name: float(value) for name, value in sums.values.items()}
    return task.score(totals, sums.count), totals["loss"] / sums.count, sums.count
