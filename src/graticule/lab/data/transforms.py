"""Transforms of images, and sets of transformed images, whose randomness is a function of seed, epoch and index."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import transforms as T
from torchvision.transforms import InterpolationMode

from graticule.lab.data.augmentation import Augmentation, named_augmentation
from graticule.lab.data.images import DatasetInfo
from graticule.lab.data.sampling import PADDING, Key, WholeBatches

Transform = Callable[[Any], Tensor]
_INTERPOLATION = {mode.value: mode for mode in InterpolationMode}


def evaluation_transform(info: DatasetInfo, size: Any, augmentation: Augmentation, normalize: bool = True) -> Transform:
    """Resize and crop the center to `size` = (height, width), then normalize; (C, height, width), float32.

    Large images are transformed by timm: by default the shorter side is resized to size / crop_pct, then cropped. For a
    data set of images of one small native size, any image is resized to `size` without a crop. Without `normalize` the
    result is uint8.
    """
    if info.size is not None:
        last = [T.ToTensor(), T.Normalize(info.mean, info.std)] if normalize else [T.PILToTensor()]
        return T.Compose([_resize(size, augmentation), *last])
    return create_transform(
        (info.channels, *size),
        interpolation=augmentation.interpolation,
        crop_pct=augmentation.crop_pct,
        crop_mode=info.crop_mode,
        mean=info.mean,
        std=info.std,
        normalize=normalize,
    )


def byte_values(info: DatasetInfo) -> Tensor:
    """Return the normalized value of each byte in each channel, (C, 256)."""
    mean, std = (torch.tensor(values)[:, None] for values in (info.mean, info.std))
    return (torch.arange(256) / 255 - mean) / std


def training_transform(info: DatasetInfo, size: Any, augmentation: Augmentation) -> Transform:
    """Augment, resize to `size` = (height, width) and normalize; (C, height, width), float32.

    It draws from torch, Python and NumPy. Images of one small native size are cropped with padding
    (`random_crop_padding`) or by area (`scale`); large ones by area, (0.08, 1) by default. Without any augmentation it
    is the transform of evaluation.
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
    return T.Compose(steps)


def _resize(size: tuple[int, int], augmentation: Augmentation) -> Callable[[Any], Any]:
    """Return the transform to `size`; it leaves images of this size as they are."""
    return T.Resize(size, _INTERPOLATION[augmentation.interpolation])


@dataclass(eq=False, repr=False)
class ImageView(Dataset[Any]):
    """Images that are made of other images, one by one, when they are asked for."""

    images: Any

    def __len__(self) -> int:
        return len(self.images)


@dataclass(eq=False, repr=False)
class SeededImages(ImageView):
    """Transformed images; the randomness of each is a function of seed and key alone.

    The images do not depend on the number of workers, and the global random state is unchanged.
    """

    transform: Transform
    seed: int

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        image, label = self.images[key[1]]
        with drawing(self.seed, key):
            return self.transform(image), label


@contextlib.contextmanager
def drawing(seed: int, key: Key) -> Iterator[None]:
    """Make the draws within the block a function of seed and key; the global random state is restored after it."""
    state = int(np.random.SeedSequence([seed, *key]).generate_state(1)[0])
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(state)
        np.random.seed(state)
        torch.default_generator.manual_seed(state)  # of the CPU only, not of a GPU
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class SizedImages(Dataset[Any]):
    """The same images at several sizes, all of one kind; the last entry of a key is the index of the size."""

    def __init__(self, of_sizes: Sequence[Any]) -> None:
        self.of_sizes = tuple(of_sizes)
        self.in_batches = isinstance(self.of_sizes[0], WholeBatches)

    def __len__(self) -> int:
        return len(self.of_sizes[0])

    def __getitem__(self, key: Key) -> Any:
        return self.of_sizes[key[-1]][key[:-1]]

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        """Return the images of a batch, which has one size."""
        images, keys = self.of_sizes[keys[0][-1]], [key[:-1] for key in keys]
        return images.__getitems__(keys) if hasattr(images, "__getitems__") else [images[key] for key in keys]


@dataclass(eq=False, repr=False)
class TransformedImages(ImageView):
    """Transformed images without randomness, for evaluation."""

    transform: Transform

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[index if index >= 0 else -1 - index]
        return self.transform(image), label if index >= 0 else PADDING


class TensorImages(WholeBatches):
    """Images of one size in one tensor (n, C, H, W), on any device; a batch is one indexing operation.

    Bytes are normalized batch by batch by looking them up in a table, so the numbers are the same on every device.
    Keys are indices, or the (epoch, index) of `EpochSampler`.

    Args:
        images: pairs of an image and a label, or `ArrayImages` that have the size.
        transform: returns bytes (C, H, W), or numbers if there are no `values`; None for images that have the size.
        values: the value of each byte in each channel, (C, 256).
    """

    def __init__(self, images: Any, transform: Transform | None, values: Tensor | None = None) -> None:
        if transform is None:
            pixels = torch.from_numpy(np.array(images.pixels))
            self.tensors = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
        else:
            self.tensors = torch.stack([transform(images[index][0]) for index in range(len(images))])
        self.labels = torch.as_tensor(np.asarray(images.labels), dtype=torch.int64)
        self.values = values

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: Sequence[int | Key]) -> tuple[Tensor, Tensor]:
        """Return the images (B, C, H, W) and labels (B,) of a whole batch."""
        indices = self._send(np.array([key[1] if isinstance(key, tuple) else key for key in keys]))
        padding = indices < 0
        indices = torch.where(padding, -1 - indices, indices)
        return self._normalize(self.tensors[indices]), self.labels[indices].masked_fill(padding, PADDING)

    def to(self, device: torch.device) -> Self:
        """Move the images to `device`, in place."""
        self.tensors, self.labels = self.tensors.to(device), self.labels.to(device)
        if self.values is not None:
            self.values = self.values.to(device)
        return self

    def _send(self, numbers: np.ndarray) -> Tensor:
        """Return numbers on the device of the images; a GPU does not wait for them."""
        tensor, device = torch.from_numpy(numbers), self.labels.device
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    def _normalize(self, pixels: Tensor) -> Tensor:
        if self.values is None:
            return pixels
        channels, count = self.values.shape
        first = torch.arange(channels, device=pixels.device)[:, None, None] * count
        return self.values.flatten()[pixels.int() + first]


