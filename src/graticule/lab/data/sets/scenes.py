"""Scenes: images composed of the digits, with boxes, masks and a class per pixel, without any download."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

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
        """Return the name of a scene."""
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


@dataclass(frozen=True)
class Composition:
    """Several digits at random positions, scales and colors, on a background with a gradient and noise.

    A digit hides those that were placed earlier.

    parts: the available digits.
    size: height and width in pixels.
    objects: range of the number of digits.
    heights: range of their heights in pixels.
    margin: empty pixels at each side.
    """

    parts: ArrayImages
    size: tuple[int, int] = SIZE
    objects: tuple[int, int] = (3, 8)
    heights: tuple[int, int] = (14, 40)
    margin: int = 0

    def scene(self, *seed: int) -> Scene:
        """Return an image; the streams of `RandomState` do not depend on the version of NumPy."""
        random = np.random.RandomState(seed)
        height, width = (side - 2 * self.margin for side in self.size)
        canvas = _background(random, self.size)
        owner = np.full(self.size, -1, dtype=np.int8)
        kinds: list[int] = []
        placed: list[tuple[int, int, int, int]] = []
        for _ in range(random.randint(self.objects[0], self.objects[1] + 1)):
            which = random.randint(len(self.parts))
            ink = _scaled(self.parts.images[which], random.randint(self.heights[0], self.heights[1] + 1), width)
            color = random.randint(128, 256, 3)
            for _ in range(20):
                free = (height - ink.shape[0] + 1, width - ink.shape[1] + 1)
                top, left = (self.margin + random.randint(0, room) for room in free)
                box = (top, left, top + ink.shape[0], left + ink.shape[1])
                if all(_share(box, other) <= _OVERLAP for other in placed):
                    region = np.s_[box[0] : box[2], box[1] : box[3]]
                    canvas[region] += ink[..., None] * (color - canvas[region])
                    owner[region][ink > _INK] = len(placed)
                    placed.append(box)
                    kinds.append(int(self.parts.labels[which]))
                    break
        return Scene(canvas.round().clip(0, 255).astype(np.uint8), owner, np.array(kinds))


@register_dataset("scenes")
def scenes(split: Split, root: Path | None = None) -> tuple[Scenes, DenseInfo]:
    """Load 2,000 scenes to train on, or 200 held-out ones, of 96 x 96 pixels."""
    composition = Composition(digits(split)[0])
    return Scenes(COUNTS[split], partial(composition.scene, 1 if split == "train" else 2)), INFO


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


@dataclass(frozen=True)
class Sides:
    """Two halves, composed independently; the class of a digit is its half, left or right.

    Scene 2n + 1 has the halves of scene 2n exchanged, so nothing within a half tells its side. A model that is
    equivariant under permutations of the patches gives a digit the same class in both scenes, so at most half of the
    pixels of digits are right. If a share a of the left ones is right, and b of the right ones, a + b <= 1, and the
    intersections over union are at most a / (1 + a) and b / (1 + b): with the background, their mean is at most 5/9.
    With patches of up to twice the margin, no pixel of a digit depends on a logit of the other half.

    half: the composition of a half.
    stream: separates the draws of the two splits.
    """

    half: Composition
    stream: int

    def scene(self, index: int) -> Scene:
        """Return a scene; its halves are functions of index // 2."""
        halves = [self._half(index // 2, side) for side in (0, 1)]
        first, second = reversed(halves) if index % 2 else halves
        owner = np.concatenate([first.owner, np.where(second.owner < 0, -1, second.owner + len(first.kinds))], 1)
        kinds = np.repeat([0, 1], [len(first.kinds), len(second.kinds)])
        return Scene(np.concatenate([first.pixels, second.pixels], 1), owner, kinds)

    def _half(self, index: int, side: int) -> Scene:
        """Return a half, in which a digit covers each row from its first to its last ink.

        Otherwise its strokes would be thinner than a patch, and a decoder of patches could not segment them.
        """
        scene = self.half.scene(self.stream, index, side)
        owner = scene.owner.copy()
        for number in range(len(scene.kinds)):
            ink = scene.owner == number
            between = np.logical_or.accumulate(ink, 1) & np.logical_or.accumulate(ink[:, ::-1], 1)[:, ::-1]
            owner[between & (scene.owner < 0)] = number
        return replace(scene, owner=owner)


@register_dataset("scenes_sides")
def scenes_sides(split: Split, root: Path | None = None) -> tuple[Scenes, DenseInfo]:
    """Load 2,000 scenes to train on, or 200 held-out ones, of 96 x 96 pixels, in pairs of exchanged halves."""
    parts, _ = digits(split)
    half = Composition(parts, (SIZE[0], SIZE[1] // 2), objects=(1, 3), heights=(20, 40), margin=4)
    sides = Sides(half, stream=3 if split == "train" else 4)
    names = ("left", "right")
    facts: dict[str, Any] = {"class_names": names, "category_ids": (1, 2), "pixel_names": ("background", *names)}
    return Scenes(COUNTS[split], sides.scene), replace(INFO, name="scenes_sides", **facts)
