"""Small images in memory, cropped and flipped by whole batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from graticule.data.augmentation import Augmentation
from graticule.data.images import DatasetInfo
from graticule.data.sampling import Key
from graticule.data.transformed import TensorImages
from graticule.data.transforms import Transform


class ShiftedImages(Dataset[tuple[Tensor, Tensor]]):
    """Random crops with padding and random flips of images in one tensor, without a loop over images.

    The draws for an image are a function of seed and key, whatever batch it is in. They differ from those of
    `SeededImages`, but have the same distribution.

    Args:
        images: pairs of an image and a label.
        transform: the transform of evaluation, which resizes and normalizes an image.
        augmentation: `random_crop_padding` and `hflip`, and nothing else; see `shifts_only`.
        info: mean and std; the padding is black, like the border of the images.
        seed: seed of the draws.
    """

    def __init__(
        self, images: Any, transform: Transform, augmentation: Augmentation, info: DatasetInfo, seed: int
    ) -> None:
        held = TensorImages(images, transform)
        self.labels = held.labels
        self.size = held.tensors.shape[-2:]
        self.padding = augmentation.random_crop_padding
        self.hflip = augmentation.hflip
        self.seed = seed
        mean, std = (torch.tensor(values)[:, None, None] for values in (info.mean, info.std))
        # black is 0 before normalization
        self.padded = (F.pad(held.tensors * std + mean, [self.padding] * 4) - mean) / std
        self._drawn: tuple[tuple[int, int], np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([key])
        return images[0], labels[0]

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor]:
        """Return the images (B, C, H, W) and labels (B,) of a whole batch; its keys are of one epoch."""
        indices = np.array([key[1] for key in keys])
        repeats = np.array([key[2] if len(key) > 2 else 0 for key in keys])
        drawn = np.empty((len(keys), 3))
        for repeat in np.unique(repeats):
            chosen = repeats == repeat
            drawn[chosen] = self._draw(keys[0][0], int(repeat))[indices[chosen]]
        offsets = torch.from_numpy((drawn[:, :2] * (2 * self.padding + 1)).astype(np.int64))  # (B, 2), in pixels
        height, width = self.size
        rows = offsets[:, :1] + torch.arange(height)
        columns = torch.arange(width).expand(len(keys), -1)
        flipped = torch.from_numpy(drawn[:, 2] < self.hflip)
        columns = offsets[:, 1:] + torch.where(flipped[:, None], columns.flip(1), columns)
        which = torch.from_numpy(indices)
        images = self.padded[which[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # (B, H, W, C)
        return images.permute(0, 3, 1, 2).contiguous(), self.labels[which]

    def _draw(self, epoch: int, repeat: int) -> np.ndarray:
        """Return three numbers in [0, 1) per image, a function of seed, epoch and repeat."""
        if self._drawn is None or self._drawn[0] != (epoch, repeat):
            numbers = np.random.default_rng([self.seed, epoch, repeat, 1]).random((len(self), 3))
            self._drawn = ((epoch, repeat), numbers)
        return self._drawn[1]


def shifts_only(augmentation: Augmentation) -> bool:
    """Return whether an augmentation consists of crops with padding and flips only."""
    rest = (augmentation.scale, augmentation.color_jitter, augmentation.rand_augment, augmentation.erasing)
    return augmentation.random and not any(rest)