class ShiftedImages(TensorImages):
    """Random crops with padding and random flips of images in one tensor, without a loop over images.

    The draws for an image are a function of seed and key, whatever batch it is in and whatever the device. They differ
    from those of `SeededImages`, but have the same distribution. The padding is black, like the border of the images.

    Args:
        images: pairs of an image and a label, or `ArrayImages` that have the size.
        transform: returns bytes (C, H, W); None for images that have the size.
        values: the value of each byte in each channel, (C, 256).
        augmentation: `random_crop_padding` and `hflip`, and nothing else; see `shifts_only`.
        seed: seed of the draws.
    """

    def __init__(
        self, images: Any, transform: Transform | None, values: Tensor, augmentation: Augmentation, seed: int
    ) -> None:
        super().__init__(images, transform, values)
        self.size = self.tensors.shape[-2:]
        self.padding = augmentation.random_crop_padding
        self.hflip = augmentation.hflip
        self.seed = seed
        self.tensors = F.pad(self.tensors, [self.padding] * 4)
        self._drawn: dict[tuple[int, int], np.ndarray] = {}  # the last

    def __getitems__(self, keys: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return the images (B, C, H, W) and labels (B,) of a whole batch; its keys are of one epoch."""
        indices = np.array([key[1] for key in keys])
        repeats = np.array([key[2] if len(key) > 2 else 0 for key in keys])
        draws = np.empty((len(keys), 3))
        for repeat in np.unique(repeats):
            chosen = repeats == repeat
            draws[chosen] = self._draw(keys[0][0], int(repeat))[indices[chosen]]
        offsets = (draws[:, :2] * (2 * self.padding + 1)).astype(np.int64)  # in pixels
        which, top, left, flipped = self._send(np.stack([indices, *offsets.T, draws[:, 2] < self.hflip]))[..., None]
        height, width = self.size
        rows = top + torch.arange(height, device=top.device)
        columns = torch.arange(width, device=top.device)
        columns = left + torch.where(flipped > 0, columns.flip(0), columns)
        # (B, H, W, C), the indexed axes first
        pixels = self.tensors[which[..., None], :, rows[:, :, None], columns[:, None, :]]
        return self._normalize(pixels.permute(0, 3, 1, 2).contiguous()), self.labels[which[:, 0]]

    def _draw(self, epoch: int, repeat: int) -> np.ndarray:
        """Return three numbers in [0, 1) per image, a function of seed, epoch and repeat."""
        if (epoch, repeat) not in self._drawn:
            numbers = np.random.default_rng([self.seed, epoch, repeat, 1]).random((len(self), 3))
            self._drawn = {(epoch, repeat): numbers}
        return self._drawn[epoch, repeat]


def shifts_only(augmentation: Augmentation) -> bool:
    """Return whether an augmentation consists of crops with padding and flips only."""
    rest = (augmentation.scale, augmentation.color_jitter, augmentation.rand_augment, augmentation.erasing)
    return augmentation.random and not any(rest)


#: How images get a size other than that of training: scaled (zoom), or at the same scale on a larger canvas (canvas).
Mode = Literal["zoom", "canvas"]
#: Seed of the positions of the images, so that all models are tested on the same ones.
_PLACE_SEED = 28


@dataclass(eq=False, repr=False)
class CanvasImages(ImageView):
    """Images (C, h, w) of another data set, each at a random position on a canvas (C, H, W), or cropped to it.

    The position depends on the index alone. The canvas has the median color of the border of its image, per channel.
    At the size of the images nothing changes.

    Args:
        images: pairs of a tensor and a label, by index; a negative index is padding (`TransformedImages`).
        size: (H, W) of the canvas, in pixels.
    """

    size: tuple[int, int]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[index]
        random = torch.Generator().manual_seed(_PLACE_SEED + abs(index))
        return place(image, self.size, random), label


def place(image: Tensor, size: tuple[int, int], random: torch.Generator | None = None) -> Tensor:
    """Put `image`, (C, h, w), at a random position on a canvas (C, H, W) of the median color of its border.

    Along an axis on which the canvas is smaller, the image is cropped at a random position.
    """
    canvas = border_color(image)[:, None, None].expand(-1, *size).clone()
    there = canvas
    for axis, (length, room) in enumerate(zip(image.shape[1:], size, strict=True), 1):
        start = int(torch.randint(abs(room - length) + 1, (), generator=random))
        if room >= length:
            there = there.narrow(axis, start, length)
        else:
            image = image.narrow(axis, start, room)
    there.copy_(image)
    return canvas


def border_color(image: Tensor) -> Tensor:
    """Return the median over the outermost pixels of `image`, (C, h, w), per channel: (C,)."""
    height, width = image.shape[1:]
    border = torch.ones(height, width, dtype=torch.bool, device=image.device)
    border[1:-1, 1:-1] = False
    return image[:, border].median(dim=1).values
