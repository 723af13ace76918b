"""Compare an exported file with PyTorch: outputs, accuracy, time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graticule.surgery.export_formats import Runner
from graticule.surgery.export_subject import Size

#: Largest accepted difference from PyTorch, relative to the largest output.
TOLERANCE = 1e-4
#: Seconds for which a file is timed, and the minimum number of passes.
_SECONDS, _PASSES = 0.5, 5


@dataclass(frozen=True)
class Comparison:
    """The difference of a file from PyTorch for one batch, relative to the largest output."""

    batch: int
    size: Size
    error: float


def random_images(channels: int, batch: int, size: Size) -> Tensor:
    """Return images (B, C, height, width), the same for each call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, channels, *size, generator=generator)


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of outputs, relative to the largest number of each; infinite for other shapes."""
    if [one.shape for one in found] != [one.shape for one in expected]:
        return float("inf")
    pairs = zip(found, expected, strict=True)
    worst = [float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-12)) for a, b in pairs]
    return float("inf") if any(value != value for value in worst) else max(worst)


def checked_error(error: float, path: Path, size: Size) -> float:
    """Check that a difference is small enough, and return it.

    Raises:
        ValueError: if it is too large.
    """
    if not error <= TOLERANCE:
        raise ValueError(
            f"{path} was not written: at {size[0]} x {size[1]} pixels the exported program differs from PyTorch by "
            f"{error:.1e} of the largest output, more than {TOLERANCE:.0e}."
        )
    return error


def accuracy(runs: Sequence[Runner], batches: Iterable[tuple[Tensor, Tensor]], free: bool) -> tuple[float, float]:
    """Return the top-1 of the model and of the file, in percent; one image at a time if the batch is not free."""
    right, count = [0, 0], 0
    for images, labels in batches:
        for index, run in enumerate(runs):
            parts = [images] if free else images.split(1)
            found = torch.cat([run(part)[0].argmax(-1) for part in parts])
            right[index] += int((found == labels).sum())
        count += len(labels)
    if not count:
        raise ValueError("`batches` must have at least one image, got none.")
    before, after = (100 * each / count for each in right)
    return before, after


def milliseconds(runs: Sequence[Runner], images: Tensor) -> list[float]:
    """Return the median time of each in milliseconds, with interleaved measurements."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run(images)
    while len(times[0]) < _PASSES or sum(map(sum, times)) < _SECONDS * len(runs):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run(images)
            taken.append(1000 * (time.perf_counter() - start))
    return [statistics.median(taken) for taken in times]
