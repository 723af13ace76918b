"""The augmentation of training images, as values of a recipe; PyTorch is imported only where a name needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from graticule.registry.checks import parse_sizes
from graticule.registry.fields import Flag, NotNegative, Positive, Share, ShareAboveZero, Side, Whole, check_fields

#: Names of torchvision's interpolation modes.
Interpolation = Literal["nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos"]
#: The augmentations of published recipes, which are known to timm.
_USUAL = ("rand-m9-mstd0.5-inc1", "rand-m6-n3-mstd1.0-inc1")


@dataclass(frozen=True)
class Augmentation:
    """The augmentation of training images; all off by default. `crop_pct` is for evaluation too."""

    random_crop_padding: Annotated[Whole, Field(le=4096)] = 0
    """pixels of padding before a random crop, for small images"""
    scale: tuple[ShareAboveZero, ShareAboveZero] | None = None
    """range of the area of a random resized crop, as a share of the image"""
    hflip: Share = 0.0
    """probability of a horizontal flip"""
    color_jitter: NotNegative = 0.0
    """strength of brightness, contrast and saturation jitter; unused with RandAugment"""
    rand_augment: str | None = None
    """string in timm's format, such as rand-m9-mstd0.5-inc1"""
    erasing: Share = 0.0
    """probability of random erasing"""
    crop_pct: Annotated[float, Field(ge=0.1, le=2)] = 1.0
    """share of the resized image that the center crop keeps in evaluation; 0.875 on ImageNet; above 1, it is padded"""
    interpolation: Interpolation = "bicubic"
    """interpolation for resizing"""
    ratio: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    """range of the aspect ratio of a random resized crop"""
    random_interpolation: Flag = False
    """use bilinear or bicubic at random for each random resized crop; evaluation uses `interpolation`"""

    def __post_init__(self) -> None:
        check_fields(self, "augmentation.")
        if self.rand_augment not in (None, *_USUAL):
            try:
                named_augmentation(str(self.rand_augment), (0.5,), (32, 32))
            except (AssertionError, KeyError, ValueError, IndexError):
                raise ValueError(
                    f"`augmentation.rand_augment` must be timm's, such as {_USUAL[0]}, got {self.rand_augment!r}."
                ) from None
        for name, smaller in (("scale", "share"), ("ratio", "number")):
            if (ends := getattr(self, name)) is not None and ends[0] > ends[1]:
                raise ValueError(f"`augmentation.{name}` must be a range, the smaller {smaller} first, got {ends}.")
        if self.random_crop_padding and (self.scale or self.random_interpolation or self.ratio != (3 / 4, 4 / 3)):
            raise ValueError(
                f"`augmentation.random_crop_padding` must be 0 with `scale`, `ratio` and `random_interpolation`, "
                f"which crops by area have, got {self.random_crop_padding}."
            )

    @property
    def random(self) -> bool:
        """Return whether a training image differs from epoch to epoch."""
        crops = self.random_crop_padding or self.scale
        return bool(crops or self.hflip or self.color_jitter or self.rand_augment or self.erasing)


def named_augmentation(name: str, mean: tuple[float, ...], size: tuple[int, int]) -> Callable[[Any], Any]:
    """Build timm's augmentation of that name for images of `size` = (height, width)."""
    from timm.data.auto_augment import augment_and_mix_transform, auto_augment_transform, rand_augment_transform

    fill = tuple(min(255, round(255 * value)) for value in mean)
    options = {"translate_const": int(min(size) * 0.45), "img_mean": fill if len(fill) > 1 else fill[0]}
    build = {"rand": rand_augment_transform, "augm": augment_and_mix_transform}.get(name[:4], auto_augment_transform)
    return build(name, options)


@dataclass(frozen=True)
class DenseAugmentation:
    """The augmentation of training images; all off by default. Boxes, masks and classes change with the image."""

    sizes: tuple[str, ...] = ()
    """multi-scale training: SHORTERxLONGER sides, of which each image is fitted to a random one instead of `fit`"""
    scale: tuple[Positive, Positive] | None = None
    """range of a random factor of the size of the resize"""
    part: Share = 0.0
    """probability of DETR's crop before the resize: sides of 384 to 600 pixels of the image at 400, 500 or 600"""
    crop: tuple[Side, Side] | None = None
    """height and width of a random crop; smaller images with classes per pixel are padded with ignored pixels"""
    crop_majority: ShareAboveZero = 1.0
    """draw a crop again, up to 10 times, while one class has more than this share of its pixels; 0.75 on ADE20K"""
    hflip: Share = 0.0
    """probability of a horizontal flip"""
    photometric: Flag = False
    """change brightness, contrast, saturation and hue, each with probability 1/2, as mmsegmentation does"""

    def __post_init__(self) -> None:
        check_fields(self, "augmentation.")
        fitted_sizes(self.sizes, "augmentation.sizes")
        if self.scale is not None and self.scale[0] > self.scale[1]:
            raise ValueError(f"`augmentation.scale` must be a range, the smaller factor first, got {self.scale}.")
        if self.crop_majority < 1 and self.crop is None:
            raise ValueError("`augmentation.crop_majority` must be left out without `augmentation.crop`.")


def fitted_sizes(texts: tuple[str, ...], name: str) -> list[tuple[int, int]]:
    """Parse sizes that images are fitted to, SHORTERxLONGER or SIDE in pixels."""
    sizes = parse_sizes(texts, name)
    if wrong := [f"{shorter}x{longer}" for shorter, longer in sizes if shorter > longer]:
        raise ValueError(f"`{name}` must be SHORTERxLONGER sides in pixels, such as 800x1333, got {wrong[0]}.")
    return sizes
