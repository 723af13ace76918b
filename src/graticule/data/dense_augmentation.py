"""The augmentation of images with boxes, masks or a class per pixel, as values of a recipe, without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from graticule.checks import parse_sizes
from graticule.typed import Flag, Positive, Share, ShareAboveZero, Side, check_fields


@dataclass(frozen=True)
class DenseAugmentation:
    """The augmentation of training images; all off by default. Boxes, masks and classes change with the image."""

    sizes: tuple[str, ...] = ()
    """multi-scale training: SHORTERxLONGER sides, of which each image is fitted to a random one instead of `fit`"""
    scale: tuple[Positive, Positive] | None = None
    """range of a random factor of the size after the resize; log-uniform if `log_scale`"""
    log_scale: Flag = False
    """draw the factor log-uniformly instead of uniformly"""
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
        if self.log_scale and self.scale is None:
            raise ValueError("`augmentation.log_scale` must be left out without `augmentation.scale`.")
        if self.crop_majority < 1 and self.crop is None:
            raise ValueError("`augmentation.crop_majority` must be left out without `augmentation.crop`.")


def fitted_sizes(given: tuple[str, ...], name: str) -> list[tuple[int, int]]:
    """Parse sizes that images are fitted to, SHORTERxLONGER or SIDE in pixels.

    Raises:
        ValueError: if they are not sizes, or the longer side comes first.
    """
    sizes = parse_sizes(given, name)
    for shorter, longer in sizes:
        if shorter > longer:
            raise ValueError(
                f"`{name}` must be SHORTERxLONGER sides in pixels, such as 800x1333, got {shorter}x{longer}."
            )
    return sizes
