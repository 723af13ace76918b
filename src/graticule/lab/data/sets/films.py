"""Films of the embedded digits, whose class is in the order of the frames alone, and volumes of cubes.

The class of a volume, a shape and its pose, is in the arrangement of its cubes alone. The streams of `RandomState` do
not depend on the version of NumPy.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from graticule.lab.data.images import ArrayImages, DatasetInfo, MadeImages, Split
from graticule.lab.data.registry import register_dataset
from graticule.lab.data.sets.mnist import digits

#: Frames of a film, cells along each side of a frame, and pixels along a cell, which is the patch of a model.
FRAMES, CELLS, CELL = 6, 4, 8
#: Sets of frames per split.
_SETS: dict[Split, int] = {"train": 1000, "test": 250}
#: The cell of a digit along its axis, from its first one on, in each frame of a film; all have the same frames.
MOTIONS = {
    "forward, slow": (0, 0, 1, 1, 2, 2),
    "forward, fast": (0, 1, 2, 0, 1, 2),
    "backward, slow": (2, 2, 1, 1, 0, 0),
    "backward, fast": (2, 1, 0, 2, 1, 0),
}
ORDERS = ("the larger digit first", "the smaller digit first")

_SIZE = (FRAMES, CELLS * CELL, CELLS * CELL)
MOVING = DatasetInfo("moving_digits", tuple(MOTIONS), 1, _SIZE, (0.024,), (0.13,))
ORDER = DatasetInfo("moving_digits_order", ORDERS, 1, _SIZE, (0.024,), (0.13,))


@register_dataset("moving_digits")
def moving_digits(split: Split, root: Path | None = None) -> tuple[MadeImages, DatasetInfo]:
    """Load films of a moving digit: 4,000 to train on, 1,000 held-out ones, 6 frames of 32 x 32 pixels, gray.

    The digit moves down or to the right (forward) or back, over three cells, once (slow) or twice (fast); the class is
    its direction and speed. Films 4n to 4n + 3 have the same frames in different orders, one in each class. So a model
    that does not know the order of the frames gives them the same logits, and is right in one of four: 25 %, exactly.
    """
    labels = np.arange(len(MOTIONS) * _SETS[split]) % len(MOTIONS)
    return MadeImages(labels, partial(_moving, digits(split)[0], split)), MOVING


@register_dataset("moving_digits_order")
def moving_digits_order(split: Split, root: Path | None = None) -> tuple[MadeImages, DatasetInfo]:
    """Load films of two digits, one after the other: 2,000 to train on, 500 held-out ones, 6 frames of 32 x 32 pixels.

    Each of two different digits is anywhere in the three frames of its half; the class is whether the larger or the
    smaller one comes first. Films 2n and 2n + 1 have the same halves in different orders, so a model that does not know
    the order of the frames is right in one of two.
    """
    labels = np.arange(len(ORDERS) * _SETS[split]) % len(ORDERS)
    return MadeImages(labels, partial(_in_order, digits(split)[0], split)), ORDER


def _moving(parts: ArrayImages, split: Split, index: int) -> np.ndarray:
    """Return the frames of a film, (6, 32, 32), uint8; all but their order is a function of index // 4."""
    random = _random(split, index // len(MOTIONS))
    digit, across, axis = parts.images[random.randint(len(parts))], random.randint(CELLS - 1), random.randint(2)
    each = [placed(digit, (cell, across) if axis == 0 else (across, cell)) for cell in range(CELLS - 1)]
    return np.stack([each[cell] for cell in list(MOTIONS.values())[index % len(MOTIONS)]])


def _in_order(parts: ArrayImages, split: Split, index: int) -> np.ndarray:
    """Return the frames of a film, (6, 32, 32), uint8; all but their order is a function of index // 2."""
    random = _random(split, index // len(ORDERS))
    first = random.randint(len(parts))
    second = random.choice(np.flatnonzero(parts.labels != parts.labels[first]))
    halves = [
        [placed(parts.images[which], random.randint(0, CELLS - 1, 2)) for _ in range(FRAMES // 2)]
        for which in sorted((first, second), key=lambda which: -parts.labels[which])
    ]
    return np.stack(halves[index % 2] + halves[1 - index % 2])


def _random(split: Split, index: int) -> np.random.RandomState:
    """Return the random numbers of a set of frames."""
    return np.random.RandomState([5 if split == "train" else 6, index])


def placed(digit: np.ndarray, cell: tuple[int, int] | np.ndarray) -> np.ndarray:
    """Return a frame with a digit (28, 28) of half its size, which covers 2 x 2 cells from `cell` on."""
    small = np.pad(digit.reshape(14, 2, 14, 2).mean((1, 3)).round().astype(np.uint8), 1)
    return np.pad(small, [(CELL * one, CELL * (CELLS - 2 - one)) for one in cell])


#: Cells per side of a volume, and voxels per side of a cell, which is the patch of a model.
SOLID_CELLS, VOXELS = 5, 4
#: The cells of a solid on each axis, by shape and pose: a rod along an axis, and a plate across one.
SHAPES = {
    "rod along depth": (4, 1, 1),
    "rod along height": (1, 4, 1),
    "rod along width": (1, 1, 4),
    "plate across depth": (1, 2, 2),
    "plate across height": (2, 1, 2),
    "plate across width": (2, 2, 1),
}
#: Volumes per class.
_EACH: dict[Split, int] = {"train": 500, "test": 150}

_VOLUME = (SOLID_CELLS * VOXELS,) * 3
SOLIDS = DatasetInfo("solids", tuple(SHAPES), 1, _VOLUME, (0.117,), (0.11,))


@register_dataset("solids")
def solids(split: Split, root: Path | None = None) -> tuple[MadeImages, DatasetInfo]:
    """Load volumes of a rod or a plate of four cubes: 3,000 to train on, 900 held-out ones, 20 x 20 x 20 voxels.

    The solid is anywhere on a grid of 5 x 5 x 5 cells; the class is its shape and its pose. A cube is a cell of one
    brightness, with noise, as the empty cells have. So the patches of a volume are independent of its class, and a
    model without position is right in one of six.
    """
    labels = np.arange(len(SHAPES) * _EACH[split]) % len(SHAPES)
    return MadeImages(labels, partial(_volume, split)), SOLIDS


def _volume(split: Split, index: int) -> NDArray[np.uint8]:
    """Return a volume, (20, 20, 20)."""
    random = np.random.RandomState([7 if split == "train" else 8, index])
    sides = list(SHAPES.values())[index % len(SHAPES)]
    starts = [random.randint(SOLID_CELLS - side + 1) for side in sides]
    filled = np.zeros((SOLID_CELLS,) * 3)
    filled[tuple(slice(start, start + side) for start, side in zip(starts, sides, strict=True))] = random.uniform(
        100, 200
    )
    voxels = filled.repeat(VOXELS, 0).repeat(VOXELS, 1).repeat(VOXELS, 2) + random.normal(25, 8, _VOLUME)
    return voxels.round().clip(0, 255).astype(np.uint8)
