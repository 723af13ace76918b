"""Accuracy at sizes that a model may not have been trained at."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassAccuracy
from tqdm.auto import tqdm

from graticule.data import DataModule
from graticule.surgery import fold, unfold


@dataclass(frozen=True)
class Score:
    """What a model scores at one size: percent for top-1 and top-5, nats for the loss."""

    size: tuple[int, int]
    top1: float
    top5: float | None
    loss: float
    images: int
    images_per_second: float


def check_sizes(model: Any, sizes: Iterable[tuple[int, int]]) -> None:
    """Check that a backbone can be fed images of `sizes` = (height, width), in pixels.

    Raises:
        ValueError: for a size that is no multiple of the patch.
    """
    for size in sizes:
        model.grid_at(size)


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    data: DataModule,
    sizes: Iterable[tuple[int, int]],
    *,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> list[Score]:
    """Score `model` on the test images at each of `sizes` = (height, width), in pixels.

    Position information is resampled or computed for each size, each encoding in its own way, and folded into
    constants; the model is as it was afterwards. The speed is that of the whole loop, reading included.

    Raises:
        ValueError: for a size that is no multiple of the patch, before any work.
    """
    sizes = list(sizes)
    check_sizes(model, sizes)
    classes = data.info.num_classes
    was_training = model.training
    model.to(device)
    scores = []
    try:
        for size in sizes:
            fold(model, size)
            top1 = MulticlassAccuracy(classes, average="micro").to(device)
            top5 = MulticlassAccuracy(classes, average="micro", top_k=5).to(device) if classes > 5 else None
            loss, count, start = 0.0, 0, time.perf_counter()
            batches = data.eval_dataloader(size)
            for images, labels in tqdm(batches, f"{size[0]}x{size[1]}", disable=not progress, leave=False):
                images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
                logits = model(images)
                loss += F.cross_entropy(logits.float(), labels, reduction="sum").item()
                count += len(labels)
                for metric in (top1, top5):
                    if metric is not None:
                        metric.update(logits, labels)
            scores.append(
                Score(
                    size=size,
                    top1=100 * top1.compute().item(),
                    top5=None if top5 is None else 100 * top5.compute().item(),
                    loss=loss / count,
                    images=count,
                    images_per_second=count / (time.perf_counter() - start),
                )
            )
    finally:
        unfold(model).train(was_training)
    return scores
