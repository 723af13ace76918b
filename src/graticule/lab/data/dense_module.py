"""The images of a data set with boxes, masks or classes per pixel as batches for training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from graticule.lab.data.augmentation import DenseAugmentation
from graticule.lab.data.dense import DenseImages, DenseInfo, Target
from graticule.lab.data.dense_transforms import DenseTransform, EvaluationTransform, TrainingTransform, plain
from graticule.lab.data.images import Split, spread
from graticule.lab.data.module import ImageData
from graticule.lab.data.registry import loaded
from graticule.lab.data.sampling import Batches, Examples

#: The entries of a target that belong to boxes.
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
class DenseModule(ImageData):
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
        self.images, self.rows, infos = {}, {}, []
        limits: dict[Split, int | None] = {"train": self.limit_train, "test": self.limit_test}
        for split, limit in limits.items():
            self.images[split], self.info = load_dense(self.dataset, split, self.root, self.truth)
            infos.append(self.info)
            count = len(self.images[split])
            self.rows[split] = np.array(spread(count, limit or count))
        self.check_classes(*infos)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes (of pixels, if the targets are classes), in the order of the model's outputs."""
        return self.info.pixel_names or self.info.class_names if "classes" in self.truth else self.info.class_names

    def order_options(self) -> dict[str, Any]:
        """Return the groups of images by shape."""
        if not self.by_shape:
            return {}
        if (sizes := self.images["train"].sizes) is None:
            raise ValueError("`by_shape` must be False if images have no attribute `sizes`, (n, 2), got True.")
        height, width = sizes[self.rows["train"]].T
        return {"groups": (width <= height).astype(np.int64)}

    def train_batches(self) -> Batches:
        """Return the training images and their targets."""
        return self._examples("train", TrainingTransform(self.size, self.augmentation, self._normalization))

    def eval_batches(self, size: tuple[int, int]) -> Batches:
        """Return the test images fitted to `size`, and their targets, which are those of the original images."""
        return self._examples("test", EvaluationTransform(size, self._normalization))

    @property
    def _normalization(self) -> DenseInfo | None:
        return self.info if self.normalize else None

    def _examples(self, split: Split, transform: DenseTransform) -> DenseExamples:
        return DenseExamples(self.images[split], self.rows[split], transform, self.truth, self.seed)


@dataclass(eq=False, repr=False)
class DenseExamples(Examples):
    """Transformed images and targets, as plain tensors.

    Args:
        images: all images.
        rows: the indices of the images that are used.
        transform: the transform of image and target.
        truth: the kinds of targets that are kept.
        seed: seed of random transforms.
    """

    images: DenseImages
    rows: np.ndarray
    transform: DenseTransform
    truth: Sequence[str]
    seed: int

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, index: int) -> tuple[Tensor, Target]:
        """Return an image and its target."""
        image, target = self.images[int(self.rows[index])]
        entries = (*self.truth, "image_id", *(_OF_OBJECTS if "boxes" in self.truth else ()))
        image, target = self.transform(image, {name: value for name, value in target.items() if name in entries})
        return plain(image), {name: plain(value) for name, value in target.items()}

    def collate(self, examples: Sequence[Any]) -> tuple[list[Tensor], list[Target]]:
        """Return a list of images and one of targets."""
        images, targets = zip(*examples, strict=True)
        return list(images), list(targets)
