"""Transforms of images together with their boxes, masks and classes, on torchvision's transforms v2."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from graticule.lab.data.augmentation import DenseAugmentation, fitted_sizes
from graticule.lab.data.dense import IGNORED, Target
from graticule.lab.data.images import DatasetInfo

#: The entries of a target that have one value per object.
_PER_OBJECT = ("boxes", "labels", "masks", "iscrowd", "area")
_MOST_CROPS = 10
#: DETR's crop before the resize: shorter sides of the image, its longest side, and the range of the crop's sides.
_PART_SIZES, _PART_SIDES = ((400, 1333), (500, 1333), (600, 1333)), (384, 600)


def fit_size(size: tuple[int, int], within: tuple[int, int], scale: float = 1.0) -> tuple[int, int]:
    """Return the largest (height, width) of the aspect ratio of `size` with sides of at most `within`, times `scale`.

    >>> fit_size((480, 640), (800, 1333)), fit_size((640, 480), (800, 1333)), fit_size((100, 900), (800, 1333))
    ((800, 1067), (1067, 800), (148, 1333))

    Args:
        size: (height, width) in pixels.
        within: the largest shorter and longer side.
        scale: a factor.
    """
    factor = scale * min(within[0] / min(size), within[1] / max(size))
    height, width = (max(1, math.floor(side * factor + 0.5)) for side in size)
    return height, width


def resize_example(image: Tensor, target: Target, size: tuple[int, int]) -> tuple[Tensor, Target]:
    """Resize an image (bilinear) and its target (masks and classes: nearest) to (height, width)."""
    return _change(image, target, lambda value: F.resize(value, list(size)))


def flip(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """Flip an image and its target horizontally."""
    return _change(image, target, F.horizontal_flip)


def crop_example(image: Tensor, target: Target, box: tuple[int, int, int, int]) -> tuple[Tensor, Target]:
    """Crop an image and its target to (top, left, height, width); objects of which nothing is left are dropped.

    Boxes are clipped at the border of the crop.
    """
    image, target = _change(image, target, lambda value: F.crop(value, *box))
    if "boxes" in target:
        boxes = target["boxes"] = F.clamp_bounding_boxes(target["boxes"])
        visible = (boxes[:, 2:] > boxes[:, :2]).all(-1)
        if "masks" in target:
            visible = visible & target["masks"].bool().any(-1).any(-1)
        for name in target.keys() & set(_PER_OBJECT):
            target[name] = tv_tensors.wrap(target[name][visible], like=target[name])
    return image, target


def pad(image: Tensor, target: Target, size: tuple[int, int]) -> tuple[Tensor, Target]:
    """Pad an image with zeros, at the bottom and on the right, to at least (height, width); classes with `IGNORED`."""
    margins = [0, 0, *(max(0, wanted - has) for wanted, has in zip(size[::-1], image.shape[:-3:-1], strict=True))]
    image, changed = _change(image, target, lambda value: F.pad(value, margins))
    return image, {**changed, "classes": F.pad(target["classes"], margins, fill=IGNORED)}


def _change(image: Tensor, target: Target, change: Callable[[Any], Any]) -> tuple[Tensor, Target]:
    """Apply a function to an image and to the boxes, masks and classes of its target."""
    changed = {name: change(value) for name, value in target.items() if isinstance(value, tv_tensors.TVTensor)}
    return change(image), {**target, **changed}


def distorted(image: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue, each with probability 1/2; return float32 in [0, 1].

    These are the changes of mmsegmentation's PhotoMetricDistortion, without its rounding to 8 bits after each: up to
    32 of 255 is added; all channels are multiplied by .5 to 1.5 (contrast), before or after the other two; the
    saturation (HSV) is multiplied by .5 to 1.5; the hue moves by up to a tenth of the circle.

    Args:
        image: (3, height, width), uint8, or float32 in [0, 1].
    """
    x = F.to_dtype(image, torch.float32, scale=True)
    early = _uniform() < 0.5

    def contrast(x: Tensor) -> Tensor:
        return (x * (0.5 + _uniform())).clamp(0, 1) if _uniform() < 0.5 else x

    if _uniform() < 0.5:
        x = (x + (2 * _uniform() - 1) * 32 / 255).clamp(0, 1)
    x = contrast(x) if early else x
    if _uniform() < 0.5:
        high, low = x.amax(0), x.amin(0)
        most = high / (high - low)  # a saturation of 1; NaN or infinite for gray pixels, which do not change
        x = torch.where(high > low, high - (high - x) * most.clamp(max=0.5 + _uniform()), x)
    if _uniform() < 0.5:
        x = F.adjust_hue(x, 0.2 * _uniform() - 0.1)
    return x if early else contrast(x)


