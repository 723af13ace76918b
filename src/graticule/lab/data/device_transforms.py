"""The augmentation of a recipe on the device of the images, for data sets that fit in its memory.

It has the steps of timm's transforms of single images, in the same order and with the same distributions: a crop by
area or with padding, a flip, RandAugment, and random erasing. All images of an epoch are augmented when its first batch
is made, those with the same drawn operation together, so that the device has few, large kernels. benchmarks/images.py
measures its speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from timm.data.auto_augment import RandAugment
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from graticule.lab.data.augmentation import Augmentation, named_augmentation
from graticule.lab.data.image_operations import PIXEL_OPERATIONS, affine, crop
from graticule.lab.data.images import DatasetInfo
from graticule.lab.data.sampling import BatchIndices, draw
from graticule.lab.data.transforms import TensorImages

#: Values of the images that are augmented at once, with about two gigabytes of intermediate results.
_AT_ONCE = 1 << 25
#: Attempts to draw a rectangle that fits into an image, as in timm and torchvision.
_ATTEMPTS = 10
#: Constants of SplitMix64 (Steele et al., 2014).
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _affine(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> np.ndarray:
    return np.stack(np.broadcast_arrays(a, b, c, d, e, f), 1).astype(np.float64)


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
#: timm's names -> the argument of an operation, from levels (n,) in [0, 1] and signs (n,), as in timm.
_ENHANCED = ("Color", "Contrast", "Brightness", "Sharpness")
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


def uniforms(numbers: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """Return `count` independent uniform values in [0, 1) for each of (n,) numbers below 2^62, as columns (n,)."""
    steps = np.arange(1, count + 1, dtype=np.uint64)[:, None] * np.uint64(_STEP)
    mixed = numbers.astype(np.uint64) + steps
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    return iter(((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53)


def normals(numbers: Tensor, count: int) -> Tensor:
    """Return `count` independent standard normal values for each of (n,) numbers, (n, count), by Box and Muller."""

    def shifted(value: Tensor, bits: int) -> Tensor:
        return (value >> bits) & ((1 << (64 - bits)) - 1)  # without the sign

    steps = torch.arange(1, count + 1, device=numbers.device) * (_STEP - 2**64)
    mixed = numbers[:, None] + steps
    mixed = (mixed ^ shifted(mixed, 30)) * (_FIRST - 2**64)
    mixed = (mixed ^ shifted(mixed, 27)) * (_SECOND - 2**64)
    mixed = mixed ^ shifted(mixed, 31)
    radius, angle = ((part.double() + 0.5) / 2**32 for part in (shifted(mixed, 32), mixed & 0xFFFFFFFF))
    return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()


@dataclass(frozen=True)
class Operation:
    """The drawn operation of a layer of RandAugment for each of (n,) images.

    index: the operation, or -1 for none.
    argument: of the operation.
    cubic: whether a geometric operation is bicubic instead of bilinear.
    """

    index: np.ndarray
    argument: np.ndarray
    cubic: np.ndarray


@dataclass(frozen=True)
class BatchAugmentation:
    """An augmentation whose steps can be made for many images at once; `batch_augmentation` builds it.

    size: (height, width) of the result.
    scale, ratio: of crops by area; without a scale the crop has `padding`.
    cubic: whether crops by area are bicubic; None for one of both at random.
    operations: timm's RandAugment, and the interpolation of its operations, as `cubic`.
    fill: the color beyond the images, (C,).
    erasing: timm's random erasing.
    """

    size: tuple[int, int]
    scale: tuple[float, float] | None
    ratio: tuple[float, float]
    padding: int
    hflip: float
    cubic: bool | None
    operations: RandAugment | None
    operations_cubic: bool | None
    fill: tuple[int, ...]
    erasing: RandomErasing

    def boxes(self, draws: Iterator[np.ndarray], size: tuple[int, int]) -> np.ndarray:
        """Draw the crops of images of `size`: (n, 4), top, left, height and width; they may exceed the images."""
        if self.scale is None:
            top, left = (_integers(next(draws), 2 * self.padding + 1) - self.padding for _ in range(2))
            return np.stack(np.broadcast_arrays(top, left, *self.size), 1)
        width, height, fits = _rectangles(draws, size[::-1], self.scale, self.ratio, 0)
        ratio = size[1] / size[0]  # without a fit, the largest central crop within the ratios
        central = (
            min(size[0], round(size[1] / max(self.ratio[0], min(ratio, self.ratio[1])))),
            min(size[1], round(size[0] * max(self.ratio[0], min(ratio, self.ratio[1])))),
        )
        height, width = np.where(fits, height, central[0]), np.where(fits, width, central[1])
        places = [
            np.where(fits, _integers(next(draws), room + 1), room // 2) for room in (size[0] - height, size[1] - width)
        ]
        return np.stack([*places, height, width], 1)

    def layers(self, draws: Iterator[np.ndarray]) -> Iterator[Operation]:
        """Draw the operations of RandAugment, layer by layer."""
        if self.operations is None:
            return
        for _ in range(self.operations.num_layers):
            index = _integers(next(draws), len(self.operations.ops))
            skipped, radius, angle, sign, filters = (next(draws) for _ in range(5))
            normal = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)
            argument = np.zeros(len(index))
            for number, op in enumerate(self.operations.ops):
                if op.magnitude_std == math.inf:
                    magnitude = op.magnitude * radius
                else:
                    magnitude = op.magnitude + op.magnitude_std * normal
                level = magnitude.clip(0, op.magnitude_max or 10.0) / 10.0
                drawn = ARGUMENTS[op.name](level, np.where(sign > 0.5, -1.0, 1.0))
                argument = np.where(index == number, drawn, argument)
            chances = np.array([op.prob for op in self.operations.ops])
            yield Operation(
                np.where(skipped < chances[index], index, -1), argument, _cubic(self.operations_cubic, filters)
            )

    def erased(self, draws: Iterator[np.ndarray]) -> np.ndarray:
        """Draw the erased rectangles: (n, 4), top, left, height and width, of area 0 if there is none."""
        erasing, chance = self.erasing, next(draws)
        area, ends = (erasing.min_area, erasing.max_area), [math.exp(end) for end in erasing.log_aspect_ratio]
        height, width, fits = _rectangles(draws, self.size, area, (ends[0], ends[1]), 1)
        places = [
            _integers(next(draws), size - side + 1) for size, side in zip(self.size, (height, width), strict=True)
        ]
        return np.stack([*places, height, width], 1) * (fits & (chance < erasing.probability))[:, None]

    def __call__(self, images: Tensor, numbers: np.ndarray) -> Tensor:
        """Augment images (n, C, H, W), uint8, by the draws of their numbers, without the erasing."""
        draws, device = (
            uniforms(numbers, 26 + 6 * (self.operations.num_layers if self.operations else 0)),
            images.device,
        )
        size = images.shape[2], images.shape[3]
        boxes = torch.from_numpy(self.boxes(draws, size)).to(device)
        filters, flips = next(draws), next(draws) < self.hflip
        images = crop(images, boxes, torch.from_numpy(_cubic(self.cubic, filters)).to(device), self.size)
        images = torch.where(torch.from_numpy(flips).to(device)[:, None, None, None], images.flip(3), images)
        for operation in self.layers(draws):
            self._apply(images, operation)
        return images

    def _apply(self, images: Tensor, operation: Operation) -> None:
        """Apply the operations of a layer, in place, those of each kind at once and all geometric ones together."""
        assert self.operations is not None
        matrices = np.zeros((len(images), 6))
        geometric = np.zeros(len(images), dtype=bool)
        for number, op in enumerate(self.operations.ops):
            chosen = np.flatnonzero(operation.index == number)
            if op.name in MATRICES:
                matrices[chosen] = MATRICES[op.name](operation.argument[chosen], self.size)
                geometric[chosen] = True
            elif len(chosen):
                rows, arguments = (
                    torch.from_numpy(x[chosen]).to(images.device) for x in (np.arange(len(images)), operation.argument)
                )
                images[rows] = PIXEL_OPERATIONS[op.name.removesuffix("Increasing")](images[rows], arguments)
        if len(chosen := np.flatnonzero(geometric)):
            rows, moved, cubic = (
                torch.from_numpy(x).to(images.device) for x in (chosen, matrices[chosen], operation.cubic[chosen])
            )
            fill = torch.tensor(self.fill, dtype=torch.uint8, device=images.device)
            images[rows] = affine(images[rows], moved, cubic, fill)


def _integers(uniform: np.ndarray, count: Any) -> np.ndarray:
    """Return integers from 0 to below `count`."""
    return np.asarray(uniform * count, dtype=np.int64)


def _cubic(choice: bool | None, uniform: np.ndarray) -> np.ndarray:
    """Return whether each interpolation is bicubic: as chosen, or at random."""
    return uniform < 0.5 if choice is None else np.full(len(uniform), choice)


def _rectangles(
    draws: Iterator[np.ndarray],
    size: tuple[int, int],
    area: tuple[float, float],
    ratio: tuple[float, float],
    margin: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw sides of rectangles of a share `area` of `size` and a ratio of the sides, log-uniform: the first that fits.

    Returns both sides, (n,) each, and whether one of the attempts is at most `size` - `margin`.
    """
    shares, logs = (np.stack([next(draws) for _ in range(_ATTEMPTS)]) for _ in range(2))
    pixels = (area[0] + (area[1] - area[0]) * shares) * math.prod(size)
    ratios = np.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * logs)
    sides = np.sqrt(pixels * ratios).round().astype(np.int64), np.sqrt(pixels / ratios).round().astype(np.int64)
    fits = (sides[0] <= size[0] - margin) & (sides[1] <= size[1] - margin)
    first, images = fits.argmax(0), np.arange(fits.shape[1])
    return sides[0][first, images], sides[1][first, images], np.asarray(fits.any(0))


