"""Order and augmentation as functions of seed, epoch and index, so that a run can be repeated and resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from graticule.data.transforms import Transform

Key = tuple[int, int]


class EpochSampler(Sampler[Key]):
    """Yields (epoch, index) for every image once, in an order that is a function of seed and epoch.

    The epoch travels with the index, and so reaches workers that live longer than an epoch.
    """

    def __init__(self, length: int, seed: int, shuffle: bool = True) -> None:
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one; Lightning calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Key]:
        order: Sequence[int] = range(self.length)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.length).tolist()
        return ((self.epoch, index) for index in order)


class SeededImages(Dataset[tuple[Tensor, int]]):
    """Transformed images, where the randomness of one is a function of (seed, epoch, index) alone.

    The same images come whatever the number of workers, and the randomness of the process is left as it was.
    """

    def __init__(self, images: Any, transform: Transform, seed: int) -> None:
        self.images = images
        self.transform = transform
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        epoch, index = key
        image, label = self.images[index]
        seed = int(np.random.SeedSequence([self.seed, epoch, index]).generate_state(1)[0])
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)  # of the CPU alone: a GPU has its own affairs
            return self.transform(image), label
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])


class TransformedImages(Dataset[tuple[Tensor, int]]):
    """Transformed images without randomness, for evaluation."""

    def __init__(self, images: Any, transform: Transform) -> None:
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[index]
        return self.transform(image), label


class TensorImages(Dataset[tuple[Tensor, Tensor]]):
    """Small images transformed once and held as one tensor (n, C, H, W); a whole batch is one indexing.

    Keys are indices, or the (epoch, index) of `EpochSampler`.
    """

    def __init__(self, images: Any, transform: Transform) -> None:
        self.tensors = torch.stack([transform(image) for image, _ in (images[i] for i in range(len(images)))])
        self.labels = torch.tensor([images[i][1] for i in range(len(images))])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: int | Key) -> tuple[Tensor, Tensor]:
        index = key[1] if isinstance(key, tuple) else key
        return self.tensors[index], self.labels[index]

    def __getitems__(self, keys: Sequence[int] | Sequence[Key]) -> tuple[Tensor, Tensor]:
        """Return the images (B, C, H, W) and labels (B,) of a whole batch."""
        indices = torch.tensor([key[1] if isinstance(key, tuple) else key for key in keys])
        return self.tensors[indices], self.labels[indices]
