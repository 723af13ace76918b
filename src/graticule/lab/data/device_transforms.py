"""The augmentation of a recipe on the device of the images, for data sets that fit in its memory.

It has the steps of timm's transforms of single images, in the same order and with the same distributions: a crop by
area, a flip, RandAugment, and random erasing. All images of an epoch are augmented when its first batch
is made, those with the same drawn operation together, so that the device has few, large kernels. benchmarks/images.py
measures its speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import torch
from timm.data.auto_augment import RandAugment
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from graticule.lab.data.augmentation import Augmentation, named_augmentation
from graticule.lab.data.image_operations import PIXEL_OPERATIONS, affine, crop
from graticule.lab.data.images import DatasetInfo
from graticule.lab.data.sampling import BatchIndices
from graticule.lab.data.transforms import TensorImages, byte_values

#: Values of the images that are augmented at once, with about two gigabytes of intermediate results.
_AT_ONCE = 1 << 25
#: Attempts to draw a rectangle that fits into an image, as in timm and torchvision.
_ATTEMPTS = 10
#: Separates these draws from the draws of the order of images.
_DRAWS = 0xDE71CE
#: Normal values, a part of which replaces the pixels of an erased rectangle.
_NOISE = 1 << 20
#: Names of interpolations -> whether they are bicubic.
_CUBIC = {"bilinear": False, "bicubic": True}


def _affine(*entries: Any) -> np.ndarray:
    return np.stack(np.broadcast_arrays(*entries), 1).astype(np.float64)


def _rotation(degrees: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return the matrix of a rotation around the center, rounded as Pillow does."""
    angle = -np.radians(degrees % 360)
    cosine, sine, y, x = np.cos(angle).round(15), np.sin(angle).round(15), size[0] / 2, size[1] / 2
    return _affine(cosine, sine, -x * cosine - y * sine + x, -sine, cosine, x * sine - y * cosine + y)


#: timm's names of the geometric operations -> their matrices (n, 6), from arguments (n,) and (height, width).
MATRICES: dict[str, Callable[[np.ndarray, tuple[int, int]], np.ndarray]] = {
    "Rotate": _rotation,
    "ShearX": lambda factor, size: _affine(1, factor, 0, 0, 1, 0),
    "ShearY": lambda factor, size: _affine(1, 0, 0, factor, 1, 0),
    "TranslateXRel": lambda share, size: _affine(1, 0, share * size[1], 0, 1, 0),
    "TranslateYRel": lambda share, size: _affine(1, 0, 0, 0, 1, share * size[0]),
}
_ENHANCED = ("Color", "Contrast", "Brightness", "Sharpness")
#: timm's names -> the argument of an operation, from levels (n,) in [0, 1] and signs (n,), as in timm.
ARGUMENTS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    **dict.fromkeys(("AutoContrast", "Equalize", "Invert"), lambda level, sign: level),
    "Posterize": lambda level, sign: (4 * level).astype(int),
    "PosterizeIncreasing": lambda level, sign: 4 - (4 * level).astype(int),
    "Solarize": lambda level, sign: (256 * level).astype(int).clip(max=256),
    "SolarizeIncreasing": lambda level, sign: 256 - (256 * level).astype(int).clip(max=256),
    "SolarizeAdd": lambda level, sign: (110 * level).astype(int).clip(max=128),
    **dict.fromkeys(_ENHANCED, lambda level, sign: 1.8 * level + 0.1),
    **{f"{name}Increasing": lambda level, sign: (1 + sign * 0.9 * level).clip(min=0.1) for name in _ENHANCED},
    "Rotate": lambda level, sign: 30 * sign * level,
    **dict.fromkeys(("ShearX", "ShearY"), lambda level, sign: 0.3 * sign * level),
    **dict.fromkeys(("TranslateXRel", "TranslateYRel"), lambda level, sign: 0.45 * sign * level),
}


def augments_on_device(info: DatasetInfo, augmentation: Augmentation) -> bool:
    """Return whether `AugmentedImages` has all steps; Pillow has the others, such as color jitter."""
    operations = _rand_augment(info, (32, 32), augmentation)
    named = operations is None or (isinstance(operations, RandAugment) and operations.choice_weights is None)
    if augmentation.scale is None or info.size is None or not named or (augmentation.color_jitter and not operations):
        return False
    fits = augmentation.ratio[0] <= info.size[1] / info.size[0] <= augmentation.ratio[1]  # else a crop may never fit
    filters = augmentation.random_interpolation or augmentation.interpolation in _CUBIC
    return fits and filters and all(op.name in ARGUMENTS for op in (operations.ops if operations else ()))


