"""A segmentation model: images in, a logit per class and pixel out; whole or in windows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.dense.decoders import Decoder, resize_to
from graticule.dense.features import DenseModel, Features
from graticule.position.grid import Crop
from graticule.registry.checks import checked


class SegmentationModel(DenseModel):
    """Feature maps and a decoder.

    Images can have any size: they are padded with zeros at the bottom and on the right to a multiple of
    `features.divisor`, and the logits are resized bilinearly to the padded size and cropped, as in Segmenter's code.
    Inputs are normalized as for the backbone alone.

    Args:
        features: images to feature maps.
        decoder: feature maps to logits.
        num_classes: number of classes.
        auxiliary: another decoder, for a second loss in training (`all_logits`).
    """

    kind = "segmenter"

    def __init__(
        self, features: Features, decoder: Decoder, num_classes: int, auxiliary: Decoder | None = None
    ) -> None:
        super().__init__()
        self.features = features
        self.decoder = decoder
        self.auxiliary = auxiliary
        self.num_classes = num_classes

    @property
    def divisor(self) -> int:
        """Sides of images are padded to multiples of this."""
        return self.features.divisor

    def forward(self, images: Tensor, crop: Crop | None = None) -> Tensor:
        """Return logits (B, num_classes, height, width) of images (B, C, height, width).

        Args:
            images: normalized as for the backbone.
            crop: their part of larger images (see `Backbone.forward`); their sides then are multiples of
                `features.divisor`.
        """
        return self._logits(images, [self.decoder], crop)[0]

    def all_logits(self, images: Tensor) -> list[Tensor]:
        """Return the logits of `forward` and, if there is an auxiliary decoder, its logits.

        mmsegmentation's UperNet is trained with the loss of the first plus 0.4 times that of the second.
        """
        return self._logits(images, [self.decoder, *([] if self.auxiliary is None else [self.auxiliary])])

    def _logits(self, images: Tensor, decoders: list[Decoder], crop: Crop | None = None) -> list[Tensor]:
        height, width = images.shape[-2:]
        padded = pad_to(images, self.features.divisor)
        if crop is not None and padded.shape != images.shape:
            raise ValueError(
                f"`images` must have sides that are multiples of {self.features.divisor} if `crop` is given, got "
                f"{height} x {width}."
            )
        maps = list(self.features(padded, crop).values())
        return [resize_to(decoder(maps), padded.shape[-2:])[..., :height, :width] for decoder in decoders]


@torch.no_grad()
@checked
def segment_in_windows(
    model: SegmentationModel,
    images: Tensor,
    window: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    located: bool = False,
) -> Tensor:
    """Return logits (B, num_classes, height, width), the mean over all windows that contain a pixel.

    Windows are `stride` pixels apart; the last of a row or column ends at the border of the image, as in the code of
    Segmenter and mmsegmentation. An image smaller than a window is padded with zeros (Segmenter enlarges it,
    mmsegmentation makes the window smaller).

    Args:
        model: the model.
        images: (B, C, height, width).
        window: pixels, a side or (height, width), multiples of the model's divisor.
        stride: pixels; two thirds of a window by default.
        located: whether each window is encoded with its position in the image, for encodings with `crops`; otherwise
            as a separate image.
    """
    tall, wide = (window, window) if isinstance(window, int) else window
    stride = (max(1, tall * 2 // 3), max(1, wide * 2 // 3)) if stride is None else stride
    down, right = (stride, stride) if isinstance(stride, int) else stride
    divisor = model.features.divisor
    if tall < divisor or wide < divisor or tall % divisor or wide % divisor:
        raise ValueError(f"`window` must have sides that are multiples of {divisor} pixels, got {tall} x {wide}.")
    if not (0 < down <= tall and 0 < right <= wide):
        raise ValueError(f"`stride` must be from 1 to the side of the window, {tall} x {wide}, got {down} x {right}.")
    height, width = images.shape[-2:]
    padded = pad_to(images, 1, at_least=(tall, wide))
    whole = (padded.shape[-2] + -padded.shape[-2] % divisor, padded.shape[-1] + -padded.shape[-1] % divisor)
    total, count = None, torch.zeros_like(padded[:1, :1])
    for top in window_starts(padded.shape[-2], tall, down):
        for left in window_starts(padded.shape[-1], wide, right):
            rows, columns = slice(top, top + tall), slice(left, left + wide)
            crop = Crop.of_pixels(whole, (top, left, tall, wide), model.backbone.patch_size) if located else None
            logits = model(padded[..., rows, columns], crop)
            if total is None:
                total = logits.new_zeros(len(images), logits.shape[1], *padded.shape[-2:])
            total[..., rows, columns] += logits
            count[..., rows, columns] += 1
    assert total is not None
    mean: Tensor = total / count
    return mean[..., :height, :width]


def window_starts(side: int, window: int, stride: int) -> list[int]:
    """Return the starts of windows on an axis of `side` pixels; they cover the axis, and none extends beyond it."""
    return [*range(0, side - window, stride), side - window]


def pad_to(images: Tensor, divisor: int, at_least: tuple[int, int] = (1, 1)) -> Tensor:
    """Pad images (B, C, height, width) with zeros, at the bottom and on the right, to multiples of `divisor`."""
    height, width = (max(side, least) for side, least in zip(images.shape[-2:], at_least, strict=True))
    down, right = height + -height % divisor - images.shape[-2], width + -width % divisor - images.shape[-1]
    return F.pad(images, (0, right, 0, down)) if down or right else images
