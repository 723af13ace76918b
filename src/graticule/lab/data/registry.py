"""Data sets by name, of the package and of plugins."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from graticule.lab.data.dense import DenseImages, DenseInfo
from graticule.lab.data.images import ONE_CLASS, DatasetInfo, Split
from graticule.registry.checks import known_name
from graticule.registry.registry import NameTable

#: A function of a split and the folder of the data or None that returns (image, label) pairs and their `DatasetInfo`.
Loader = Callable[[Split, Path | None], tuple[Any, DatasetInfo]]
F = TypeVar("F", bound=Callable[..., Any])

DATASETS: NameTable[str, Loader] = NameTable("dataset", "graticule.lab.data.sets")


def register_dataset(name: str) -> Callable[[F], F]:
    """Return a decorator that registers a function that loads images, for `--dataset` and `load_dataset`.

    The function takes the split, "train" or "test", and the folder (`--data-root`) or None, and returns the images and
    a `DatasetInfo`. The images have a length, return (PIL image, label) for an index, and have an array `labels`, (n,):
    `ArrayImages` holds arrays, and a subclass of `EncodedImages` decodes files.

    Raises:
        ValueError: if `name` is not an identifier or already taken.
        TypeError: if the decorated object is not a function of two arguments.

    Example::

        @graticule.register_dataset("noise")
        def noise(split, root):
            images = np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)
            info = DatasetInfo("noise", ("dark", "light"), 1, (8, 8), (0.5,), (0.3,))
            return ArrayImages(images, images.mean((1, 2)) > 127), info
    """

    def check(function: F) -> F:
        if not inspect.isfunction(function):
            raise TypeError(f"the dataset {name!r} must be a function that loads it, got {function!r}.")
        try:
            inspect.signature(function).bind("train", None)
        except TypeError as error:
            raise TypeError(f"the dataset {name!r} must be a function of split and folder: {error}.") from None
        return function

    return DATASETS.register(name, check)


def list_datasets() -> list[str]:
    """List the valid names of `dataset`."""
    return sorted(DATASETS)


def load_dataset(
    name: str, split: Split, root: str | Path | None = None, truth: Sequence[str] = (ONE_CLASS,)
) -> tuple[Any, Any]:
    """Load a split of a data set: pairs of an image and its label or target, and their `DatasetInfo`.

    Args:
        name: one of `list_datasets()`, or hfds/NAME on the Hugging Face Hub.
        split: train or test.
        root: the folder of the data set, if it has one.
        truth: the labels or targets of every image: one class, or some of boxes, masks and classes of pixels.

    Raises:
        ValueError, FileNotFoundError, ImportError: for an unknown name, data that do not exist or are damaged, or
            another truth.
        TypeError: if a registered function returns something else.
    """
    known_name("split", split, ("train", "test"))
    hub = {"name": name.removeprefix("hfds/")} if name.startswith("hfds/") else {}
    load: Any = DATASETS[known_name("dataset", "hugging_face" if hub else name, list_datasets())]
    pair = load(split, None if root is None else Path(root), **hub)
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], DatasetInfo)):
        raise TypeError(f"the dataset {name!r} must return images and a DatasetInfo, got {type(pair).__name__}.")
    images, info = pair
    good = all(hasattr(images, needed) for needed in ("__len__", "__getitem__", "labels"))
    kind = "images with a length, indexing and `labels`"
    if isinstance(info, DenseInfo):
        good, kind = isinstance(images, DenseImages), "DenseImages with a DenseInfo"
    if not good:
        raise TypeError(f"the dataset {name!r} must return {kind}, got {type(images).__name__}.")
    if missing := [kind for kind in truth if kind not in info.truth]:
        raise ValueError(
            f"`dataset` must have {' and '.join(missing)}, got {name!r}, which has {' and '.join(info.truth)}; train "
            "it by a recipe of another task."
        )
    if isinstance(images, DenseImages):
        images.wanted = frozenset(truth)
    return images, info
