"""The images of a data set with boxes, masks or classes per pixel as batches for training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from graticule.lab.data.augmentation import DenseAugmentation
from graticule.lab.data.dense import DenseImages, DenseInfo, Target
from graticule.lab.data.dense_transforms import EvaluationTransform, TrainingTransform, plain
from graticule.lab.data.images import Split, spread
from graticule.lab.data.module import ImageData
from graticule.lab.data.registry import load_dataset
from graticule.lab.data.sampling import Batches, Examples

#: The entries of a target that belong to boxes.
_OF_OBJECTS = ("boxes", "labels", "iscrowd", "area")


@dataclass(eq=False, repr=False, kw_only=True)
class DenseModule(ImageData):
    """The batches of a data set for detection or segmentation: lists of images (3, height, width) and of their targets.

    `size` is the largest shorter and longer side, in which images are resized to fit; limits take evenly spaced images.

    Args:
        truth: the targets that are needed: boxes, and masks, or classes.
        augmentation: the augmentation of training images.
        by_shape: whether a batch has only wide or only tall images, which reduces padding.
        normalize: whether images are normalized; otherwise they are in [0, 1].
    """

    truth: Sequence[str]
    augmentation: DenseAugmentation = field(default_factory=DenseAugmentation)
    by_shape: bool = False
    normalize: bool = True

    def __post_init__(self) -> None:
        self.read()

    def read_split(self, split: Split, limit: int | None) -> tuple[DenseImages, np.ndarray, DenseInfo]:
        images, info = load_dataset(self.dataset, split, self.root, self.truth)
        return images, np.array(spread(len(images), limit or len(images))), info

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes (of pixels, if the targets are classes), in the order of the model's outputs."""
        return self.info.pixel_names or self.info.class_names if "classes" in self.truth else self.info.class_names

    def order_options(self) -> dict[str, Any]:
        if not self.by_shape:
            return {}
        if (sizes := self.images["train"].sizes) is None:
            raise ValueError("`by_shape` must be False if images have no attribute `sizes`, (n, 2), got True.")
        height, width = sizes[self.rows["train"]].T
        return {"groups": (width <= height).astype(np.int64)}

    def train_batches(self) -> Batches:
        transform = TrainingTransform(self.size, self.augmentation, self.info if self.normalize else None)
        return DenseExamples(self.images["train"], self.rows["train"], transform, self.seed)

    def eval_batches(self, size: tuple[int, int]) -> Batches:
        """Return the test images fitted to `size`, and their targets, which are in pixels of the original images."""
        transform = EvaluationTransform(size, self.info if self.normalize else None)
        return DenseExamples(self.images["test"], self.rows["test"], transform, self.seed)


class DenseExamples(Examples):
    """Transformed images and the entries of their targets that are `wanted`, as plain tensors."""

    def example(self, index: int) -> tuple[Tensor, Target]:
        image, target = self.images[int(self.rows[index])]
        entries = {*self.images.wanted, "image_id", *(_OF_OBJECTS if "boxes" in self.images.wanted else ())}
        image, target = self.transform(image, {name: value for name, value in target.items() if name in entries})
        return plain(image), {name: plain(value) for name, value in target.items()}

    def collate(self, examples: Sequence[Any]) -> tuple[list[Tensor], list[Target]]:
        images, targets = zip(*examples, strict=True)
        return list(images), list(targets)
