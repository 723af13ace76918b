"""Scores of dense models at one size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DetectionScore:
    """Scores of a detector at one size.

    size: the shorter and the longer side that images were fitted in.
    values: COCO's average precisions in percent by name, box_map and so on, and mask_map for masks.
    class_map: average precision of the boxes of each class, by name; None for a class without objects.
    confusion: numbers of objects of each class (row) that were detected as each (column), by detections with a score
        of at least one half; the last row counts false detections, the last column missed objects.
    """

    size: tuple[int, int]
    values: dict[str, float]
    class_map: dict[str, float | None]
    confusion: list[list[int]]
    images: int
    images_per_second: float


@dataclass(frozen=True)
class PixelScore:
    """Scores of a segmentation model at one size.

    size: the shorter and the longer side that images were fitted in.
    miou, accuracy: percent; mean over the classes, and over the pixels.
    class_iou: by the name of the class; None for one that is neither present nor predicted.
    confusion: numbers of pixels of each class (row) that were predicted as each (column).
    """

    size: tuple[int, int]
    miou: float
    accuracy: float
    class_iou: dict[str, float | None]
    confusion: list[list[int]]
    images: int
    images_per_second: float
