"""A data set, its transforms and its batches, as loaders."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from timm.data.mixup import Mixup
from torch.utils.data import DataLoader, Subset

from graticule.lab.data.augmentation import Augmentation
from graticule.lab.data.images import ArrayImages, DatasetInfo, EncodedImages, Split, fingerprint, spread
from graticule.lab.data.registry import DATASETS, load_dataset
from graticule.lab.data.sampling import BatchOrder, EpochSampler, Loading, balanced_subset, class_share
from graticule.lab.data.transforms import (
    CanvasImages,
    Mode,
    SeededImages,
    ShiftedImages,
    SizedImages,
    TensorImages,
    TransformedImages,
    byte_values,
    evaluation_transform,
    shifts_only,
    training_transform,
)

#: Images with at most this many bytes in total are transformed once and kept in the memory of the device.
_IN_MEMORY_BYTES = 256_000_000


def build_mixup(
    *, mixup: float, cutmix: float, prob: float, switch_prob: float, label_smoothing: float, num_classes: int
) -> Mixup | None:
    """Build timm's Mixup, which returns soft labels of (B, num_classes); None if both alphas are 0."""
    if mixup < 0 or cutmix < 0:
        raise ValueError(f"`mixup` and `cutmix` must not be negative, got {mixup} and {cutmix}.")
    if mixup == cutmix == 0:
        return None
    return Mixup(
        mixup_alpha=mixup,
        cutmix_alpha=cutmix,
        prob=prob,
        switch_prob=switch_prob,
        label_smoothing=label_smoothing,
        num_classes=num_classes,
    )


