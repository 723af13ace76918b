"""Volumes of four cubes, whose class, a shape and its pose, is in the arrangement of the cubes alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from graticule.lab.data.images import DatasetInfo, MadeImages, Split
from graticule.lab.data.registry import register_dataset

#: Cells per side of a volume, and voxels per side of a cell, which is the patch of a model.
CELLS, CELL = 5, 4
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

_SIZE = (CELLS * CELL,) * 3
SOLIDS = DatasetInfo("solids", tuple(SHAPES), 1, _SIZE, (0.117,), (0.11,))


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
    """Return a volume, (20, 20, 20); the streams of `RandomState` do not depend on the version of NumPy."""
    random = np.random.RandomState([7 if split == "train" else 8, index])
    sides = list(SHAPES.values())[index % len(SHAPES)]
    starts = [random.randint(CELLS - side + 1) for side in sides]
    filled = np.zeros((CELLS,) * 3)
    filled[tuple(slice(start, start + side) for start, side in zip(starts, sides, strict=True))] = random.uniform(
        100, 200
    )
    voxels = filled.repeat(CELL, 0).repeat(CELL, 1).repeat(CELL, 2) + random.normal(25, 8, _SIZE)
    return voxels.round().clip(0, 255).astype(np.uint8)
