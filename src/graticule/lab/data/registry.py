"""Data sets and texts by name: those of the package and those that a plugin registers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from graticule.lab.data.dense import DenseImages, DenseInfo
from graticule.lab.data.images import DatasetInfo, Split
from graticule.registry.plugins import check_new_name, register_once


@dataclass(frozen=True)
class Document:
    """A text and its name: a topic, or the path of a file in its folder."""

    name: str
    text: str


#: The documents to train on and the held-out ("test") ones.
Corpus = dict[Split, list[Document]]


#: A function of a split and the folder of the data or None that returns (image, label) pairs and their `DatasetInfo`.
Loader = Callable[[Split, Path | None], tuple[Any, DatasetInfo]]
#: A function of the folder of the text or None that returns the documents of both splits.
TextLoader = Callable[[Path | None], Corpus]
F = TypeVar("F", bound=Callable[..., Any])

DATASETS: dict[str, Loader] = {}
TEXTS: dict[str, TextLoader] = {}


def register_dataset(name: str) -> Callable[[F], F]:
    """Return a decorator that registers a function that loads images, for `--dataset` and `load_dataset`.

    The function takes the split, "train" or "test", and the folder (`--data-root`) or None, and returns the images and
    a `DatasetInfo`. The images have a length, return (PIL image, label) for an index, and have an array `labels`, (n,):
    `ArrayImages` holds arrays, and a subclass of `EncodedImages` decodes files.

    Args:
        name: the name, an identifier.

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

    return _registering("dataset", name, DATASETS, split="train", folder=None)


def register_text(name: str) -> Callable[[F], F]:
    """Return a decorator that registers a function that loads a text, for `--dataset` and `load_text`.

    The function takes the folder (`--data-root`) or None, and returns a dictionary: the list of `Document` to train on
    under "train", that of the held-out ones under "test".

    Args:
        name: the name, an identifier.

    Raises:
        ValueError: if `name` is not an identifier or already taken.
        TypeError: if the decorated object is not a function of one argument.

    Example::

        @graticule.register_text("counting")
        def counting(root):
            lines = [Document(f"line {n}", " ".join(map(str, range(n, n + 100)))) for n in range(50)]
            return {"train": lines[:45], "test": lines[45:]}
    """
    return _registering("text", name, TEXTS, folder=None)


def _registering(kind: str, name: str, table: dict[str, Any], **arguments: Any) -> Callable[[F], F]:
    """Return the decorator that adds a function of `arguments`, in their order, to `table`."""
    check_new_name(kind, name)

    def add(function: F) -> F:
        if not inspect.isfunction(function):
            raise TypeError(f"the {kind} {name!r} must be a function that loads it, got {function!r}.")
        try:
            inspect.signature(function).bind(*arguments.values())
        except TypeError as error:
            raise TypeError(f"the {kind} {name!r} must be a function of {' and '.join(arguments)}: {error}.") from None
        known = table.get(name)
        if known is not None and (not inspect.isfunction(known) or known.__module__.startswith("graticule.")):
            raise ValueError(f"`name` must be new, got {name!r}, which is a {kind} of graticule.")
        register_once(kind, name, function, known)
        table[name] = function
        return function

    return add


def add_own(kind: str, table: dict[str, Any], own: dict[str, Any]) -> None:
    """Add the loaders of the package to `table`.

    Raises:
        ValueError: if a plugin that was imported earlier has taken one of their names.
    """
    if taken := sorted(own.keys() & table):
        raise ValueError(f"`name` must be new, got {taken[0]!r}, which is a {kind} of graticule.")
    table.update(own)


def loaded(name: str, split: Split, root: Path | None) -> tuple[Any, DatasetInfo]:
    """Load a split of the data set `name`, and check the types that a plugin returns.

    Raises:
        TypeError: naming the data set, if it is not images with labels and a `DatasetInfo`.
    """
    found = DATASETS[name](split, root)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], DatasetInfo)):
        raise TypeError(f"the dataset {name!r} must return images and a DatasetInfo, got {type(found).__name__}.")
    if isinstance(found[1], DenseInfo):
        good, what = isinstance(found[0], DenseImages), "DenseImages with a DenseInfo"
    else:
        good = all(hasattr(found[0], needed) for needed in ("__len__", "__getitem__", "labels"))
        what = "images with a length, indexing and `labels`"
    if not good:
        raise TypeError(f"the dataset {name!r} must return {what}, got {type(found[0]).__name__}.")
    return found
