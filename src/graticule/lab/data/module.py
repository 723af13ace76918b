"""The images of a data set as batches for training and evaluation."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any, Self

import numpy as np
import torch
from timm.data.mixup import Mixup

from graticule.lab.data.augmentation import Augmentation
from graticule.lab.data.device_transforms import AugmentedImages, augments_on_device
from graticule.lab.data.images import ArrayImages, DatasetInfo, EncodedImages, Split, StoredImages, fingerprint, spread
from graticule.lab.data.registry import load_dataset
from graticule.lab.data.sampling import Batches, BatchIndices, BatchOrder, TaskData, balanced_subset, class_share
from graticule.lab.data.transforms import (
    CanvasImages,
    ImageExamples,
    Mode,
    ShiftedImages,
    SizedBatches,
    TensorImages,
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
    if mixup == cutmix == 0:
        return None
    return Mixup(mixup, cutmix, None, prob, switch_prob, "batch", True, label_smoothing, num_classes)


@dataclass(eq=False, repr=False)
class ImageData(TaskData):
    """The images of both splits of a data set, and the rows of them that are used.

    Args:
        dataset: one of `list_datasets()`.
        root: the folder of the data set, if it has one.
        size: of the images in training, and in evaluation unless another is given, in pixels.
        batch_size, eval_batch_size: images per batch in training and in evaluation.
        workers: processes that load images; 0 loads them in the main process.
        seed: seed of order and augmentation.
        limit_train, limit_test: use only this many images.
    """

    dataset: str
    _: KW_ONLY
    root: str | Path | None = None
    size: tuple[int, int]
    batch_size: int = 64
    eval_batch_size: int = 256
    workers: int = 0
    seed: int = 0
    limit_train: int | None = None
    limit_test: int | None = None

    def read(self) -> None:
        """Find the images and check them as far as possible without reading each."""
        self.images: dict[Split, Any] = {}
        self.rows: dict[Split, np.ndarray] = {}
        limits: dict[Split, int | None] = {"train": self.limit_train, "test": self.limit_test}
        classes: dict[Split, tuple[str, ...]] = {}
        for split, limit in limits.items():
            self.images[split], self.rows[split], self.info = self.read_split(split, limit)
            classes[split] = self.info.class_names
        if classes["train"] != classes["test"]:
            ours, others = {*classes["train"]}, {*classes["test"]}
            alone = {"training": sorted(ours - others), "evaluation": sorted(others - ours)}
            listed = [f"in {split} only: {shorten(', '.join(names), 80)}" for split, names in alone.items() if names]
            raise ValueError(
                f"`data_root` must have the same classes in training and evaluation; "
                f"{'; '.join(listed) or 'got another order'} ({self.info.name})."
            )

    @abstractmethod
    def read_split(self, split: Split, limit: int | None) -> tuple[Any, np.ndarray, Any]:
        """Return the images of a split, the rows of at most `limit` of them, and their `DatasetInfo`."""

    @property
    def skipped(self) -> list[Path]:
        return getattr(self.images.get("train"), "skipped", [])

    @property
    def num_train(self) -> int:
        return len(self.rows["train"])

    @property
    def num_test(self) -> int:
        return len(self.rows["test"])

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of each split, and a hash of all labels, 32 images, and the size of every file."""
        return {
            split: fingerprint(len(rows), self._contents(split), self._files(split))
            for split, rows in self.rows.items()
        }

    def _contents(self, split: Split) -> Iterator[bytes | np.ndarray]:
        images, rows = self.images[split], self.rows[split]
        if hasattr(images, "labels"):
            yield np.asarray(images.labels)[rows]
        for row in rows[spread(len(rows))].tolist():
            yield from images.content(row) if isinstance(images, StoredImages) else (np.asarray(images[row][0]),)

    def _files(self, split: Split) -> Iterable[Path]:
        images = self.images[split]
        rows = self.rows[split].tolist() if isinstance(images, StoredImages) else ()
        return (file for row in rows for file in images.files_of(row))


