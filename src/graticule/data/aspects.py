"""Groups of images of similar shape, so that a batch has one size and hardly distorts or crops any of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Subset
from tqdm.contrib.concurrent import thread_map


def aspect_groups(
    images: np.ndarray, sizes: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
    """Assign images to the sizes of the nearest aspect ratio; returns the group of each, (n,), and the sizes per group.

    Ratios are compared by their logarithms, so that 1 : 2 and 2 : 1 are as far from a square; on a tie the lower
    one wins. Groups are sorted by height over width, wide first; several sizes of one ratio are one group.

    Args:
        images: (n, 2), height and width of the images.
        sizes: (height, width) of the batches.
    """
    ratios = sorted({height / width for height, width in sizes})
    sizes_of = tuple(tuple(i for i, (height, width) in enumerate(sizes) if height / width == r) for r in ratios)
    distances = np.abs(np.log(images[:, 0] / images[:, 1])[:, None] - np.log(ratios))
    return distances.argmin(1), sizes_of


def stated_sizes(images: Any) -> np.ndarray:
    """Read (height, width) of all images from their headers, (n, 2), with a progress bar; 1, 1 for a broken one."""
    indices: Sequence[int] = range(len(images))
    while isinstance(images, Subset):
        images, indices = images.dataset, [images.indices[index] for index in indices]
    read = thread_map(images.size, indices, desc="reading shapes", unit=" images", leave=False, disable=None)
    return np.asarray([size or (1, 1) for size in read], dtype=np.int64)
