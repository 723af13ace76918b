"""Intersection over union of a model on held-out images."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from graticule.progress import bar as progress_bar
from graticule.tasks.dense_results import PixelScore, windows_of
from graticule.tasks.pixel_scores import class_ious, confusion, logits_of, mean_iou


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
    for batch in progress_bar(data.eval_dataloader(size), f"{size[0]}x{size[1]}", wanted=progress, leave=False):
        for image, target in zip(*batch, strict=True):
            start = time.perf_counter()
            found = logits_of(model, image.to(device), target["size"], windows).argmax(0).cpu()
            seconds += time.perf_counter() - start
            images += 1
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