@dataclass(eq=False, repr=False, kw_only=True)
class DataModule(ImageData):
    """The batches of a data set for training and for evaluation at any size.

    Args:
        train_sizes: (height, width) of the training batches; each step has one of them. Only `size` by default.
        augmentation: the augmentation of training images.
        val_split: hold this share of the training images of each class out as the test images, the same with any seed.
        train_share: use only this share of the training images of each class, the same with any seed.
        drop_last: leave out a last training batch that is not full, which mixing in pairs needs.
        repeats: repeated augmentation: every training image comes this many times in a row; the length of an epoch does
            not change.
    """

    augmentation: Augmentation = field(default_factory=Augmentation)
    val_split: float | None = None
    train_share: float | None = None
    drop_last: bool = False
    repeats: int = 1
    train_sizes: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        if len(self.size) != 2:
            raise ValueError(f"`size` must be the height and width of images, got {self.size}.")
        self.train_sizes = tuple(self.train_sizes) or (self.size,)
        self.augmentation = self.augmentation or Augmentation()
        self.device = torch.device("cpu")
        self._train: Batches | None = None
        self.read()

    def read_split(self, split: Split, limit: int | None) -> tuple[Any, np.ndarray, DatasetInfo]:
        images, info = load_dataset(self.dataset, split if self.val_split is None else "train", self.root)
        labels = np.asarray(images.labels)
        rows = np.arange(len(labels))
        if self.val_split is not None:
            rows = self._split_rows(labels, self.val_split)[split]
            images.skip_broken = split == "train"
        if split == "train" and self.train_share is not None:
            rows = rows[class_share(labels[rows], self.train_share)]
        return images, rows if limit is None else rows[balanced_subset(labels[rows], limit)], info

    def _split_rows(self, labels: np.ndarray, share: float) -> dict[Split, np.ndarray]:
        """Return the training images that stay, and those that are held out."""
        held_out = class_share(labels, share)
        rows = np.setdiff1d(np.arange(len(labels)), held_out)
        if len(np.unique(labels[rows])) < len(np.unique(labels)):
            raise ValueError(f"`val_split` must leave every class an image to train on, got {share}.")
        return {"train": rows, "test": np.array(held_out)}

    def to(self, device: torch.device) -> Self:
        """Keep small images on `device`, where their batches are made; the same as on the CPU."""
        if device != self.device:
            self.device, self._train = device, None
        return self

    def order_options(self) -> dict[str, Any]:
        return {"drop_last": self.drop_last, "repeats": self.repeats, "sizes": len(self.train_sizes)}

    def train_order(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> BatchOrder:
        """Return the order of the images in the batches of one of `world_size` processes."""
        if self.drop_last and self.batch_size % (pairs := 2 * world_size * accumulate):
            raise ValueError(
                f"`batch_size` must be a multiple of {pairs}, so that the images of each of {pairs // 2} micro-batches "
                f"can be mixed in pairs, got {self.batch_size}."
            )
        return super().train_order(rank, world_size, accumulate)

    def train_batches(self) -> Batches:
        """Return the training images (B, C, height, width) and labels (B,)."""
        if self._train is None:
            batches = [self._train_images(size) for size in self.train_sizes]
            self._train = batches[0] if len(batches) == 1 else SizedBatches(batches)
        return self._train

    def _train_images(self, size: tuple[int, int]) -> Batches:
        """Return the training images at `size`, in memory if the images of all sizes fit."""
        if self._fits_in_memory("train", *self.train_sizes):
            if not self.augmentation.random:
                return TensorImages(*self._tensors("train", size)).to(self.device)
            if shifts_only(self.augmentation):
                tensors = self._tensors("train", size)
                return ShiftedImages(*tensors, self.augmentation, self.seed).to(self.device)
            if self.device.type == "cuda" and self.repeats == 1 and augments_on_device(self.info, self.augmentation):
                pixels, labels, _ = self._tensors("train", self.info.size or size)
                images = AugmentedImages(pixels, labels, self.info, size, self.augmentation, self.seed)
                return images.to(self.device)  # on the CPU, Pillow is faster
        transform = training_transform(self.info, size, self.augmentation)
        return ImageExamples(self.images["train"], self.rows["train"], transform, self.seed)

    def eval_batches(self, size: tuple[int, int], mode: Mode = "zoom") -> Batches:
        """Return the test images at `size` = (height, width).

        Args:
            size: in pixels.
            mode: zoom scales the images to `size`; canvas keeps the scale of training and puts each image at a random
                position on an empty canvas of `size`, or crops it.
        """
        if mode == "canvas" and size != self.size:
            return CanvasImages(self._evaluation_images("test", self.size), size)
        if self._fits_in_memory("test", size):
            return TensorImages(*self._tensors("test", size)).to(self.device)
        return self._evaluation_images("test", size)

    def test_labels(self) -> np.ndarray:
        """Return the labels of the test images, (n,)."""
        return np.asarray(self.images["test"].labels)[self.rows["test"]]

    def test_files(self) -> list[Path]:
        """Return the files of the test images; none for images that are not in files."""
        images = self.images["test"]
        return [images.place(row) for row in self.rows["test"].tolist()] if isinstance(images, EncodedImages) else []

    def test_images(self, size: tuple[int, int], indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return test images by number, (n, C, height, width), and their labels, (n,)."""
        for index in indices:
            if not 0 <= index < self.num_test:
                raise ValueError(f"`image` must be from 0 to {self.num_test - 1}, the last test image, got {index}.")
        images, labels = self._evaluation_images("test", size)[BatchIndices(np.asarray(indices))]
        return images, labels

    def stored_sizes(self, split: Split) -> list[tuple[int, int]]:
        """Return (height, width) of some images of a split, as stored, evenly spaced."""
        rows = self.rows[split]
        return [self.images[split][row][0].size[::-1] for row in rows[spread(len(rows))].tolist()]

    def spread_images(self, split: Split, size: tuple[int, int], most: int) -> torch.Tensor:
        """Return at most `most` images of a split, evenly spaced, without augmentation: (n, C, height, width)."""
        chosen = BatchIndices(np.array(spread(len(self.rows[split]), most)))
        images: torch.Tensor = self._evaluation_images(split, size)[chosen][0]
        return images

    def spread_test_images(self, size: tuple[int, int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `count` test images as `test_images` does, evenly spaced, since many data sets are sorted by class."""
        if not 1 <= count <= self.num_test:
            raise ValueError(f"`images` must be from 1 to the number of test images, {self.num_test}, got {count}.")
        return self.test_images(size, spread(self.num_test, count))

    def _evaluation_images(self, split: Split, size: tuple[int, int]) -> ImageExamples:
        transform = evaluation_transform(self.info, size, self.augmentation)
        return ImageExamples(self.images[split], self.rows[split], transform)

    def _tensors(self, split: Split, size: tuple[int, int]) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
        """Return the bytes of images in memory, (n, C, height, width), their labels, and the value of each byte."""
        images, rows = self.images[split], self.rows[split]
        if size == self.info.size:
            stored = torch.from_numpy(images.pixels[rows])
            pixels = stored[:, None] if stored.ndim == 3 else stored.permute(0, 3, 1, 2).contiguous()
        else:
            transform = evaluation_transform(self.info, size, self.augmentation, normalize=False)
            pixels = torch.stack([transform(images[row][0]) for row in rows.tolist()])
        return pixels, np.asarray(images.labels)[rows], byte_values(self.info)

    def _fits_in_memory(self, split: Split, *sizes: tuple[int, int]) -> bool:
        values = len(self.rows[split]) * sum(map(math.prod, sizes)) * self.info.channels
        return isinstance(self.images[split], ArrayImages) and values <= _IN_MEMORY_BYTES
