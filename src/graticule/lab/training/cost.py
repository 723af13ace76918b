"""The cost of a forward pass: multiply-adds, images per second, and the peak memory of its tensors."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from graticule.analysis.audit import wait

#: Minimum total seconds of the timed passes, and their minimum number.
_SECONDS, _PASSES = 0.5, 3


@dataclass(frozen=True)
class Cost:
    """The cost of inference on batches of `batch` images, without reading them.

    images_per_second: from the median of several passes.
    memory: bytes per image on a GPU, the peak of the allocations of a pass besides weights and images; None on a CPU.
    """

    batch: int
    images_per_second: float
    memory: float | None


@torch.inference_mode()
def count_multiply_adds(model: nn.Module, image: Tensor) -> int | None:
    """Count the multiply-adds of an image (1, C, height, width), including computations once per grid, such as a bias.

    No values are computed; returns None for a model that needs them, such as one with LieRE's matrix exponential.
    """
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    state = {name: value.detach().to("meta") for name, value in named}  # without gradients, as the counter needs
    try:
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            functional_call(model, state, (image.to("meta"),))
    except RuntimeError:
        return None
    return int(counter.get_total_flops()) // 2


@torch.inference_mode()
def inference_cost(model: nn.Module, images: Tensor) -> Cost:
    """Measure `model`, in evaluation mode, on images (B, C, height, width) on its device."""
    device, memory = images.device, None
    if images.is_cuda:  # nothing counts allocations elsewhere
        wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    _seconds(model, images)  # the warm-up of the timed passes
    if images.is_cuda:
        memory = (torch.cuda.max_memory_allocated(device) - before) / len(images)
    times: list[float] = []
    while len(times) < _PASSES or sum(times) < _SECONDS:
        times.append(_seconds(model, images))
    return Cost(len(images), len(images) / statistics.median(times), memory)


def _seconds(model: nn.Module, images: Tensor) -> float:
    wait(images.device)
    start = time.perf_counter()
    model(images)
    wait(images.device)
    return time.perf_counter() - start