def _rand_augment(info: DatasetInfo, size: tuple[int, int], augmentation: Augmentation) -> Any:
    name = augmentation.rand_augment
    return None if name is None else named_augmentation(name, info.mean, size)


class AugmentedImages(TensorImages):
    """Images of one tensor that are augmented on their device, all of an epoch at once.

    The draws for an image are a function of seed, epoch and index, whatever the device. They differ from the
    draws of `ImageExamples`, and have the same distribution. The noise of erased pixels is a part of a table of a
    million normal values, which begins at a random place.

    Args:
        pixels: (n, C, H, W), uint8.
        labels: (n,).
        info: mean and standard deviation.
        size: (height, width) of the results.
        augmentation: one that `augments_on_device`.
        seed: seed of the draws.
    """

    def __init__(
        self,
        pixels: Tensor,
        labels: np.ndarray,
        info: DatasetInfo,
        size: tuple[int, int],
        augmentation: Augmentation,
        seed: int,
    ) -> None:
        super().__init__(pixels, labels, byte_values(info))
        self.size, self.augmentation, self.seed = size, augmentation, seed
        self.operations: RandAugment | None = _rand_augment(info, size, augmentation)
        self.fill = torch.tensor([min(255, round(255 * mean)) for mean in info.mean], dtype=torch.uint8)
        self.cubic = None if augmentation.random_interpolation else _CUBIC[augmentation.interpolation]
        self.erasing = RandomErasing(augmentation.erasing, mode="pixel")
        self._noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(seed))
        self._epoch = -1

    def __getitem__(self, batch: BatchIndices) -> tuple[Tensor, Tensor]:
        if (epoch := batch.epoch or 0) != self._epoch:
            self._epoch, (self._augmented, self._erased) = epoch, self._of_epoch(epoch)
        indices = self._send(batch.indices)
        return self._erase(self._normalize(self._augmented[indices]), self._erased[batch.indices]), self.labels[indices]

    def to(self, device: torch.device) -> Self:
        self.fill, self._noise = self.fill.to(device), self._noise.to(device)
        return super().to(device)

    def _of_epoch(self, epoch: int) -> tuple[Tensor, np.ndarray]:
        """Return all images of an epoch, (n, C, height, width), uint8, and the erased rectangle of each, (n, 5)."""
        generator = np.random.default_rng([self.seed, epoch, _DRAWS])
        draws = iter(generator.random((4 + 2 * _ATTEMPTS, len(self))))
        erased = np.concatenate([self.draw_erased(draws), _integers(next(draws), _NOISE)[:, None]], 1)
        columns = generator.random((24 + 6 * (self.operations.num_layers if self.operations else 0), len(self)))
        count = max(1, _AT_ONCE // self.tensors[0].numel())
        parts = [slice(start, start + count) for start in range(0, len(self), count)]
        return torch.cat([self._augment(self.tensors[part], iter(columns[:, part])) for part in parts]), erased

    def _augment(self, images: Tensor, draws: Iterator[np.ndarray]) -> Tensor:
        """Crop, flip and change images (n, C, H, W), uint8, by uniform draws (n,)."""
        boxes, cubic = self.draw_boxes(draws, (images.shape[2], images.shape[3])), self._draw_cubic(draws)
        flips = next(draws) < self.augmentation.hflip
        sent = [torch.from_numpy(x).to(images.device) for x in (boxes, cubic, flips[:, None, None, None])]
        images = crop(images, sent[0], sent[1], self.size)
        images = torch.where(sent[2], images.flip(3), images)
        for layer in self.draw_layers(draws):
            self._change(images, *layer)
        return images

    def _draw_cubic(self, draws: Iterator[np.ndarray]) -> np.ndarray:
        """Return whether each interpolation is bicubic."""
        uniform = next(draws)
        return uniform < 0.5 if self.cubic is None else np.full(len(uniform), self.cubic)

    def draw_boxes(self, draws: Iterator[np.ndarray], size: tuple[int, int]) -> np.ndarray:
        """Draw the crops of images of `size`: (n, 4), top, left, height and width."""
        assert self.augmentation.scale is not None
        width, height, fits = _rectangles(draws, size[::-1], self.augmentation.scale, self.augmentation.ratio, 0)
        height, width = np.where(fits, height, size[0]), np.where(fits, width, size[1])
        places = [_integers(next(draws), room + 1) for room in (size[0] - height, size[1] - width)]
        return np.stack([*places, height, width], 1)

    def draw_layers(self, draws: Iterator[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Draw each layer of RandAugment: the index of the operation or -1, its argument, and whether it is bicubic."""
        for _ in range(self.operations.num_layers if self.operations else 0):
            assert self.operations is not None
            index = _integers(next(draws), len(self.operations.ops))
            chance, radius, angle, sign = (next(draws) for _ in range(4))
            normal, argument = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle), np.zeros(len(index))
            for number, op in enumerate(self.operations.ops):
                uniform = op.magnitude_std == math.inf
                magnitude = op.magnitude * radius if uniform else op.magnitude + op.magnitude_std * normal
                level = magnitude.clip(0, op.magnitude_max or 10.0) / 10.0
                values = ARGUMENTS[op.name](level, np.where(sign > 0.5, -1.0, 1.0))
                argument = np.where(index == number, values, argument)
            probability = np.array([op.prob for op in self.operations.ops])[index]
            yield np.where(chance < probability, index, -1), argument, self._draw_cubic(draws)

    def draw_erased(self, draws: Iterator[np.ndarray]) -> np.ndarray:
        """Draw the erased rectangles: (n, 4), top, left, height and width, all 0 if there is none."""
        erasing, chance = self.erasing, next(draws)
        low, high = map(math.exp, erasing.log_aspect_ratio)
        *sides, fits = _rectangles(draws, self.size, (erasing.min_area, erasing.max_area), (low, high), 1)
        places = [_integers(next(draws), room - side + 1) for room, side in zip(self.size, sides, strict=True)]
        return np.stack([*places, *sides], 1) * (fits & (chance < erasing.probability))[:, None]

    def _change(self, images: Tensor, index: np.ndarray, argument: np.ndarray, cubic: np.ndarray) -> None:
        """Apply the operations of a layer in place, each to all of its images, and the geometric ones together."""
        matrices = np.zeros((len(images), 6))
        for number, op in enumerate(self.operations.ops if self.operations else ()):
            chosen = np.flatnonzero(index == number)
            if op.name in MATRICES:
                matrices[chosen] = MATRICES[op.name](argument[chosen], self.size)
            elif len(chosen):
                rows, values = (torch.from_numpy(x).to(images.device) for x in (chosen, argument[chosen]))
                images[rows] = PIXEL_OPERATIONS[op.name.removesuffix("Increasing")](images[rows], values)
        if len(chosen := np.flatnonzero(matrices.any(1))):
            arguments = (torch.from_numpy(x).to(images.device) for x in (chosen, matrices[chosen], cubic[chosen]))
            rows, moved, curved = arguments
            images[rows] = affine(images[rows], moved, curved, self.fill)

    def _erase(self, images: Tensor, erased: np.ndarray) -> Tensor:
        """Replace the drawn rectangles of normalized images by normal values, different for each pixel; in place."""
        chosen = np.flatnonzero(erased[:, 2])
        if len(chosen):
            rows, *sides, first = self._send(np.vstack([chosen, erased[chosen].T]))
            top, left, height, width = (side[:, None, None, None] for side in sides)
            y = torch.arange(images.shape[2], device=images.device)[:, None]
            x = torch.arange(images.shape[3], device=images.device)
            within = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
            values = torch.arange(images[0].numel(), device=images.device).view(images.shape[1:])
            noise = self._noise[(first[:, None, None, None] + values) % _NOISE]
            images[rows] = torch.where(within, noise, images[rows])
        return images


def _integers(uniform: np.ndarray, count: Any) -> np.ndarray:
    return np.asarray(uniform * count, dtype=np.int64)


def _rectangles(
    draws: Iterator[np.ndarray],
    size: tuple[int, int],
    area: tuple[float, float],
    ratio: tuple[float, float],
    margin: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw sides of rectangles with a share `area` of `size` and a log-uniform ratio: the first attempt that fits.

    Returns both sides, (n,) each, and whether one of the attempts is at most `size` - `margin`.
    """
    shares, logs = (np.stack([next(draws) for _ in range(_ATTEMPTS)]) for _ in range(2))
    pixels = (area[0] + (area[1] - area[0]) * shares) * math.prod(size)
    ratios = np.exp(math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * logs)
    sides = np.sqrt(pixels * ratios).round().astype(np.int64), np.sqrt(pixels / ratios).round().astype(np.int64)
    fits = (sides[0] <= size[0] - margin) & (sides[1] <= size[1] - margin)
    first, images = fits.argmax(0), np.arange(fits.shape[1])
    return sides[0][first, images], sides[1][first, images], np.asarray(fits.any(0))