def batch_augmentation(
    info: DatasetInfo, size: tuple[int, int], augmentation: Augmentation
) -> BatchAugmentation | None:
    """Return an augmentation for batches; None if one of its steps is not among those here, such as color jitter."""
    by_area, named = augmentation.scale is not None, augmentation.rand_augment
    interpolation = "random" if augmentation.random_interpolation else augmentation.interpolation
    filters: dict[str, bool | None] = {"bilinear": False, "bicubic": True, "random": None}
    operations: Any = None if named is None else named_augmentation(named, info.mean, size)
    if operations is not None and not (
        isinstance(operations, RandAugment)
        and operations.choice_weights is None
        and all(op.name in ARGUMENTS for op in operations.ops)
    ):
        return None
    if (by_area and interpolation not in filters) or (augmentation.color_jitter and operations is None):
        return None
    return BatchAugmentation(
        size=size,
        scale=augmentation.scale,
        ratio=augmentation.ratio,
        padding=augmentation.random_crop_padding,
        hflip=augmentation.hflip,
        cubic=filters.get(interpolation),
        operations=operations,
        operations_cubic=filters[interpolation] if by_area else None,
        fill=tuple(min(255, round(255 * mean)) for mean in info.mean),
        erasing=RandomErasing(augmentation.erasing, mode="pixel"),
    )


