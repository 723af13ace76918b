"""Share of position information in the time of a forward pass, from interleaved passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Turns:
    """Seconds of a forward pass of several variants of a model, which are measured interleaved.

    batch: images per pass.
    seconds: variant -> seconds of each round, (turns,).
    """

    batch: int
    seconds: Mapping[str, Array]

    def share(self, more: str, less: str) -> tuple[float, float, float]:
        """Return the share of the time of `more` that `less` saves: the median over rounds, and the quartiles.

        In a round in which `less` takes longer, which is noise, it is a share of the time of `less`, from -1 to 0.
        """
        a, b = self.seconds[more], self.seconds[less]
        saved = (a - b) / np.maximum(a, b)
        low, median, high = np.quantile(saved, (0.25, 0.5, 0.75))
        return float(median), float(low), float(high)


@torch.inference_mode()
def time_in_turns(variants: Mapping[str, Callable[[Tensor], object]], images: Tensor, turns: int) -> Turns:
    """Time each variant's forward pass on `images` in `turns` rounds over all variants, after one warm-up pass each."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for forward in variants.values():
        forward(images)
    names = list(variants)
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            _wait(images.device)
            start = time.perf_counter()
            variants[name](images)
            _wait(images.device)
            seconds[name].append(time.perf_counter() - start)
    return Turns(len(images), {name: np.array(each) for name, each in seconds.items()})


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
