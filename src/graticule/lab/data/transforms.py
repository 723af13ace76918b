"""Transforms of images, and batches of transformed images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torchvision import transforms as T
from torchvision.transforms import InterpolationMode

from graticule.lab.data.augmentation import Augmentation, named_augmentation
from graticule.lab.data.images import DatasetInfo
from graticule.lab.data.sampling import Batches, BatchIndices, Examples, draw

Transform = Callable[[Any], Tensor]
_INTERPOLATION = {mode.value: mode for mode in InterpolationMode}


class Normalized:
    """Turns an image into float32 (C, height, width), as torchvision's ToTensor and Normalize do, faster."""

    def __init__(self, info: DatasetInfo) -> None:
        self.mean, self.std = (np.array(values, dtype=np.float32)[:, None, None] for values in (info.mean, info.std))

    def __call__(self, image: Image.Image) -> Tensor:
        pixels = np.asarray(image)
        values = (pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)).astype(np.float32, order="C")
        values /= 255
        values -= self.mean
        values /= self.std
        return torch.from_numpy(values)


def evaluation_transform(info: DatasetInfo, size: Any, augmentation: Augmentation, normalize: bool = True) -> Transform:
    """Resize and crop the center to `size` = (height, width), then normalize; (C, height, width), float32.

    Large images are transformed by timm: by default the shorter side is resized to size / crop_pct, then cropped. For a
    data set of images of one small native size, any image is resized to `size` without a crop. Without `normalize` the
    result is uint8.
    """
    steps: list[Callable[[Any], Any]] = [T.Grayscale()] if info.channels == 1 else []
    if info.size is not None:
        steps.append(_resize(size, augmentation))
    else:
        options = {"interpolation": augmentation.interpolation, "crop_pct": augmentation.crop_pct}
        steps += _timms(info, size, crop_mode=info.crop_mode, **options)
    return T.Compose([*steps, Normalized(info) if normalize else T.PILToTensor()])


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
        steps = _timms(
            info,
            size,
            is_training=True,
            scale=augmentation.scale or (0.08, 1.0),
            ratio=augmentation.ratio,
            hflip=augmentation.hflip,
            color_jitter=augmentation.color_jitter,
            auto_augment=augmentation.rand_augment,
            interpolation="random" if augmentation.random_interpolation else augmentation.interpolation,
        )
    else:
        steps = [_resize(size, augmentation)]
        if augmentation.random_crop_padding:
            steps.append(T.RandomCrop(size, padding=augmentation.random_crop_padding))
        steps.append(T.RandomHorizontalFlip(augmentation.hflip))
        if augmentation.rand_augment:
            steps.append(named_augmentation(augmentation.rand_augment, info.mean, size))
        elif augmentation.color_jitter:
            steps.append(T.ColorJitter(*[augmentation.color_jitter] * 3))
    return T.Compose([*steps, Normalized(info), RandomErasing(augmentation.erasing, mode="pixel", device="cpu")])


def _timms(info: DatasetInfo, size: tuple[int, int], **options: Any) -> list[Callable[[Any], Any]]:
    """Return timm's transforms of an image, without the last one, which makes a tensor."""
    transform: Any = create_transform((info.channels, *size), mean=info.mean, std=info.std, normalize=False, **options)
    return transform.transforms[:-1]


def _resize(size: tuple[int, int], augmentation: Augmentation) -> Callable[[Any], Any]:
    """Return the transform to `size`; it leaves images of this size as they are."""
    return T.Resize(size, _INTERPOLATION[augmentation.interpolation])


