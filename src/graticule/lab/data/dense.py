"""The interface of data sets with boxes, masks or a class per pixel."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors

from graticule.lab.data.images import LARGEST, UNREADABLE, DatasetInfo, StoredImages, decode
from graticule.system.files import read_bytes

#: The class of a pixel that is neither learned nor scored.
IGNORED = 255

#: The target (ground truth) of an image, by name. Sizes are in pixels of the image, n is the number of objects.
#:     boxes: (n, 4), left, top, right, bottom, a `tv_tensors.BoundingBoxes`
#:     labels: (n,), classes from 0
#:     masks: (n, height, width), of 0 and 1, a `tv_tensors.Mask`
#:     iscrowd: (n,), True for a group of objects, which is neither learned nor counted as missed
#:     area: (n,), from the data set
#:     classes: (height, width), the class of every pixel, or `IGNORED`, a `tv_tensors.Mask`
#:     image_id: the number of the image in its data set
Target = dict[str, Any]


@dataclass(frozen=True)
class DenseInfo(DatasetInfo):
    """The facts of a data set for detection or segmentation that a model needs.

    truth: of boxes, masks and classes.
    category_ids: the number of each class of objects in the files of the data set, used when results are written.
    pixel_names: the classes of pixels, if these are not `class_names`.
    """

    truth: tuple[str, ...] = ("boxes",)
    category_ids: tuple[int, ...] = ()
    pixel_names: tuple[str, ...] = ()


class DenseImages(StoredImages):
    """Pairs of an image, uint8 of (3, height, width), and its target; one that contradicts its target is broken.

    sizes: (n, 2), height and width of every image, if they are known without reading the images.
    wanted: the entries of the target that are used, of boxes, masks and classes, so that others need not be made; None
        for all.
    """

    sizes: np.ndarray | None = None
    wanted: frozenset[str] | None = None

    @abstractmethod
    def example(self, index: int) -> tuple[Tensor, Target]:
        """Return an image and its target; an error means that one of its files is broken."""

    def content(self, index: int) -> Iterable[bytes | np.ndarray]:
        """Return the stored bytes or the pixels of an image, and its targets; a broken one has none."""
        files: list[bytes | np.ndarray] = [path.read_bytes() for path in self.files_of(index)]
        with contextlib.suppress(*UNREADABLE):
            image, target = self.example(index)
            arrays = [np.asarray(target[name]) for name in ("boxes", "labels", "masks", "classes") if name in target]
            return (*(files or [np.asarray(image)]), *arrays)
        return files


def read_image(path: Path, size: tuple[int, int] | None = None, source: object = "the file") -> tv_tensors.Image:
    """Read an image as RGB, uint8 of (3, height, width), with the orientation of its EXIF data.

    Args:
        path: its file.
        size: the (height, width) that its annotations state; if only the image without its orientation has it, they
            refer to that.
        source: the file that states the size.

    Raises:
        ValueError, OSError, SyntaxError, Image.DecompressionBombError: if it cannot be read, or has another size.
    """
    content = read_bytes(path, LARGEST)
    pixels = np.array(decode(content))
    if size is not None and pixels.shape[:2] != size:
        height, width = pixels.shape[:2]
        pixels = np.array(decode(content, turned=False))
        if pixels.shape[:2] != size:
            raise ValueError(f"it has {height} x {width} pixels, and {size[0]} x {size[1]} in {source}")
    return tv_tensors.Image(torch.from_numpy(pixels).permute(2, 0, 1))


def boxes_target(boxes: np.ndarray, labels: np.ndarray, size: tuple[int, int], image_id: int) -> Target:
    """Return the target of an image with objects, none of which is a crowd; `area` is the area of the boxes.

    boxes: (n, 4), left, top, right, bottom in pixels; labels: (n,), from 0; size: (height, width) of the image.
    """
    corners = torch.from_numpy(np.asarray(boxes, dtype=np.float64).reshape(-1, 4).copy())
    return {
        "boxes": tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=size),
        "labels": torch.from_numpy(np.asarray(labels, dtype=np.int64).reshape(-1).copy()),
        "iscrowd": torch.zeros(len(corners), dtype=torch.bool),
        "area": (corners[:, 2:] - corners[:, :2]).prod(-1),
        "image_id": image_id,
    }
