"""Scenes: images composed of the digits, with boxes, masks and a class per pixel, without any download."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes

from graticule.lab.data.dense import DenseImages, DenseInfo, Target, boxes_target
from graticule.lab.data.images import ArrayImages, Split
from graticule.lab.data.registry import register_dataset
from graticule.lab.data.sets.published import digits

#: Height and width of a scene, in pixels.
SIZE = (96, 96)
#: Scenes per split. Those for training consist of the training digits, the others of held-out ones.
COUNTS: dict[Split, int] = {"train": 2000, "test": 200}
#: Ranges of the number of digits, and of their heights in pixels.
_OBJECTS, _HEIGHTS = (3, 8), (14, 40)
#: Largest share of a box that may lie in another one when it is placed.
_OVERLAP = 0.25
#: A digit covers the pixels in which its ink exceeds this.
_INK = 0.5

INFO = DenseInfo(
    "scenes",
    tuple("0123456789"),
    size=SIZE,
    mean=(0.3, 0.3, 0.3),
    std=(0.25, 0.25, 0.25),
    truth=("boxes", "masks", "classes"),
    category_ids=tuple(range(1, 11)),
    pixel_names=("background", *"0123456789"),
)


@dataclass(frozen=True)
class Scene:
    """A composed image.

    pixels: (height, width, 3), uint8.
    owner: (height, width), the visible object in each pixel, or -1.
    kinds: (n,), the class of each object, including hidden ones.
    """

    pixels: np.ndarray
    owner: np.ndarray
    kinds: np.ndarray


class Scenes(DenseImages):
    """Composed images and their visible objects: boxes and masks cover the parts of objects that no other hides.

    Args:
        count: number of images.
        draw: function that returns the image of an index.
    """

    def __init__(self, count: int, draw: Callable[[int], Scene]) -> None:
        super().__init__(count, skip_broken=False)
        self.draw = draw
        self.sizes = np.tile(SIZE, (count, 1))
        self._drawn: dict[int, Scene] = {}  # 80 MB for all

    def place(self, index: int) -> Path:
        return Path(f"scene {index}")

    def example(self, index: int) -> tuple[Tensor, Target]:
        """Return a scene, composed on first access."""
        if index not in self._drawn:
            self._drawn[index] = self.draw(index)
        scene = self._drawn[index]
        visible = [n for n in range(len(scene.kinds)) if (scene.owner == n).any()]
        masks = np.stack([scene.owner == n for n in visible])
        boxes = masks_to_boxes(torch.from_numpy(masks)).numpy() + np.array((0, 0, 1, 1))
        target = boxes_target(boxes, scene.kinds[visible], SIZE, index)
        target["masks"] = tv_tensors.Mask(torch.from_numpy(masks.astype(np.uint8)))
        target["area"] = torch.from_numpy(masks.sum((1, 2)).astype(np.float64))
        classes = np.where(scene.owner < 0, 0, scene.kinds[scene.owner] + 1)
        target["classes"] = tv_tensors.Mask(torch.from_numpy(classes.astype(np.uint8)))
        return tv_tensors.Image(torch.from_numpy(scene.pixels.copy()).permute(2, 0, 1)), target


def compose(parts: ArrayImages, *seed: int) -> Scene:
    """Put several digits at random positions, scales and colors on a background with a gradient and noise.

    A digit hides those that were placed earlier. The streams of `RandomState` do not depend on the version of NumPy.

    Args:
        parts: the available digits.
        seed: of the draws.
    """
    random = np.random.RandomState(seed)
    canvas = _background(random, SIZE)
    owner = np.full(SIZE, -1, dtype=np.int8)
    kinds: list[int] = []
    placed: list[tuple[int, int, int, int]] = []
    for _ in range(random.randint(_OBJECTS[0], _OBJECTS[1] + 1)):
        which = random.randint(len(parts))
        ink = _scaled(parts.images[which], random.randint(_HEIGHTS[0], _HEIGHTS[1] + 1), SIZE[1])
        color = random.randint(128, 256, 3)
        for _ in range(20):
            top, left = (random.randint(0, side - length + 1) for side, length in zip(SIZE, ink.shape, strict=True))
            box = (top, left, top + ink.shape[0], left + ink.shape[1])
            if all(_share(box, other) <= _OVERLAP for other in placed):
                region = np.s_[box[0] : box[2], box[1] : box[3]]
                canvas[region] += ink[..., None] * (color - canvas[region])
                owner[region][ink > _INK] = len(placed)
                placed.append(box)
                kinds.append(int(parts.labels[which]))
                break
    return Scene(canvas.round().clip(0, 255).astype(np.uint8), owner, np.array(kinds))


@register_dataset("scenes")
def scenes(split: Split, root: Path | None = None) -> tuple[Scenes, DenseInfo]:
    """Load 2,000 scenes to train on, or 200 held-out ones, of 96 x 96 pixels."""
    return Scenes(COUNTS[split], partial(compose, digits(split)[0], 1 if split == "train" else 2)), INFO


def _background(random: np.random.RandomState, size: tuple[int, int]) -> np.ndarray:
    """Return dark noise with a gradient from one color to another, (height, width, 3)."""
    height, width = size
    first, last = random.randint(0, 90, (2, 3))
    along = np.linspace(0, 1, height)[:, None] if random.rand() < 0.5 else np.linspace(0, 1, width)[None]
    share = np.broadcast_to(along, size)[..., None]
    return first + (last - first) * share + random.normal(0, 8, (*size, 3))


def _scaled(digit: np.ndarray, height: int, widest: int) -> np.ndarray:
    """Return the ink of a digit without its margin, at this height and at most `widest` wide, in [0, 1]."""
    rows, columns = (np.flatnonzero(digit.max(axis) > 0) for axis in (1, 0))
    cut = digit[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    width = min(max(round(cut.shape[1] * height / cut.shape[0]), 3), widest)
    image = Image.fromarray(cut).resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image, dtype=np.float64) / 255


def _share(box: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> float:
    """Return the share of the smaller of two boxes that lies in the other."""
    sides = [max(0, min(box[n + 2], other[n + 2]) - max(box[n], other[n])) for n in (0, 1)]
    areas = [(corners[2] - corners[0]) * (corners[3] - corners[1]) for corners in (box, other)]
    return sides[0] * sides[1] / min(areas)
