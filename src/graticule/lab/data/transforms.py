"""Transforms from images to tensors: timm's, configured for large and for small images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torchvision import transforms as T
from torchvision.transforms import InterpolationMode

from graticule.lab.data.augmentation import Augmentation, named_augmentation
from graticule.lab.data.images import DatasetInfo

Transform = Callable[[Image.Image], Tensor]
_INTERPOLATION = {mode.value: mode for mode in InterpolationMode}


def evaluation_transform(info: DatasetInfo, size: tuple[int, int], augmentation: Augmentation) -> Transform:
    """Resize and crop the center to `size` = (height, width), then normalize; (C, height, width), float32.

    Large images are transformed as in DeiT: the shorter side is resized to size / crop_pct, then cropped. For a data
    set of images of one small native size, any image is resized to `size` without a crop.
    """
    if info.size is None:
        evaluation: Transform = create_transform(
            (info.channels, *size),
            interpolation=augmentation.interpolation,
            crop_pct=augmentation.crop_pct,
            mean=info.mean,
            std=info.std,
        )
        return evaluation
    resized: Transform = T.Compose([_resize(size, augmentation), T.ToTensor(), T.Normalize(info.mean, info.std)])
    return resized


def training_transform(info: DatasetInfo, size: tuple[int, int], augmentation: Augmentation) -> Transform:
    """Augment, resize to `size` = (height, width) and normalize; (C, height, width), float32.

    It draws from torch, Python and NumPy. Images of one small native size are cropped with padding
    (`random_crop_padding`) or by area (`scale`); large ones by area, (0.08, 1) by default. Without any augmentation it
    is the transform of evaluation.
    """
    if not augmentation.random:
        return evaluation_transform(info, size, augmentation)
    if augmentation.scale is not None or (info.size is None and not augmentation.random_crop_padding):
        training: Transform = create_transform(
            (info.channels, *size),
            is_training=True,
            scale=augmentation.scale or (0.08, 1.0),
            ratio=augmentation.ratio,
            hflip=augmentation.hflip,
            color_jitter=augmentation.color_jitter,
            auto_augment=augmentation.rand_augment,
            interpolation="random" if augmentation.random_interpolation else augmentation.interpolation,
            re_prob=augmentation.erasing,
            re_mode="pixel",
            mean=info.mean,
            std=info.std,
        )
        return training
    steps: list[Callable[[Any], Any]] = [_resize(size, augmentation)]
    if augmentation.random_crop_padding:
        steps.append(T.RandomCrop(size, padding=augmentation.random_crop_padding))
    if augmentation.hflip:
        steps.append(T.RandomHorizontalFlip(augmentation.hflip))
    if augmentation.rand_augment:
        steps.append(named_augmentation(augmentation.rand_augment, info.mean, size))
    elif augmentation.color_jitter:
        steps.append(T.ColorJitter(*[augmentation.color_jitter] * 3))
    steps += [T.ToTensor(), T.Normalize(info.mean, info.std)]
    if augmentation.erasing:
        steps.append(RandomErasing(augmentation.erasing, mode="pixel", device="cpu"))
    composed: Transform = T.Compose(steps)
    return composed


def _resize(size: tuple[int, int], augmentation: Augmentation) -> Callable[[Any], Any]:
    """Return the transform to `size`; it leaves images of this size as they are."""
    resize: Callable[[Any], Any] = T.Resize(size, _INTERPOLATION[augmentation.interpolation])
    return resize
