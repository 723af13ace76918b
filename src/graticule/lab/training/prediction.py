"""Predictions of a model in an image, as `graticule predict` draws and writes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Prediction:
    """The predictions or the ground truth of one image; all sizes are in pixels of the image in its file.

    image: uint8, (3, height, width).
    boxes: (n, 4), left, top, right, bottom; None without boxes.
    labels: the name of the class of each box, with its score; without boxes, lines of text.
    numbers: (n,), the classes of the boxes, which determine their colors.
    masks: (n, height, width), bool.
    classes: (height, width), the class of each pixel.
    class_names: the names of the classes of the pixels.
    """

    image: Tensor
    boxes: Tensor | None = None
    labels: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    masks: Tensor | None = None
    classes: Tensor | None = None
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """A prediction and its output.

    prediction: drawn into the image.
    entries: written to JSON files, a list of entries by the name of the file.
    classes: written as a PNG: (height, width), the class of each pixel.
    lines: printed.
    """

    prediction: Prediction
    entries: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    classes: Tensor | None = None
    lines: list[str] = field(default_factory=list)


def above(found: Found, threshold: float) -> Prediction:
    """Return the prediction without the boxes whose written score is below `threshold`."""
    prediction = found.prediction
    if prediction.boxes is None:
        return prediction
    kept = [n for n, entry in enumerate(found.entries["boxes.json"]) if entry["score"] >= threshold]
    return dataclasses.replace(
        prediction,
        boxes=prediction.boxes[kept],
        labels=[prediction.labels[n] for n in kept],
        numbers=[prediction.numbers[n] for n in kept],
        masks=None if prediction.masks is None else prediction.masks[kept],
    )


def image_ids(paths: list[Path]) -> list[int]:
    """Return the ids of images: their names, if all are numbers as in COCO, otherwise 1, 2, ..."""
    names = [path.stem for path in paths]
    if all(name.isdecimal() and len(name) < 16 for name in names) and len({int(name) for name in names}) == len(names):
        return [int(name) for name in names]
    return list(range(1, len(names) + 1))
