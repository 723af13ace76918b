"""What dense models score at one size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DetectionScore:
    """What a detector scores at one size.

    size: the shorter and the longer side that images were fitted in.
    values: COCO's average precisions in percent by name, box_map and so on, and mask_map for masks.
    class_map: average precision of the boxes of each class, by name; None for a class without objects.
    confusion: how many objects of each class (row) were found as each (column); the last row are detections of
        nothing, the last column objects that were missed, of detections with a score of at least one half.
    """

    size: tuple[int, int]
    values: dict[str, float]
    class_map: dict[str, float | None]
    confusion: list[list[int]]
    images: int
    images_per_second: float


@dataclass(frozen=True)
class PixelScore:
    """What a model scores at one size.

    size: the shorter and the longer side that images were fitted in.
    miou, accuracy: percent; of the classes, and of the pixels.
    class_iou: by the name of the class; None for one that is neither there nor found.
    confusion: how many pixels of each class (row) were found to be of each (column).
    """

    size: tuple[int, int]
    miou: float
    accuracy: float
    class_iou: dict[str, float | None]
    confusion: list[list[int]]
    images: int
    images_per_second: float
