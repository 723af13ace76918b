"""The middle of test images at the scale of training, with its position in the whole image."""

from __future__ import annotations

from torch import Tensor, nn

from graticule.backbones import Backbone
from graticule.grid import Crop
from graticule.surgery import unfold

Size = tuple[int, int]


def check_crop(size: Size, whole: Size) -> None:
    """Check that images of `whole` = (height, width) can be cropped to `size`, in pixels.

    Raises:
        ValueError: if a side of the crop is longer.
    """
    if size[0] > whole[0] or size[1] > whole[1]:
        raise ValueError(
            f"`sizes` of crops must be at most that of the training, {whole[0]} x {whole[1]}, on both sides, "
            f"got {size[0]} x {size[1]}; canvas keeps the scale of the content on larger images."
        )


def middle(model: nn.Module, size: Size, whole: Size) -> tuple[int, int]:
    """Return the corner (top, left), in pixels, of the middle part of `size` of an image of `whole`.

    It is at the corner of a patch of the model, so the patches of the part are patches of the image.
    """
    patch = model.coarsest_patch if isinstance(model, Backbone) else (1, 1)
    top, left = ((long - short) // 2 // step * step for long, short, step in zip(whole, size, patch, strict=True))
    return top, left


def crop_of(model: nn.Module, size: Size, whole: Size) -> Crop | None:
    """Return the middle part as the model receives it; None if its encoding cannot encode a part of an image."""
    if not isinstance(model, Backbone):
        return None
    grid = unfold(model).grid_at(whole)
    patch = (whole[0] // grid.height, whole[1] // grid.width)
    crop = Crop.of_pixels(whole, (*middle(model, size, whole), *size), patch)
    try:
        model.position(model.grid_at(size).cropped(crop))
    except ValueError:  # raised by the encoding
        return None
    return crop


class OnMiddle(nn.Module):
    """Applies a model to the middle part of images.

    Args:
        model: a model that takes images of the part, and `crop` if there is one.
        start: (top, left) of the part, in pixels.
        size: (height, width) of the part.
        crop: the part of the image that the model receives; None for a whole image.
    """

    def __init__(self, model: nn.Module, start: tuple[int, int], size: Size, crop: Crop | None) -> None:
        super().__init__()
        self.model, self.start, self.size, self.crop = model, start, size, crop

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images (B, C, height, width)."""
        (top, left), (height, width) = self.start, self.size
        part = images[..., top : top + height, left : left + width]
        logits: Tensor = self.model(part) if self.crop is None else self.model(part, self.crop)
        return logits