class ImageExamples(Examples):
    """Transformed images, (C, height, width), and their labels."""

    def example(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[int(self.rows[index])]
        return self.transform(image), label

    def collate(self, examples: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return images (B, C, height, width) and labels (B,)."""
        images, labels = zip(*examples, strict=True)
        return torch.stack(images), torch.tensor(labels)


class SizedBatches(Batches):
    """The same images at several sizes, of which each batch has one."""

    def __init__(self, of_sizes: Sequence[Batches]) -> None:
        self.of_sizes = of_sizes
        self.in_memory = of_sizes[0].in_memory

    def __len__(self) -> int:
        return len(self.of_sizes[0])

    def __getitem__(self, batch: BatchIndices) -> Any:
        return self.of_sizes[batch.size][batch]


class TensorImages(Batches):
    """Images of one size in one tensor (n, C, H, W), on any device; a batch is one indexing operation.

    Bytes are normalized batch by batch by looking them up in a table, so the numbers are the same on every device.

    Args:
        pixels: (n, C, H, W), uint8.
        labels: (n,).
        values: the value of each byte in each channel, (C, 256).
    """

    def __init__(self, pixels: Tensor, labels: np.ndarray, values: Tensor) -> None:
        self.tensors, self.values = pixels, values
        self.labels = torch.as_tensor(np.asarray(labels), dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, batch: BatchIndices) -> tuple[Tensor, Tensor]:
        indices = self._send(batch.indices)
        return self._normalize(self.tensors[indices]), self.labels[indices]

    def to(self, device: torch.device) -> Self:
        """Move the images to `device`, in place."""
        self.tensors, self.labels, self.values = (x.to(device) for x in (self.tensors, self.labels, self.values))
        return self

    def _send(self, numbers: np.ndarray) -> Tensor:
        """Return numbers on the device of the images; a GPU does not wait for them."""
        tensor, device = torch.from_numpy(numbers), self.labels.device
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    def _normalize(self, pixels: Tensor) -> Tensor:
        channels, count = self.values.shape
        first = torch.arange(channels, device=pixels.device)[:, None, None] * count
        return self.values.flatten()[pixels.int() + first]


class ShiftedImages(TensorImages):
    """Random crops with padding and random flips of images in one tensor, without a loop over images.

    The draws for an image are a function of seed, epoch, index and repeat, whatever the device. They differ from those
    of `ImageExamples`, but have the same distribution. The padding is black, like the border of the images.

    Args:
        pixels: (n, C, H, W), uint8.
        labels: (n,).
        values: the value of each byte in each channel, (C, 256).
        augmentation: `random_crop_padding` and `hflip`, and nothing else; see `shifts_only`.
        seed: seed of the draws.
    """

    def __init__(
        self, pixels: Tensor, labels: np.ndarray, values: Tensor, augmentation: Augmentation, seed: int
    ) -> None:
        super().__init__(F.pad(pixels, [augmentation.random_crop_padding] * 4), labels, values)
        self.size, self.padding, self.hflip = pixels.shape[-2:], augmentation.random_crop_padding, augmentation.hflip
        self.seed = seed

    def __getitem__(self, batch: BatchIndices) -> tuple[Tensor, Tensor]:
        numbers, places = draw(batch, self.seed, len(self)), 2 * self.padding + 1
        offsets = numbers % places, (numbers >> 20) % places  # in pixels
        flips = (numbers >> 40) % 2**20 < self.hflip * 2**20
        which, top, left, flipped = self._send(np.stack([batch.indices, *offsets, flips]))[..., None]
        height, width = self.size
        rows = top + torch.arange(height, device=top.device)
        columns = torch.arange(width, device=top.device)
        columns = left + torch.where(flipped > 0, columns.flip(0), columns)
        # (B, H, W, C), the indexed axes first
        pixels = self.tensors[which[..., None], :, rows[:, :, None], columns[:, None, :]]
        return self._normalize(pixels.permute(0, 3, 1, 2).contiguous()), self.labels[which[:, 0]]


def shifts_only(augmentation: Augmentation) -> bool:
    """Return whether an augmentation consists of crops with padding and flips only."""
    rest = (augmentation.scale, augmentation.color_jitter, augmentation.rand_augment, augmentation.erasing)
    return augmentation.random and not any(rest)


#: How images get another size than in training: scaled (zoom), or at the same scale on a larger canvas (canvas).
Mode = Literal["zoom", "canvas"]
#: Seed of the positions of the images, so that all models are tested on the same ones.
_PLACE_SEED = 28


class CanvasImages(Batches):
    """Images (C, h, w) of other batches, each at a random position on a canvas (C, H, W), or cropped to it.

    The position depends on the index alone. The canvas has the median color of the border of its image, per channel.

    Args:
        images: batches of images and labels.
        size: (H, W) of the canvas, in pixels.
    """

    def __init__(self, images: Batches, size: tuple[int, int]) -> None:
        self.images, self.size, self.in_memory = images, size, images.in_memory

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, batch: BatchIndices) -> tuple[Tensor, Tensor]:
        images, labels = self.images[batch]
        return torch.stack(
            [
                place(image, self.size, torch.Generator().manual_seed(_PLACE_SEED + index))
                for image, index in zip(images, batch.indices.tolist(), strict=True)
            ]
        ), labels


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
