"""Classification of the pixels of whole images, and its scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.data.dense import IGNORED


def logits_of(model: Any, image: Tensor, size: Sequence[int], windows: Any) -> Tensor:
    """Return the logits (classes, *size) of an image, computed as a whole or in windows and resized.

    Args:
        model: a segmentation model.
        image: (3, height, width), normalized.
        size: (height, width) of the original image.
        windows: an object with `window`, `stride` and `located`, such as a recipe.
    """
    from graticule.dense import segment_in_windows

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
