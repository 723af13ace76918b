"""The interface of a set of images: (image, label) pairs, and their classes and sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

Split = Literal["train", "test"]

#: Most classes of a data set: a damaged label must not determine the allocated memory.
MOST_CLASSES = 1_000_000


@dataclass(frozen=True)
class DatasetInfo:
    """The facts of a data set that a model and its transforms need.

    `size` is the native (height, width) of the images, None if they differ; `mean` and `std` are those of
    the training images per channel, in [0, 1].
    """

    name: str
    class_names: tuple[str, ...]
    channels: int
    size: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def num_classes(self) -> int:
        """Return the number of classes."""
        return len(self.class_names)


def check_class_names(found: Sequence[str], expected: Sequence[str], source: str, name: str = "data_root") -> None:
    """Check that the data of the argument `name` have the classes that `source` was trained on, by name and in order.

    Raises:
        ValueError: naming the classes that differ, since the outputs would mean other classes.
    """
    found, expected = tuple(found), tuple(expected)
    if found == expected:
        return
    here, there = (
        [name for name in names if name not in set(others)] for names, others in ((found, expected), (expected, found))
    )
    if here or there:
        differing = f"only in the data: {_listed(here)}; only in {source}: {_listed(there)}"
    else:
        number = next(n for n, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1])
        differing = f"the order differs: class {number} is {found[number]!r}, and {expected[number]!r} in {source}"
    raise ValueError(
        f"`{name}` must have the classes of {source}, by name and in order ({len(expected)}), got {len(found)}; "
        f"{differing}. Restore the names, or train another run."
    )


def same_classes(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Return whether two data sets have the same classes in the same order, as far as the classes have names.

    Classes without names are called "0", "1" and so on, and match any other classes of the same number.
    """
    ours, theirs = tuple(ours), tuple(theirs)
    numbers = tuple(map(str, range(len(ours))))
    return ours == theirs or (len(ours) == len(theirs) and numbers in (ours, theirs))


def class_labels(found: Sequence[str], names: Sequence[str], num_classes: int) -> list[int] | None:
    """Return the output of a model for each class of data; None if they are not the classes of the model.

    Classes are matched by name. Only if those of the model or of the data have no names are they taken in order.

    Args:
        found: the classes of the data.
        names: the classes of the model, in the order of its outputs; empty if it does not name them.
        num_classes: number of outputs of the model.
    """
    if found and set(found) <= set(names):
        return [list(names).index(name) for name in found]
    in_order = len(found) == num_classes and (not names or same_classes(found, names))
    return list(range(num_classes)) if in_order else None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "") if names else "none"


class ArrayImages(Dataset[tuple[Image.Image, int]]):
    """Images in memory: `images` (n, H, W) or (n, H, W, 3), uint8, and `labels` (n,)."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        if len(images) != len(labels):
            raise ValueError(f"`labels` must have one entry per image, {len(images)}, got {len(labels)}.")
        self.images = images
        self.labels = labels.astype(np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]), int(self.labels[index])


def fingerprint(count: int, parts: Iterable[bytes | np.ndarray]) -> dict[str, Any]:
    """Return the number of examples of a split, and a hash of their labels and of some contents, `parts`."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes())
    return {"examples": count, "sha256": digest.hexdigest()}


def spread(count: int) -> list[int]:
    """Return the indices of the examples whose contents are part of a fingerprint, evenly spaced."""
    return [index * count // min(count, 32) for index in range(min(count, 32))]


def balanced_subset(labels: Sequence[int] | np.ndarray, count: int) -> list[int]:
    """Return at most `count` indices, balanced over the classes as far as possible, in increasing order.

    A class gives its first images; the choice depends on labels and count alone.

    Raises:
        ValueError: if `count` is below 1.
    """
    labels = np.asarray(labels)
    if count < 1:
        raise ValueError(f"`limit` must be at least 1, got {count}.")
    rank = np.empty(len(labels), dtype=np.int64)  # of an image within its class
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        rank[of_class] = np.arange(len(of_class))
    return sorted(np.lexsort((labels, rank))[:count].tolist())


def class_share(labels: Sequence[int] | np.ndarray, share: float, seed: int) -> list[int]:
    """Return the indices of `share` of every class's images, chosen by `seed`, at least one each, in increasing order.

    A class of n images gives n times `share`, rounded. The choice depends on labels, share and seed alone, with any
    version of NumPy, since its `RandomState` is frozen.

    Raises:
        ValueError: if `share` is not in (0, 1] or the seed is negative.
    """
    if not 0 < share <= 1:
        raise ValueError(f"`train_share` must be in (0, 1], such as 0.5 for a half, got {share}.")
    if seed < 0:
        raise ValueError(f"`share_seed` must be at least 0, got {seed}.")
    labels = np.asarray(labels)
    random = np.random.RandomState(seed)
    chosen: list[int] = []
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        count = max(int(len(of_class) * share + 0.5), 1)
        chosen += random.permutation(of_class)[:count].tolist()
    return sorted(chosen)


def stratified_split(labels: np.ndarray, test_per_class: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split indices into train and test with `test_per_class` of every class in test, chosen by `seed`."""
    generator = torch.Generator().manual_seed(seed)
    test = []
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        order = torch.randperm(len(of_class), generator=generator).numpy()
        test.append(of_class[order[:test_per_class]])
    chosen = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen
