"""CIFAR-10 and CIFAR-100 from their published files."""

from __future__ import annotations

import io
import math
import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from graticule.lab.data.images import ArrayImages, DatasetInfo, Split
from graticule.lab.data.registry import register_dataset
from graticule.system.files import read_bytes

#: Largest pickle in bytes; the training images of CIFAR-100 take 155 million.
_LARGEST = 1 << 30
#: Most tuples in a pickle: hashing nested tuples recurses as deep as they are nested; an array needs five.
_MOST_TUPLES = 10_000
#: Errors that a damaged pickle raises.
_DAMAGED = (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError, OverflowError)


def read_pickle(path: Path) -> dict[str, Any]:
    """Read a pickled dictionary of plain values and arrays of bytes; byte strings in it, Python 2's text, become `str`.

    Raises:
        FileNotFoundError: if it does not exist.
        ValueError: if it is not a regular file, is too large or damaged, contains other types, or would run code.
    """
    content = read_bytes(path, _LARGEST)
    try:
        _check_sizes(content)
        values = _ArraysOnly(content).load()
        if not isinstance(values, dict):
            raise ValueError(f"it must contain a dictionary, got {type(values).__name__}")
        return {_plain(key): _plain(value) for key, value in values.items()}
    except _ForbiddenError as error:
        raise ValueError(f"{path} must contain plain values only, but imports {error}; it was not read.") from None
    except _DAMAGED as error:
        raise ValueError(f"{path} is damaged, or no batch of images ({type(error).__name__}: {error}).") from None


def _check_sizes(content: bytes) -> None:
    """Check that no size in a pickle exceeds the pickle itself, since that much memory would be allocated at once."""
    tuples = 0
    for operation, value, _ in pickletools.genops(content):  # `genops` checks the lengths of strings
        tuples += operation.name.startswith("TUPLE")
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(value, int) and value > len(content):
            raise ValueError(f"it has a memo of {value} values")
    if tuples > _MOST_TUPLES:
        raise ValueError(f"it must have at most {_MOST_TUPLES:,} tuples, got {tuples:,}")


def _plain(value: object) -> Any:
    if isinstance(value, _Array):
        return value.array
    if isinstance(value, list):
        return [part.decode() if isinstance(part, bytes) else part for part in value]
    return value.decode() if isinstance(value, bytes) else value


class _ForbiddenError(Exception):
    pass


class _ArraysOnly(pickle.Unpickler):
    """Unpickler of NumPy arrays, by the old and new names of their parts; it imports nothing, not even NumPy's code."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.left = len(content)  # limit for the text that is encoded to bytes

    def find_class(self, module: str, name: str) -> _Named:
        known = [("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")]
        for core in ("numpy.core", "numpy._core"):
            known += [(f"{core}.multiarray", "_reconstruct"), (f"{core}.numeric", "_frombuffer")]
        if (module, name) not in known:
            raise _ForbiddenError(f"{module}.{name}")
        return _Named(name, self)


class _Named:
    """A function or a type that a pickle names; only calls that make a byte array, or bytes, are allowed."""

    __slots__ = ("name", "reader")

    def __init__(self, name: str, reader: _ArraysOnly) -> None:
        self.name = name
        self.reader = reader

    def __call__(self, *given: Any) -> Any:
        match self.name, given:
            case "dtype", ("u1" | b"u1", *_):
                return _Named("u1", self.reader)
            case "_reconstruct", _:
                return _Array()
            case "_frombuffer", (bytes() | bytearray() as content, _Named(name="u1"), shape, "C" | "F" as order):
                return _Array().fill(content, shape, order)
            case "encode", (str(text), "latin1") if len(text) <= self.reader.left:
                self.reader.left -= len(text)
                return text.encode("latin1")
        raise ValueError(f"{self.name} of something else than bytes")

    def __setstate__(self, state: object) -> None:
        """Ignore the state of a dtype: single bytes have no byte order."""


class _Array:
    """A byte array that is filled from its pickled state."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array = np.empty(0, np.uint8)

    def fill(self, content: bytes | bytearray, shape: Any, order: Any) -> _Array:
        whole = isinstance(shape, tuple) and all(type(side) is int and side >= 0 for side in shape)
        if not whole or len(shape) > 4 or math.prod(shape) != len(content):
            raise ValueError(f"an array of shape {str(shape)[:80]} has {len(content):,} bytes")
        self.array = np.frombuffer(content, np.uint8).reshape(shape, order=order)
        return self

    def __setstate__(self, state: object) -> None:
        match state:
            case (_, shape, _Named(name="u1"), fortran, bytes(content)):
                self.fill(content, shape, "F" if fortran else "C")
            case _:
                raise ValueError("an array of something else than bytes")


