"""Sets of images: their facts, arrays in memory, and encoded images that are decoded on access."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.utils.data import Dataset

log = logging.getLogger(__name__)

Split = Literal["train", "test"]
#: The truth of data sets for classification, see `DatasetInfo`.
ONE_CLASS = "one class per image"

#: Most classes of a data set: a damaged label must not determine the allocated memory.
MOST_CLASSES = 1_000_000
#: Accepted formats, whatever the name of a file says; for some others Pillow would start other programs.
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")

#: Largest encoded image in bytes: more than 16-bit RGB of the most pixels that Pillow decodes.
LARGEST = 3 << 29
#: Largest aspect ratio of an image, since its shorter side is resized to the side of the crop.
_LONGEST = 500
#: Errors of a file that is no image, or contradicts its facts.
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


@dataclass(frozen=True)
class DatasetInfo:
    """The facts of a data set that a model and its transforms need.

    `size` is the native (height, width) of the images, None if they differ; `mean` and `std` of the training images are
    per channel, in [0, 1], by default ImageNet's. `crop_mode` is how images without a native size get the size of a
    model, in timm's words; images of one native size are resized without a crop (squash). `truth` names the
    labels or targets of every image.
    """

    name: str
    class_names: tuple[str, ...]
    channels: int = 3
    size: tuple[int, int] | None = None
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD
    crop_mode: Literal["center", "squash", "border"] = "center"
    truth: tuple[str, ...] = (ONE_CLASS,)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


def check_class_names(names_here: Sequence[str], expected: Sequence[str], source: str, name: str = "data_root") -> None:
    """Check that the data of the argument `name` have the classes that `source` was trained on, by name and in order.

    Raises:
        ValueError: naming the classes that differ, since the outputs would mean other classes.
    """
    names_here, expected = tuple(names_here), tuple(expected)
    if names_here == expected:
        return
    if set(names_here) != set(expected):
        here, there = (_without(*pair) for pair in ((names_here, expected), (expected, names_here)))
        differing = f"only in the data: {here}; only in {source}: {there}"
    else:
        number = next(n for n, pair in enumerate(zip(names_here, expected, strict=False)) if pair[0] != pair[1])
        differing = f"the order differs: class {number} is {names_here[number]!r}, and {expected[number]!r} in {source}"
    raise ValueError(
        f"`{name}` must have the classes of {source}, by name and in order ({len(expected)}), got {len(names_here)}; "
        f"{differing}. Restore the names, or train another run."
    )


def same_classes(names: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether two data sets have the same classes in the same order, as far as the classes have names.

    Classes without names are called "0", "1" and so on, and match any other classes of the same number.
    """
    names, others = tuple(names), tuple(others)
    numbers = tuple(map(str, range(len(names))))
    return names == others or (len(names) == len(others) and numbers in (names, others))


def class_labels(folders: Sequence[str], names: Sequence[str], num_classes: int) -> list[int] | None:
    """Return the output of a model for each class of data; None if they are not the classes of the model.

    Classes are matched by name, and in order only if the model or the data do not name them.

    Args:
        folders: the classes of the data.
        names: the classes of the model, in the order of its outputs; empty if it does not name them.
        num_classes: number of outputs of the model.
    """
    if folders and set(folders) <= set(names):
        return [list(names).index(name) for name in folders]
    in_order = len(folders) == num_classes and (not names or same_classes(folders, names))
    return list(range(num_classes)) if in_order else None


def _without(names: Sequence[str], others: Sequence[str]) -> str:
    """List the names that are not among the others."""
    rest = [repr(name) for name in names if name not in set(others)]
    return ", ".join(rest[:5]) + ", ..." * (len(rest) > 5) or "none"