class AugmentedImages(TensorImages):
    """Images of one tensor that are augmented on their device, all of an epoch at once.

    The draws for an image are a function of seed, epoch, index and repeat, whatever the device. They differ from those
    of `ImageExamples`, and have the same distribution.

    Args:
        pixels: (n, C, H, W), uint8.
        labels: (n,).
        values: the value of each byte in each channel, (C, 256).
        augmentation: the steps.
        seed: seed of the draws.
    """

    def __init__(
        self, pixels: Tensor, labels: np.ndarray, values: Tensor, augmentation: BatchAugmentation, seed: int
    ) -> None:
        super().__init__(pixels, labels, values)
        self.augmentation, self.seed = augmentation, seed
        self._epoch: int | None = None
        self._augmented: dict[int, Tensor] = {}  # by repeat

    def __getitem__(self, batch: BatchIndices) -> tuple[Tensor, Tensor]:
        indices = self._send(batch.indices)
        repeats = np.broadcast_to(batch.repeats, batch.indices.shape)
        pixels = self._of_epoch(batch.epoch or 0, int(repeats[0]))[indices]
        for repeat in np.unique(repeats)[1:].tolist():
            rows = self._send(np.flatnonzero(repeats == repeat))
            pixels[rows] = self._of_epoch(batch.epoch or 0, repeat)[indices[rows]]
        images = self._normalize(pixels)
        if self.augmentation.erasing.probability:
            images = self._erase(images, draw(batch, self.seed, len(self)))
        return images, self.labels[indices]

    def _of_epoch(self, epoch: int, repeat: int) -> Tensor:
        """Return all images in a repeat of an epoch, augmented without the erasing: (n, C, height, width)."""
        if epoch != self._epoch:
            self._epoch, self._augmented = epoch, {}
        if repeat not in self._augmented:
            numbers = draw(BatchIndices(np.arange(len(self)), epoch, repeat), self.seed, len(self))
            count = max(1, _AT_ONCE // self.tensors[0].numel())
            parts = range(0, len(self), count)
            self._augmented[repeat] = torch.cat(
                [self.augmentation(self.tensors[at : at + count], numbers[at : at + count]) for at in parts]
            )
        return self._augmented[repeat]

    def _erase(self, images: Tensor, numbers: np.ndarray) -> Tensor:
        """Replace the drawn rectangles of normalized images by normal values, different for each pixel."""
        boxes = self.augmentation.erased(uniforms(numbers ^ (1 << 61), 3 + 2 * _ATTEMPTS))  # apart from other steps
        chosen = np.flatnonzero(boxes[:, 2])
        rows, seeds, *sides = self._send(np.vstack([chosen, numbers[chosen] ^ (1 << 60), boxes[chosen].T]))
        top, left, height, width = (side[:, None, None, None] for side in sides)
        y = torch.arange(images.shape[2], device=images.device)[:, None]
        x = torch.arange(images.shape[3], device=images.device)
        within = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
        noise = normals(seeds, images[0].numel()).view(-1, *images.shape[1:])
        images[rows] = torch.where(within, noise.to(images.dtype), images[rows])
        return images