_LAYOUTS: dict[str, dict[str, Any]] = {
    "cifar10": {
        "folder": "cifar-10-batches-py",
        "train": [f"data_batch_{i}" for i in range(1, 6)],
        "test": ["test_batch"],
        "names": ("batches.meta", "label_names"),
        "labels": "labels",
        "classes": 10,
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.2470, 0.2435, 0.2616),
    },
    "cifar100": {
        "folder": "cifar-100-python",
        "train": ["train"],
        "test": ["test"],
        "names": ("meta", "fine_label_names"),
        "labels": "fine_labels",
        "classes": 100,
        "mean": (0.5071, 0.4865, 0.4409),
        "std": (0.2673, 0.2564, 0.2762),
    },
}


@register_dataset("cifar10")
def cifar10(split: Split, root: Path | None) -> tuple[ArrayImages, DatasetInfo]:
    """Load CIFAR-10, with ten classes, as `cifar` does."""
    return cifar("cifar10", split, root)


@register_dataset("cifar100")
def cifar100(split: Split, root: Path | None) -> tuple[ArrayImages, DatasetInfo]:
    """Load CIFAR-100, with a hundred classes, as `cifar` does."""
    return cifar("cifar100", split, root)


def cifar(name: str, split: Split, root: Path | None) -> tuple[ArrayImages, DatasetInfo]:
    """Load `name`, cifar10 or cifar100: 50,000 training or 10,000 test images, 32 x 32, RGB.

    `root` (or the folder that the environment variable GRATICULE_DATA names) is the folder of the published
    batches, or its parent.

    Raises:
        FileNotFoundError: if they do not exist.
        ValueError: if a file is damaged, or contains more than arrays and plain values.
    """
    layout = _LAYOUTS[name]
    base = root if root is not None else Path(os.environ.get("GRATICULE_DATA", "data"))
    folder = base / layout["folder"] if (base / layout["folder"]).is_dir() else base
    images, labels = [], []
    for part in layout[split]:
        batch = _read(folder / part)
        pixels: Any = batch.get("data")
        numbers: Any = batch.get(layout["labels"])
        if not _fit(pixels, numbers):
            raise ValueError(
                f"{folder / part} must be a batch of {name}: `data`, bytes of shape (n, 3072), and "
                f"`{layout['labels']}`, n whole numbers."
            )
        images.append(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        labels.append(np.asarray(numbers))
    label = np.concatenate(labels)
    if label.min() < 0 or label.max() >= layout["classes"]:
        raise ValueError(f"{folder} must have labels from 0 to {layout['classes'] - 1}, got up to {label.max()}.")
    names, key = layout["names"]
    class_names = _read(folder / names).get(key) if (folder / names).exists() else None
    if class_names is None:
        class_names = [*map(str, range(layout["classes"]))]
    whole = isinstance(class_names, list) and all(isinstance(each, str) for each in class_names)
    if not whole or not len(class_names) == len(set(class_names)) == layout["classes"]:
        got = len(set(class_names)) if whole else type(class_names).__name__
        raise ValueError(f"{folder / names} must have {layout['classes']} different names in `{key}`, got {got}.")
    info = DatasetInfo(name, tuple(class_names), 3, (32, 32), layout["mean"], layout["std"])
    return ArrayImages(np.ascontiguousarray(np.concatenate(images)), label), info


def _fit(pixels: object, labels: object) -> bool:
    """Return whether these are images and their labels, at least one."""
    return (
        isinstance(pixels, np.ndarray)
        and pixels.dtype == np.uint8
        and pixels.shape[1:] == (3072,)
        and isinstance(labels, list)
        and 0 < len(labels) == len(pixels)
        and all(type(label) is int and 0 <= label < 2**31 for label in labels)
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_pickle(path)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"`data_root` must contain the published files of CIFAR for Python; {path} does not exist."
        ) from None
