"""A data set with boxes, masks or classes per pixel, its transforms and its batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from graticule.lab.data.augmentation import DenseAugmentation
from graticule.lab.data.dense import DenseImages, DenseInfo, Target
from graticule.lab.data.dense_transforms import DenseTransform, EvaluationTransform, TrainingTransform, plain
from graticule.lab.data.images import UNREADABLE, Split, fingerprint, spread
from graticule.lab.data.registry import loaded
from graticule.lab.data.sampling import PADDING, BatchOrder, EpochSampler, GroupSampler, Key, Loading
from graticule.lab.data.transforms import drawing

#: The entries of a target that belong to boxes, besides the boxes themselves.
_OF_OBJECTS = ("boxes", "labels", "iscrowd", "area")


def load_dense(name: str, split: Split, root: str | Path | None, truth: Sequence[str]) -> tuple[DenseImages, DenseInfo]:
    """Load a split of a data set with the targets `truth`, of boxes, masks and classes."""
    images, info = loaded(name, split, root)
    kinds = info.truth if isinstance(info, DenseInfo) else ("one class per image",)
    if missing := [kind for kind in truth if kind not in kinds]:
        raise ValueError(f"`dataset` must have {' and '.join(missing)}, got {name!r}, which has {' and '.join(kinds)}.")
    assert isinstance(info, DenseInfo)
    images.wanted = frozenset(truth)
    return images, info


@dataclass(eq=False, repr=False)
class DenseModule(Loading):
    """The batches of a data set for detection or segmentation: lists of images (3, height, width) and of their targets.

    Args:
        dataset: the name of the data set.
        truth: the targets that are needed: boxes, and masks, or classes.
        root: the folder of the data set, if it has one.
        size: the largest shorter and longer side, in pixels: images are resized to fit in it.
        batch_size: images per training batch.
        eval_batch_size: images per batch in evaluation.
        workers: processes that load images; 0 loads them in the main process.
        seed: seed of order and augmentation.
        augmentation: the augmentation of training images.
        by_shape: whether a batch has only wide or only tall images, which reduces padding.
        normalize: whether images are normalized; otherwise they are in [0, 1].
        limit_train: use only this many training images, evenly spaced.
        limit_test: use only this many test images, evenly spaced.
    """

    dataset: str
    _: KW_ONLY
    truth: Sequence[str]
    root: str | Path | None = None
    size: tuple[int, int]
    batch_size: int = 16
    eval_batch_size: int = 8
    workers: int = 0
    seed: int = 0
    augmentation: DenseAugmentation = field(default_factory=DenseAugmentation)
    by_shape: bool = False
    normalize: bool = True
    limit_train: int | None = None
    limit_test: int | None = None

    def __post_init__(self) -> None:
        self.truth = tuple(self.truth)
        self.augmentation = self.augmentation or DenseAugmentation()
        self.images: dict[Split, DenseImages] = {}
        self.indices: dict[Split, np.ndarray] = {}
        limits: dict[Split, int | None] = {"train": self.limit_train, "test": self.limit_test}
        for split, limit in limits.items():
            images, self.info = load_dense(self.dataset, split, self.root, self.truth)
            self.images[split] = images
            self.indices[split] = np.array(spread(len(images), limit or len(images)))

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes (of pixels, if the targets are classes), in the order of the model's outputs."""
        return self.info.pixel_names or self.info.class_names if "classes" in self.truth else self.info.class_names

    @property
    def skipped(self) -> list[Path]:
        """The broken images that training found and left out."""
        return self.images["train"].skipped

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of each split, and hashes of 32 images and targets, and of all sizes and times."""
        return {
            split: fingerprint(
                len(chosen),
                (part for index in spread(len(chosen)) for part in self._parts(split, int(chosen[index]))),
                (file for index in chosen for file in self.images[split].files_of(int(index))),
            )
            for split, chosen in self.indices.items()
        }

    def _parts(self, split: Split, index: int) -> Iterator[bytes | np.ndarray]:
        """Yield the contents of an image and its targets; a broken one has no targets."""
        images = self.images[split]
        stored = images.place(index)
        if in_file := stored.is_file():
            yield stored.read_bytes()
        try:
            image, target = images.example(index)
        except UNREADABLE:
            return
        if not in_file:
            yield image.numpy()
        yield from (plain(target[name]).numpy() for name in (*_OF_OBJECTS[:2], *self.truth) if name in target)

    @property
    def num_test(self) -> int:
        """Return the number of test images."""
        return len(self.indices["test"])

    def train_order(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> BatchOrder:
        """Return the order of the images in the batches of one of `world_size` processes."""
        sampler = EpochSampler(len(self.indices["train"]), self.seed)
        if self.by_shape:
            if (sizes := self.images["train"].sizes) is None:
                raise ValueError("`by_shape` must be False if images have no attribute `sizes`, (n, 2), got True.")
            height, width = sizes[self.indices["train"]].T
            sampler = GroupSampler((width <= height).astype(np.int64), self.batch_size, self.seed)
        return BatchOrder(sampler, self.batch_size, rank=rank, world_size=world_size, parts=accumulate)

    def train_dataloader(self, order: BatchOrder | None = None) -> DataLoader[Any]:
        """Return batches of images and targets, in another order each epoch."""
        transform = TrainingTransform(self.size, self.augmentation, self.info if self.normalize else None)
        examples = DenseExamples(self.images["train"], self.indices["train"], transform, self.truth, self.seed)
        return self.load(examples, _lists, batch_sampler=order or self.train_order())

    def eval_dataloader(self, size: tuple[int, int], rank: int = 0, world_size: int = 1) -> DataLoader[Any]:
        """Return batches of the test images fitted to `size`, each once over all processes, and of their targets.

        The targets are those of the original images. A padding image has the `image_id` `PADDING`.
        """
        examples = DenseExamples(self.images["test"], self.indices["test"], self.evaluation(size), self.truth)
        return self.load_test(examples, self.eval_batch_size, rank, world_size, _lists)

    def evaluation(self, size: tuple[int, int]) -> EvaluationTransform:
        """Return the transform of evaluation at `size`."""
        return EvaluationTransform(size, self.info if self.normalize else None)


@dataclass(eq=False, repr=False)
class DenseExamples(Dataset[tuple[Tensor, Target]]):
    """Transformed images and targets, as plain tensors.

    Args:
        images: all images.
        indices: the images that are used.
        transform: the transform of image and target.
        truth: the kinds of targets that are kept.
        seed: seed of random transforms, whose draws are a function of seed and key.
    """

    images: DenseImages
    indices: np.ndarray
    transform: DenseTransform
    truth: Sequence[str]
    seed: int = 0

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, key: int | Key) -> tuple[Tensor, Target]:
        index, draws = (key[1], drawing(self.seed, key)) if isinstance(key, tuple) else (key, nullcontext())
        image, target = self.images[int(self.indices[index if index >= 0 else -1 - index])]
        entries = (*self.truth, "image_id", *(_OF_OBJECTS if "boxes" in self.truth else ()))
        target = {name: value for name, value in target.items() if name in entries}
        with draws:
            image, target = self.transform(image, target)
        if index < 0:
            target["image_id"] = PADDING
        return plain(image), {name: plain(value) for name, value in target.items()}


def _lists(examples: list[tuple[Tensor, Target]]) -> tuple[list[Tensor], list[Target]]:
    images, targets = zip(*examples, strict=True)
    return list(images), list(targets)
