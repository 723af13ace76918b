"""From an image to a tensor: timm's transforms, set for large and for small images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from PIL import Image
from pydantic import Field
from timm.data import create_transform
from timm.data.auto_augment import augment_and_mix_transform, auto_augment_transform, rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision import transforms as T
from torchvision.transforms import InterpolationMode

from graticule.data.images import DatasetInfo
from graticule.typed import Flag, NotNegative, Positive, Share, ShareAboveZero, Whole, check_fields

Transform = Callable[[Image.Image], Tensor]
_INTERPOLATION = {mode.value: mode for mode in InterpolationMode}


@dataclass(frozen=True)
class Augmentation:
    """What happens to a training image; all off by default. `crop_pct` is for evaluation too."""

    random_crop_padding: Annotated[Whole, Field(le=4096)] = 0
    """pixels of padding before a random crop, for small images"""
    scale: tuple[ShareAboveZero, ShareAboveZero] | None = None
    """range of the area of a random resized crop, as a share of the image"""
    hflip: Share = 0.0
    """probability of a horizontal flip"""
    color_jitter: NotNegative = 0.0
    """strength of brightness, contrast and saturation jitter, where there is no RandAugment"""
    rand_augment: str | None = None
    """timm's string, as rand-m9-mstd0.5-inc1"""
    erasing: Share = 0.0
    """probability of random erasing"""
    crop_pct: ShareAboveZero = 1.0
    """in evaluation, the share of the resized image that the centre crop keeps; 0.875 on ImageNet"""
    interpolation: str = "bicubic"
    """how images are resized: bicubic, bilinear, ..."""
    ratio: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    """range of the aspect ratio of a random resized crop"""
    random_interpolation: Flag = False
    """resize every random resized crop by bilinear or bicubic at random; evaluation by `interpolation`"""

    def __post_init__(self) -> None:
        check_fields(self, "augmentation.")
        if self.random_crop_padding and self.scale:
            raise ValueError(
                f"`augmentation.random_crop_padding` must be 0 where `scale` crops by area, got "
                f"{self.random_crop_padding} with {self.scale}."
            )
        if self.rand_augment is not None:
            try:
                _named_augmentation(self.rand_augment, (0.5,), (32, 32))
            except (AssertionError, KeyError, ValueError, IndexError):
                raise ValueError(
                    f"`augmentation.rand_augment` must be one of timm's, as rand-m9-mstd0.5-inc1, got "
                    f"{self.rand_augment!r}."
                ) from None
        if self.interpolation not in _INTERPOLATION:
            known = ", ".join(_INTERPOLATION)
            raise ValueError(f"`augmentation.interpolation` must be one of {known}, got {self.interpolation!r}.")
        if self.scale is not None and self.scale[0] > self.scale[1]:
            raise ValueError(f"`augmentation.scale` must be a range, the smaller share first, got {self.scale}.")
        if self.random_crop_padding and (self.random_interpolation or self.ratio != (3 / 4, 4 / 3)):
            raise ValueError(
                f"`augmentation.random_crop_padding` must be 0 where crops have a `ratio` or `random_interpolation`, "
                f"which those by area have, got {self.random_crop_padding}."
            )
        if self.ratio[0] > self.ratio[1]:
            raise ValueError(f"`augmentation.ratio` must be a range, the smaller number first, got {self.ratio}.")

    @property
    def random(self) -> bool:
        """Whether a training image differs from epoch to epoch."""
        return bool(
            self.random_crop_padding
            or self.scale
            or self.hflip
            or self.color_jitter
            or self.rand_augment
            or self.erasing
        )


def evaluation_transform(info: DatasetInfo, size: tuple[int, int], augmentation: Augmentation) -> Transform:
    """Resize and crop the centre to `size` = (height, width), then normalise; (C, height, width), float32.

    Large images as DeiT's: the shorter side to size / crop_pct, then the crop. Images of one small native size
    are resized to `size` whole.
    """
    if info.size is None:
        return create_transform(
            (info.channels, *size),
            interpolation=augmentation.interpolation,
            crop_pct=augmentation.crop_pct,
            mean=info.mean,
            std=info.std,
        )
    return T.Compose([*_resize(info, size, augmentation), T.ToTensor(), T.Normalize(info.mean, info.std)])


def training_transform(info: DatasetInfo, size: tuple[int, int], augmentation: Augmentation) -> Transform:
    """Augment, bring to `size` = (height, width) and normalise; (C, height, width), float32.

    Its randomness is torch's, Python's and NumPy's. Images of one small native size are cropped with padding
    (`random_crop_padding`) or by area (`scale`); large ones by area too, (0.08, 1) where neither is given.
    Without any augmentation it is the transform of evaluation.
    """
    if not augmentation.random:
        return evaluation_transform(info, size, augmentation)
    if augmentation.scale is not None or (info.size is None and not augmentation.random_crop_padding):
        return create_transform(
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
    steps = _resize(info, size, augmentation)
    if augmentation.random_crop_padding:
        steps.append(T.RandomCrop(size, padding=augmentation.random_crop_padding))
    if augmentation.hflip:
        steps.append(T.RandomHorizontalFlip(augmentation.hflip))
    if augmentation.rand_augment:
        steps.append(_named_augmentation(augmentation.rand_augment, info.mean, size))
    elif augmentation.color_jitter:
        steps.append(T.ColorJitter(*[augmentation.color_jitter] * 3))
    steps += [T.ToTensor(), T.Normalize(info.mean, info.std)]
    if augmentation.erasing:
        steps.append(RandomErasing(augmentation.erasing, mode="pixel", device="cpu"))
    return T.Compose(steps)


def _resize(info: DatasetInfo, size: tuple[int, int], augmentation: Augmentation) -> list[Callable]:
    if info.size == size:
        return []
    return [T.Resize(size, _INTERPOLATION[augmentation.interpolation])]


def _named_augmentation(name: str, mean: tuple[float, ...], size: tuple[int, int]) -> Callable:
    fill = tuple(min(255, round(255 * value)) for value in mean)
    options = {"translate_const": int(min(size) * 0.45), "img_mean": fill if len(fill) > 1 else fill[0]}
    build = {"rand": rand_augment_transform, "augm": augment_and_mix_transform}.get(name[:4], auto_augment_transform)
    return build(name, options)
