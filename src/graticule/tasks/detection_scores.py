"""Average precision of a detector on held-out images, and the confusion of its classes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import box_iou

from graticule.progress import bar as progress_bar
from graticule.tasks.coco_scores import CocoScores
from graticule.tasks.dense_results import DetectionScore

#: Minimum score of the detections in the confusion matrix, and minimum IoU with an object.
_SCORE, _OVERLAP = 0.5, 0.5


@torch.inference_mode()
def evaluate_detection(
    model: nn.Module,
    data: Any,
    size: tuple[int, int],
    *,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> DetectionScore:
    """Score `model`, in evaluation mode, on the held-out images, fitted to `size`; targets are of the original images.

    Args:
        model: a detector.
        data: the held-out images.
        size: the shorter and the longer side that images are fitted to.
        device: the device of the model.
        progress: whether to show a bar.
    """
    names = data.class_names
    model.to(device)
    scores = CocoScores()
    matrix = torch.zeros(len(names) + 1, len(names) + 1, dtype=torch.int64)
    seconds = 0.0
    for images, targets in progress_bar(
        data.eval_dataloader(size), f"{size[0]}x{size[1]}", wanted=progress, leave=False
    ):
        start = time.perf_counter()
        detected = model([image.to(device) for image in images])
        seconds += time.perf_counter() - start
        for image, target, found in zip(images, targets, detected, strict=True):
            found = {name: value.cpu() for name, value in found.items()}
            scores.add(target, found, (image.shape[-2], image.shape[-1]))
            scale = torch.tensor([target["size"][1] / image.shape[-1], target["size"][0] / image.shape[-2]] * 2)
            matrix += detection_confusion(
                found["boxes"] * scale,
                found["labels"] - 1,
                found["scores"],
                target["boxes"],
                target["labels"],
                len(names),
                target["iscrowd"],
            )
    values = scores.compute()
    each = {int(name.rpartition("_")[2]): value for name, value in values.items() if name.startswith("box_map_class_")}
    return DetectionScore(
        size=size,
        values={name: value for name, value in values.items() if "_class_" not in name},
        class_map={name: each.get(number) for number, name in enumerate(names, 1)},
        confusion=matrix.tolist(),
        images=len(scores.images),
        images_per_second=len(scores.images) / seconds,
    )


def detection_confusion(
    boxes: Tensor,
    labels: Tensor,
    scores: Tensor,
    true_boxes: Tensor,
    true_labels: Tensor,
    classes: int,
    crowds: Tensor | None = None,
) -> Tensor:
    """Return the numbers of objects of each class (row) detected as each (column), (classes + 1, classes + 1).

    In descending order of score, each detection is matched with the unmatched object that it overlaps most, of any
    class. The last row counts the unmatched detections, the last column the unmatched objects. Crowds are neither: as
    in COCO's average precision, they are not missed, and an unmatched detection with half of its area in one is not
    counted.

    Args:
        boxes: (n, 4), boxes of the detections.
        labels: (n,), their classes from 0.
        scores: (n,).
        true_boxes: (m, 4), boxes of the objects.
        true_labels: (m,), their classes from 0.
        classes: number of classes.
        crowds: (m,), bool, which of the objects are crowds; none by default.
    """
    if crowds is None:
        crowds = torch.zeros(len(true_boxes), dtype=torch.bool)
    within = _shares(boxes.double(), true_boxes[crowds].double()).ge(_OVERLAP).any(1)  # (n,)
    true_boxes, true_labels = true_boxes[~crowds], true_labels[~crowds]
    matrix = torch.zeros(classes + 1, classes + 1, dtype=torch.int64)
    overlaps = box_iou(boxes.double(), true_boxes.double())  # (n, m)
    free = torch.ones(len(true_boxes), dtype=torch.bool)
    for number in scores.argsort(descending=True, stable=True).tolist():
        if scores[number] < _SCORE:
            break
        row = torch.where(free, overlaps[number], -1.0)
        best = int(row.argmax()) if len(row) else -1
        if best >= 0 and row[best] >= _OVERLAP:
            free[best] = False
            matrix[true_labels[best], labels[number]] += 1
        elif not within[number]:
            matrix[classes, labels[number]] += 1
    for label in true_labels[free].tolist():
        matrix[label, classes] += 1
    return matrix


def _shares(boxes: Tensor, around: Tensor) -> Tensor:
    """Return the share of each of boxes (n, 4) that lies in each of the boxes `around` (m, 4), (n, m)."""
    low, high = torch.maximum(boxes[:, None, :2], around[:, :2]), torch.minimum(boxes[:, None, 2:], around[:, 2:])
    return (high - low).clamp(min=0).prod(-1) / (boxes[:, 2:] - boxes[:, :2]).prod(-1, keepdim=True)
