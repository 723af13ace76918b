"""Encoded images, decoded on access, and the handling of those that cannot be decoded."""

from __future__ import annotations

import io
import logging
import struct
from abc import ABC, abstractmethod
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError
from torch.utils.data import Dataset

log = logging.getLogger(__name__)

#: Accepted formats, whatever the name of a file says; for some others Pillow would start other programs.
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")

#: Largest encoded image in bytes: more than 16-bit RGB of the most pixels that Pillow decodes.
LARGEST = 3 << 29
#: The turn of each orientation in EXIF data, and the turns that swap height and width.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SWAPPING = [_TURNS[number] for number in (5, 6, 7, 8)]
#: Largest aspect ratio of an image, since its shorter side is resized to that of the crop.
_LONGEST = 500


class EncodedImages(Dataset[tuple[Image.Image, int]], ABC):
    """Pairs of an image, RGB, and its label; `labels` (n,) are known without reading an image.

    In training (`skip_broken`), an image that cannot be decoded is counted in `skipped`, logged, and replaced by the
    next one of its class; in evaluation it is an error. A failure to read from the disk is an error in both.
    """

    def __init__(self, labels: np.ndarray, skip_broken: bool) -> None:
        self.labels = labels
        self.skip_broken = skip_broken
        self._broken = torch.zeros(len(labels), dtype=torch.bool).share_memory_()  # workers report here

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Return the stored bytes of an image."""

    @abstractmethod
    def place(self, index: int) -> Path:
        """Return the name of an image in messages: its file, or the file that contains it and its name there."""

    @property
    def skipped(self) -> list[Path]:
        """The broken images that were found, in this process or in one of its workers."""
        return [self.place(index) for index in self._broken.nonzero().flatten().tolist()]

    def size(self, index: int) -> tuple[int, int] | None:
        """Return the (height, width) in the header of an image, without decoding it; None if it cannot be read."""
        return stated_size(io.BytesIO(self.read(index)))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        label = int(self.labels[index])
        for step in range(len(self)):
            candidate = (index + step) % len(self)
            if self.labels[candidate] != label or self._broken[candidate]:
                continue
            content = self.read(candidate)
            try:
                return decode(content), label
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                place = self.place(candidate)
                reason = str(error) or type(error).__name__
                if not self.skip_broken:
                    raise ValueError(
                        f"{place} cannot be read as an image ({reason}); an evaluation needs every image, so fix "
                        "or remove it."
                    ) from None
                self._broken[candidate] = True
                log.warning("skipped %s (%s); %d skipped so far", place, reason, int(self._broken.sum()))
        raise ValueError(
            f"`data_root` must have images of each class that can be read, got none of class {label}, as "
            f"{self.place(index)}."
        )


def stated_size(file: BinaryIO) -> tuple[int, int] | None:
    """Return the (height, width) that an image has after `decode`, from its header; None if Pillow cannot read it."""
    try:
        with Image.open(file, formats=_FORMATS) as image:
            swapped = _turn(image) in _SWAPPING
            return (image.width, image.height) if swapped else (image.height, image.width)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None


def decode(content: bytes, *, turned: bool = True) -> Image.Image:
    """Decode a whole image to RGB, 8 bits per channel; a truncated one is an error, whatever the settings of Pillow.

    The scale depends on the type of the numbers alone, so that the images of a set stay comparable: of 16 bits the
    upper 8 are used (Pillow's own conversion of gray would clip at 255), and floats are from 0 to 1. Images that would
    become black, or have no known scale, are refused.

    Args:
        content: the file.
        turned: whether the orientation in the file's EXIF data is applied, as viewers and annotation tools do.

    Raises:
        OSError, SyntaxError, ValueError, Image.DecompressionBombError: if it cannot be decoded, or has no known scale.
    """
    allowed, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            if max(image.size) > _LONGEST * min(image.size) or not min(image.size):
                width, height = image.size
                raise ValueError(f"it must be at most {_LONGEST} times as long as wide, got {width} x {height} pixels")
            turn = _turn(image) if turned else None
            converted = _rgb(image)
            return converted if turn is None else converted.transpose(turn)
    except UnidentifiedImageError:  # its message names the buffer, not the image
        raise ValueError(f"Pillow cannot identify it as one of {', '.join(_FORMATS)}") from None
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = allowed


def _rgb(image: Image.Image) -> Image.Image:
    """Convert an opened image to RGB, 8 bits per channel."""
    stored = str(
        getattr(image, "tile", ())
    )  # with Pillow's raw mode, such as I;16B or RGB;16L; it is empty once the image is loaded
    if image.mode == "F":
        pixels = np.asarray(image)
        if not ((pixels >= 0) & (pixels <= 1)).all():
            raise ValueError(f"its floats must be from 0 to 1, got {pixels.min():g} to {pixels.max():g}; save 8 bits")
        return Image.fromarray((pixels * 255).round().astype(np.uint8)).convert("RGB")
    if image.mode == "I" and ";32" in stored:
        raise ValueError("it must not have integers of 32 bits, whose scale is not known; save 8 or 16 bits")
    if image.mode.startswith("I"):  # 16-bit gray: I;16, or I (32-bit integers), depending on Pillow's version
        gray = np.asarray(image).clip(0, 65535) >> 8
        converted = Image.fromarray(gray.astype(np.uint8)).convert("RGB")
    else:
        converted = image.convert("RGB")
        if ";16" not in stored or "BGR" in stored:  # BGR;16 is a color of 5, 6 and 5 bits
            return converted
    if np.asarray(converted).max() < 16:
        raise ValueError("it must use the range of its 16 bits, got no value above 4095, as of 12 bits; scale it")
    return converted


def _turn(image: Image.Image) -> Image.Transpose | None:
    """Return the turn of an opened image that its EXIF data ask for; Pillow itself turns TIFF."""
    if image.format == "TIFF" or "exif" not in image.info:
        return None
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except (SyntaxError, TypeError, ValueError, KeyError, struct.error):  # damaged
        return None
