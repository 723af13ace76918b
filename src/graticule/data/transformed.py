"""Transformed images; their randomness is a function of seed, epoch and index, so that runs are reproducible."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from graticule.data.sampling import PADDING, Key
from graticule.data.transforms import Transform


class SeededImages(Dataset[tuple[Tensor, int]]):
    """Transformed images; the randomness of each is a function of seed and key alone.

    The images do not depend on the number of workers, and the global random state is unchanged.
    """

    def __init__(self, images: Any, transform: Transform, seed: int) -> None:
        self.images = images
        self.transform = transform
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        image, label = self.images[key[1]]
        with drawing(self.seed, key):
            return self.transform(image), label


@contextlib.contextmanager
def drawing(seed: int, key: Key) -> Iterator[None]:
    """Make the draws within the block a function of seed and key; the global random state is restored after it."""
    state = int(np.random.SeedSequence([seed, *key]).generate_state(1)[0])
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(state)
        np.random.seed(state)
        torch.default_generator.manual_seed(state)  # of the CPU only, not of a GPU
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class SizedImages(Dataset[Any]):
    """The same images at several sizes; the last entry of a key is the index of the size.

    Args:
        each: the images at each size, all of the same kind.
    """

    def __init__(self, each: Sequence[Any]) -> None:
        self.each = tuple(each)

    def __len__(self) -> int:
        return len(self.each[0])

    def __getitem__(self, key: Key) -> Any:
        return self.each[key[-1]][key[:-1]]

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        """Return the images of a batch, which has one size."""
        images, keys = self.each[keys[0][-1]], [key[:-1] for key in keys]
        return images.__getitems__(keys) if hasattr(images, "__getitems__") else [images[key] for key in keys]


class TransformedImages(Dataset[tuple[Tensor, int]]):
    """Transformed images without randomness, for evaluation."""

    def __init__(self, images: Any, transform: Transform) -> None:
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[index if index >= 0 else -1 - index]
        return self.transform(image), label if index >= 0 else PADDING


class TensorImages(Dataset[tuple[Tensor, Tensor]]):
    """Small images, transformed once and stored as one tensor (n, C, H, W); a batch is one indexing operation.

    Keys are indices, or the (epoch, index) of `EpochSampler`.
    """

    def __init__(self, images: Any, transform: Transform) -> None:
        self.tensors = torch.stack([transform(image) for image, _ in (images[i] for i in range(len(images)))])
        self.labels = torch.tensor([images[i][1] for i in range(len(images))])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: int | Key) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([key])
        return images[0], labels[0]

    def __getitems__(self, keys: Sequence[int | Key]) -> tuple[Tensor, Tensor]:
        """Return the images (B, C, H, W) and labels (B,) of a whole batch."""
        indices = torch.tensor([key[1] if isinstance(key, tuple) else key for key in keys])
        padding = indices < 0
        indices = torch.where(padding, -1 - indices, indices)
        return self.tensors[indices], self.labels[indices].masked_fill(padding, PADDING)
