"""Scores of dense models at one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DetectionScore:
    """Scores of a detector at one size.

    size: the shorter and the longer side that images were fitted in.
    values: COCO's average precisions in percent by name, box_map and so on, and mask_map for masks; None if there are
        no objects of this size.
    class_map: average precision of the boxes of each class, by name; None for a class without objects.
    confusion: numbers of objects of each class (row) that were detected as each (column), by detections with a score
        of at least one half; the last row counts false detections, the last column missed objects. Crowds and what is
        detected in them do not count.
    """

    size: tuple[int, int]
    values: dict[str, float | None]
    class_map: dict[str, float | None]
    confusion: list[list[int]]
    images: int
    images_per_second: float


@dataclass(frozen=True)
class PixelScore:
    """Scores of a segmentation model at one size.

    size: the shorter and the longer side that images were fitted in.
    window, stride, located: the windows that images were split into, in pixels; None for whole images.
    miou, accuracy: percent; mean over the classes, and over the pixels.
    class_iou: by the name of the class; None for one that is neither present nor predicted.
    confusion: numbers of pixels of each class (row) that were predicted as each (column).
    """

    size: tuple[int, int]
    window: int | None
    stride: int | None
    located: bool
    miou: float
    accuracy: float
    class_iou: dict[str, float | None]
    confusion: list[list[int]]
    images: int
    images_per_second: float


def show(value: float | None) -> str:
    """Return a score for a table, a dash if there is none."""
    return "-" if value is None else f"{value:.2f}"


def windows_of(recipe: Any) -> tuple[int | None, int | None, bool]:
    """Return `window`, `stride` and `located` of a recipe, with the stride that is used by default."""
    window: int | None = recipe.window
    return window, recipe.stride or (None if window is None else max(1, window * 2 // 3)), recipe.located