@dataclass(eq=False, repr=False)
class DataModule(Loading):
    """The batches of a data set for training and for evaluation at any size.

    Args:
        dataset: one of `list_datasets()`.
        root: the folder of the data set, if it has one.
        size: (height, width) in training, and in evaluation unless another is given.
        train_sizes: (height, width) of the training batches; each step has one of them. Only `size` by default.
        batch_size, eval_batch_size: images per batch in training and in evaluation.
        workers: processes that load images; 0 loads them in the main process.
        seed: seed of order and augmentation.
        augmentation: the augmentation of training images.
        train_share: use only this share of the training images of each class, chosen by `share_seed`, which is separate
            from `seed`, so that runs with several seeds see the same images.
        limit_train, limit_test: use only this many images, balanced over the classes.
        drop_last: leave out a last training batch that is not full, which mixing in pairs needs.
        repeats: repeated augmentation: every training image comes this many times in a row; the length of an epoch does
            not change.
    """

    dataset: str
    _: KW_ONLY
    root: str | Path | None = None
    size: tuple[int, int]
    batch_size: int = 64
    eval_batch_size: int = 256
    workers: int = 0
    seed: int = 0
    augmentation: Augmentation = field(default_factory=Augmentation)
    train_share: float | None = None
    share_seed: int = 0
    limit_train: int | None = None
    limit_test: int | None = None
    drop_last: bool = False
    repeats: int = 1
    train_sizes: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        if self.drop_last and self.batch_size % 2:
            raise ValueError(f"`batch_size` must be even if images are mixed in pairs, got {self.batch_size}.")
        DATASETS[self.dataset]  # refuses an unknown name
        if len(self.size) != 2:
            raise ValueError(f"`size` must be the height and width of images, got {self.size}.")
        self.train_sizes = tuple(self.train_sizes) or (self.size,)
        self.augmentation = self.augmentation or Augmentation()
        self.limits: dict[Split, int | None] = {"train": self.limit_train, "test": self.limit_test}
        self.device = torch.device("cpu")
        self.info: DatasetInfo
        self._images: dict[Split, Any] = {}
        self._train: Any = None

    def to(self, device: torch.device) -> Self:
        """Keep small images on `device`, where their batches are made; the same as on the CPU."""
        if device != self.device:
            self.device, self._train = device, None
        return self

    def setup(self, stage: str | None = None) -> None:
        """Find the images and check them as far as possible without reading each."""
        if self._images:
            return
        for split, limit in self.limits.items():
            images, self.info = load_dataset(self.dataset, split, self.root)
            if split == "train" and self.train_share is not None:
                images = _Chosen(images, class_share(images.labels, self.train_share, self.share_seed))
            if limit is not None:
                images = _Chosen(images, balanced_subset(images.labels, limit))
            self._images[split] = images
        if len(self._images["train"]) < self.batch_size and self.drop_last:
            raise ValueError(
                f"`batch_size` must not exceed the number of training images, {len(self._images['train'])}, if "
                f"images are mixed in pairs, got {self.batch_size}."
            )

    @property
    def skipped(self) -> list[Path]:
        """The broken images that training found and left out."""
        return getattr(self._images.get("train"), "skipped", [])

    def fingerprint(self) -> dict[str, Any]:
        """Return the number and a hash of the images of each split, which tell whether they are the same."""
        return {
            split: fingerprint(
                len(images), (np.asarray(images.labels), *(_content(images, index) for index in spread(len(images))))
            )
            for split, images in self._images.items()
        }

    def train_order(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> BatchOrder:
        """Return the order of the images in the batches of one of `world_size` processes."""
        images = self._images["train"]
        shares = world_size * accumulate
        if self.drop_last and self.batch_size % (2 * shares):
            raise ValueError(
                f"`batch_size` must give each of {shares} micro-batches an even number of images if they "
                f"are mixed in pairs, got {self.batch_size}."
            )
        sampler = EpochSampler(len(images), self.seed, repeats=self.repeats)
        sizes = len(self.train_sizes) if len(self.train_sizes) > 1 else None
        shared = {"rank": rank, "world_size": world_size, "parts": accumulate}
        return BatchOrder(sampler, self.batch_size, drop_last=self.drop_last, sizes=sizes, **shared)

    def train_dataloader(self, order: BatchOrder | None = None) -> DataLoader[Any]:
        """Return batches of images (B, C, height, width) and labels (B,), whose order differs from epoch to epoch."""
        if self._train is None:
            images = [self._train_images(size) for size in self.train_sizes]
            self._train = images[0] if len(images) == 1 else SizedImages(images)
        return self.load(self._train, batch_sampler=order or self.train_order())

    def _train_images(self, size: tuple[int, int]) -> Any:
        """Return the training images at `size`, in memory if those of all sizes fit."""
        images = self._images["train"]
        in_memory = self._fits_in_memory(images, *self.train_sizes)
        if in_memory and not self.augmentation.random:
            return self._tensor_images(images, size)
        if in_memory and shifts_only(self.augmentation):
            return self._tensor_images(images, size, ShiftedImages, self.augmentation, self.seed)
        return SeededImages(images, training_transform(self.info, size, self.augmentation), self.seed)

    def eval_dataloader(
        self, size: tuple[int, int], rank: int = 0, world_size: int = 1, mode: Mode = "zoom"
    ) -> DataLoader[Any]:
        """Return batches of the test images at `size` = (height, width), each once over all processes.

        Every process gets the same number; padding images have the label `PADDING`.

        Args:
            mode: zoom scales the images to `size`; canvas keeps the scale of training and puts each image at a random
                position on an empty canvas of `size`, or crops it.
        """
        images: Any = self._images["test"]
        if mode == "canvas" and size != self.size:
            images = CanvasImages(self._evaluation_images("test", self.size), size)
        elif self._fits_in_memory(images, size):
            images = self._tensor_images(images, size)
        else:
            images = self._evaluation_images("test", size)
        return self.load_test(images, self.eval_batch_size, rank, world_size)

    @property
    def num_test(self) -> int:
        """Return the number of test images."""
        return len(self._images["test"])

    def test_labels(self) -> np.ndarray:
        """Return the labels of the test images, (n,)."""
        return np.asarray(self._images["test"].labels)

    def test_files(self) -> list[Path]:
        """Return the files of the test images; none for images that are not in files."""
        sources = [_source(self._images["test"], index) for index in range(self.num_test)]
        return [images.place(index) for images, index in sources if isinstance(images, EncodedImages)]

    def test_images(self, size: tuple[int, int], indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return test images by number, (n, C, height, width), and their labels, (n,)."""
        for index in indices:
            if not 0 <= index < self.num_test:
                raise ValueError(f"`image` must be from 0 to {self.num_test - 1}, the last test image, got {index}.")
        return self._prepare("test", size, indices)

    def _prepare(
        self, split: Split, size: tuple[int, int], indices: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = list(map(self._evaluation_images(split, size).__getitem__, indices))
        return torch.stack([image for image, _ in pairs]), torch.tensor([label for _, label in pairs])

    def stored_sizes(self, split: Split, most: int = 32) -> list[tuple[int, int]]:
        """Return (height, width) of at most `most` images of a split, as stored, evenly spaced."""
        images = self._images[split]
        return [images[index][0].size[::-1] for index in spread(len(images), most)]

    def spread_images(self, split: Split, size: tuple[int, int], most: int) -> torch.Tensor:
        """Return at most `most` images of a split, evenly spaced, without augmentation: (n, C, height, width)."""
        return self._prepare(split, size, spread(len(self._images[split]), most))[0]

    def spread_test_images(self, size: tuple[int, int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `count` test images as `test_images` does, evenly spaced, since many data sets are sorted by class."""
        if not 1 <= count <= self.num_test:
            raise ValueError(f"`images` must be from 1 to the number of test images, {self.num_test}, got {count}.")
        return self.test_images(size, spread(self.num_test, count))

    def _evaluation_images(self, split: Split, size: tuple[int, int]) -> TransformedImages:
        return TransformedImages(self._images[split], evaluation_transform(self.info, size, self.augmentation))

    def _tensor_images(
        self, images: Any, size: tuple[int, int], kind: Callable[..., TensorImages] = TensorImages, *further: Any
    ) -> TensorImages:
        """Return images on the device, as bytes, by `kind`, which takes `further` arguments."""
        same = size == self.info.size
        transform = None if same else evaluation_transform(self.info, size, self.augmentation, normalize=False)
        return kind(images, transform, byte_values(self.info), *further).to(self.device)

    def _fits_in_memory(self, images: Any, *sizes: tuple[int, int]) -> bool:
        values = len(images) * sum(map(math.prod, sizes)) * self.info.channels
        return isinstance(_source(images, 0)[0], ArrayImages) and values <= _IN_MEMORY_BYTES


class _Chosen(Subset[Any]):
    """Some of the images, with the labels and the broken files of the whole set."""

    def __init__(self, images: Any, indices: list[int]) -> None:
        super().__init__(images, indices)
        self.source = images
        self.labels = np.asarray(images.labels)[indices]

    @property
    def pixels(self) -> np.ndarray:
        """The images of `ArrayImages`."""
        return self.source.pixels[self.indices]

    @property
    def skipped(self) -> list[Path]:
        return getattr(self.source, "skipped", [])


def _source(images: Any, index: int) -> tuple[Any, int]:
    """Return the whole set that an image was chosen from, and its index there."""
    while isinstance(images, Subset):
        images, index = images.dataset, images.indices[index]
    return images, index


def _content(images: Any, index: int) -> bytes | np.ndarray:
    """Return the stored bytes of an image, or its pixels."""
    images, index = _source(images, index)
    return images.read(index) if isinstance(images, EncodedImages) else np.asarray(images[index][0])
