"""Intersection over union of a model on held-out images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.lab.data.dense import IGNORED
from graticule.lab.tasks.parts.dense import PixelScore, windows_of
from graticule.lab.training.validation import batch_results


def logits_of(model: Any, image: Tensor, size: Sequence[int], windows: Any) -> Tensor:
    """Return the logits (classes, *size) of an image, computed as a whole or in windows and resized.

    Args:
        model: a segmentation model.
        image: (3, height, width), normalized.
        size: (height, width) of the original image.
        windows: an object with `window`, `stride` and `located`, such as a recipe.
    """
    from graticule.dense.segmentation import segment_in_windows

    if windows.window is None:
        logits = model(image[None])
    else:
        logits = segment_in_windows(model, image[None], windows.window, windows.stride, windows.located)
    height, width = size
    if tuple(logits.shape[-2:]) != (height, width):
        logits = F.interpolate(logits, size=(height, width), mode="bilinear", align_corners=False)
    resized: Tensor = logits[0]
    return resized


def counted(found: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Return the numbers of pixels per class that are right, that are of it, and that are predicted: (3, classes).

    Args:
        found: (height, width), the predicted classes.
        truth: (height, width); pixels that are `IGNORED` do not count.
        classes: number of classes.
    """
    matrix = confusion(found, truth, classes)
    return torch.stack([matrix.diagonal(), matrix.sum(1), matrix.sum(0)])


def confusion(found: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Return the numbers of pixels of each class (row) predicted as each (column), (classes, classes)."""
    counts = truth != IGNORED
    pairs = truth[counts].long() * classes + found[counts].long()
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def class_ious(counts: Any) -> list[float | None]:
    """Return the intersection over union of each class in percent; None if neither present nor predicted."""
    both, truth, found = (list(map(float, row)) for row in counts)
    return [
        100 * one / union if (union := there + seen - one) else None
        for one, there, seen in zip(both, truth, found, strict=True)
    ]


def mean_iou(counts: Any) -> float:
    """Return the mean of `class_ious`, over the classes that are present or predicted."""
    ious = [iou for iou in class_ious(counts) if iou is not None]
    return sum(ious) / len(ious) if ious else 0.0


@torch.inference_mode()
def evaluate_segmentation(
    model: nn.Module,
    data: Any,
    size: tuple[int, int],
    windows: Any,
    *,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> PixelScore:
    """Score `model`, in evaluation mode, on the held-out images, fitted to `size`; targets are of the original images.

    Args:
        model: a segmentation model.
        data: the held-out images.
        size: the shorter and the longer side that images are fitted to.
        windows: an object with `window`, `stride` and `located`, such as a recipe.
        device: the device of the model.
        progress: whether to show a bar.
    """
    names = data.class_names
    model.to(device)
    matrix = torch.zeros(len(names), len(names), dtype=torch.int64)
    images, seconds = 0, 0.0

    def compute(batch: Any) -> list[Tensor]:
        pairs = zip(*batch, strict=True)
        return [logits_of(model, image, target["size"], windows).argmax(0).cpu() for image, target in pairs]

    loader, label = data.eval_dataloader(size), f"{size[0]}x{size[1]}"
    for (_, targets), predicted, spent in batch_results(compute, loader, label, device, progress):
        seconds += spent
        images += len(targets)
        for found, target in zip(predicted, targets, strict=True):
            matrix += confusion(found, target["classes"], len(names))
    window, stride, located = windows_of(windows)
    counts = torch.stack([matrix.diagonal(), matrix.sum(1), matrix.sum(0)])
    return PixelScore(
        size=size,
        window=window,
        stride=stride,
        located=located,
        miou=mean_iou(counts),
        accuracy=100 * int(counts[0].sum()) / max(int(counts[1].sum()), 1),
        class_iou=dict(zip(names, class_ious(counts), strict=True)),
        confusion=matrix.tolist(),
        images=images,
        images_per_second=images / seconds,
    )