class TrainingTransform:
    """The transform of training: the changes of `DenseAugmentation` in their order, then normalization and padding.

    Args:
        fit: the largest shorter and longer side after the resize.
        augmentation: the random changes.
        info: mean and std, by which images are normalized; None leaves them in [0, 1], for models that normalize.
    """

    def __init__(self, fit: tuple[int, int], augmentation: DenseAugmentation, info: DatasetInfo | None = None) -> None:
        self.info = info
        self.augmentation = augmentation
        self.sizes = fitted_sizes(augmentation.sizes, "augmentation.sizes") or [fit]

    def __call__(self, image: Tensor, target: Target) -> tuple[Tensor, Target]:
        """Return an image, float32, and its target."""
        augmentation = self.augmentation
        if augmentation.part and _uniform() < augmentation.part:
            image, target = resize_example(image, target, fit_size(_size(image), _PART_SIZES[_below(len(_PART_SIZES))]))
            ranges = [[min(limit, side) for limit in _PART_SIDES] for side in _size(image)]
            sides = [low + _below(high - low + 1) for low, high in ranges]
            image, target = crop_example(image, target, self._box(image, sides))
        low, high = augmentation.scale or (1.0, 1.0)
        scale = low + (high - low) * _uniform() if high > low else low
        size = fit_size(_size(image), self.sizes[_below(len(self.sizes))], scale)
        image, target = resize_example(image, target, size)
        if augmentation.crop is not None:
            image, target = self._cropped(image, target, augmentation.crop)
        if augmentation.hflip and _uniform() < augmentation.hflip:
            image, target = flip(image, target)
        if augmentation.photometric:
            image = distorted(image)
        image = normalized(image, self.info)
        if augmentation.crop and "classes" in target:
            image, target = pad(image, target, augmentation.crop)
        return image, target

    def _cropped(self, image: Tensor, target: Target, size: tuple[int, int]) -> tuple[Tensor, Target]:
        box = self._box(image, size)
        if "classes" in target and self.augmentation.crop_majority < 1:
            for _ in range(_MOST_CROPS):
                classes = F.crop(target["classes"], *box).as_subclass(Tensor).flatten()
                counts = torch.bincount(classes[classes != IGNORED].long())
                if (counts > 0).sum() > 1 and counts.max() < self.augmentation.crop_majority * counts.sum():
                    break
                box = self._box(image, size)
        return crop_example(image, target, box)

    def _box(self, image: Tensor, size: Sequence[int]) -> tuple[int, int, int, int]:
        """Draw (top, left, height, width) of a crop of at most `size`."""
        height, width = map(min, size, _size(image))
        return _below(image.shape[-2] - height + 1), _below(image.shape[-1] - width + 1), height, width


class EvaluationTransform:
    """The transform of evaluation: the resize and the normalization. The target is still of the original image.

    The target gets the `size` of the original, (height, width), to which predictions are resized.

    Args:
        fit: the largest shorter and longer side.
        info: mean and std, by which images are normalized; None leaves them in [0, 1], for models that normalize.
    """

    def __init__(self, fit: tuple[int, int], info: DatasetInfo | None = None) -> None:
        self.info = info
        self.fit = fit

    def __call__(self, image: Tensor, target: Target) -> tuple[Tensor, Target]:
        """Return an image, float32, and the target."""
        small, _ = resize_example(image, {}, fit_size(_size(image), self.fit))
        return normalized(small, self.info), {**target, "size": _size(image)}


def normalized(image: Tensor, info: DatasetInfo | None) -> Tensor:
    """Return a uint8 image as float32 in [0, 1], normalized by the mean and std of `info` if given."""
    scaled: Tensor = F.to_dtype(image, torch.float32, scale=True)
    return scaled if info is None else F.normalize(scaled, list(info.mean), list(info.std))


def _size(image: Tensor) -> tuple[int, int]:
    return int(image.shape[-2]), int(image.shape[-1])


def _uniform() -> float:
    return float(torch.rand(()))


def _below(count: int) -> int:
    return int(torch.randint(count, ()))


def plain(value: object) -> Any:
    """Return a tensor of torchvision's kinds as a plain tensor, and anything else unchanged."""
    return value.as_subclass(Tensor) if isinstance(value, tv_tensors.TVTensor) else value