class ArrayImages(Dataset[tuple[Image.Image, int]]):
    """Images in memory: `images` (n, H, W) or (n, H, W, 3), uint8, and `labels` (n,)."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        if len(images) != len(labels):
            raise ValueError(f"`labels` must have one entry per image, {len(images)}, got {len(labels)}.")
        self.images = self.pixels = images
        self.labels = labels.astype(np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]), int(self.labels[index])


class StoredImages(Dataset[Any], ABC):
    """Examples that are read on access, some of which may be broken.

    In training (`skip_broken`), a broken image is counted in `skipped`, logged, and replaced by the next one; in
    evaluation it is an error. A failure to read from the disk is an error in both.
    """

    def __init__(self, count: int, skip_broken: bool) -> None:
        self.skip_broken = skip_broken
        self._broken = torch.zeros(count, dtype=torch.bool).share_memory_()  # workers report here

    @abstractmethod
    def example(self, index: int) -> Any:
        """Return an example.

        Raises:
            ValueError, OSError, SyntaxError, Image.DecompressionBombError: if it is broken.
        """

    def place(self, index: int) -> Path:
        """Return the name of an image in messages: by default its first file."""
        return self.files_of(index)[0]

    def files_of(self, index: int) -> Sequence[Path]:
        """Return the paths of the files of an example, first of its image; none if it is in no file of its own."""
        return ()

    @abstractmethod
    def content(self, index: int) -> Iterable[bytes | np.ndarray]:
        """Return the parts of an example that are hashed."""

    @property
    def skipped(self) -> list[Path]:
        """The broken images that were found, in this process or in one of its workers."""
        return [self.place(index) for index in self._broken.nonzero().flatten().tolist()]

    def __len__(self) -> int:
        return len(self._broken)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"`index` must be from 0 to {len(self) - 1}, got {index}.")
        for candidate in (*range(index, len(self)), *range(index)):
            if self._broken[candidate]:
                continue
            try:
                return self.example(candidate)
            except UNREADABLE as error:
                if isinstance(error, OSError) and error.errno is not None:  # of the disk; Pillow's errors have none
                    raise
                place, reason = self.place(candidate), (str(error) or type(error).__name__).rstrip(".")
                if not self.skip_broken:
                    raise ValueError(
                        f"{place} cannot be used ({reason}); an evaluation needs every image, so fix or remove it."
                    ) from None
                self._broken[candidate] = True
                log.warning("skipped %s (%s); %d skipped so far", place, reason, int(self._broken.sum()))
        raise ValueError(f"`data_root` must have images that can be read, got none; one is {self.place(index)}.")


class EncodedImages(StoredImages):
    """Pairs of an image, RGB, and its label; `labels` (n,) are known without reading an image."""

    def __init__(self, labels: np.ndarray, skip_broken: bool) -> None:
        super().__init__(len(labels), skip_broken)
        self.labels = labels

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Return the stored bytes of an image."""

    def example(self, index: int) -> tuple[Image.Image, int]:
        return decode(self.read(index)), int(self.labels[index])

    def content(self, index: int) -> Iterable[bytes]:
        return (self.read(index),)


def decode(content: bytes, *, turned: bool = True) -> Image.Image:
    """Decode a whole image to RGB, 8 bits per channel; a truncated one is an error, whatever the settings of Pillow.

    Of 16 bits the upper 8 are used (Pillow's own conversion of gray would clip at 255). Images that have another scale,
    several frames or transparent pixels are refused.

    Args:
        content: the file.
        turned: whether the orientation in the file's EXIF data is applied, as viewers and annotation tools do.

    Raises:
        OSError, SyntaxError, ValueError, Image.DecompressionBombError: if it cannot be decoded, or is refused.
    """
    allowed, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
    try:
        image: Image.Image = Image.open(io.BytesIO(content), formats=_FORMATS)
        (shorter, longer), (width, height) = sorted(image.size), image.size
        if longer > _LONGEST * shorter:
            raise ValueError(f"it must be at most {_LONGEST} times as long as wide, got {width} x {height} pixels")
        if image.mode == "F" or (image.mode == "I" and ";32" in str(getattr(image, "tile", ""))):
            raise ValueError("it must have 8 or 16 bits per channel, got 32")
        if getattr(image, "is_animated", False) and image.format != "MPO":  # of which the others are previews
            raise ValueError(f"it must have one frame, got {getattr(image, 'n_frames', 2)}; save the one that is meant")
        image.load()  # which turns TIFF
        if turned:
            with contextlib.suppress(SyntaxError, TypeError, ValueError, KeyError, struct.error):  # damaged EXIF data
                image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16-bit gray: I;16, or I (32-bit integers), depending on Pillow's version
            image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
        if image.has_transparency_data and np.asarray(image.convert("RGBA"))[..., 3].min() < 255:
            raise ValueError("it must be opaque, got transparent pixels; put it on a background")
        return image.convert("RGB")
    except UnidentifiedImageError:  # its message names the buffer, not the image
        raise ValueError(f"Pillow cannot identify it as one of {', '.join(_FORMATS)}") from None
    except TypeError as error:  # of a damaged TIFF file
        raise ValueError(f"Pillow cannot read it: {error}") from None
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = allowed


def fingerprint(count: int, parts: Iterable[bytes | np.ndarray], files: Iterable[Path] = ()) -> dict[str, Any]:
    """Return the number of examples of a split, a hash of `parts` and the sizes of `files`, and their change times.

    Of the times there are a hash, the first and the last. So a file that is written again at the same size is noticed
    unless all are, as in a copy.
    """
    digest, times = hashlib.sha256(), []
    for part in parts:
        digest.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes())
    for file in files:
        status = file.stat()
        digest.update(status.st_size.to_bytes(8, "little"))
        times.append(status.st_mtime_ns)
    described = {"examples": count, "sha256": digest.hexdigest()}
    if times:
        hashed = hashlib.sha256(np.array(times, "<i8").tobytes()).hexdigest()
        described |= {"times": hashed, "oldest": min(times), "newest": max(times)}
    return described


def spread(count: int, most: int = 32) -> list[int]:
    """Return at most `most` of `count` indices, evenly spaced; by default those whose contents a fingerprint has."""
    most = min(count, most)
    return [index * count // most for index in range(most)]
