"""CIFAR-10 and CIFAR-100 from their published files."""

from __future__ import annotations

import codecs
import os
import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from graticule.data.images import ArrayImages, DatasetInfo, Split

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


def cifar(name: str, split: Split, root: Path | None = None) -> tuple[ArrayImages, DatasetInfo]:
    """Load `name`, cifar10 or cifar100: 50,000 training or 10,000 test images, 32 x 32, RGB.

    `root` (or the folder that the environment variable GRATICULE_DATA names) is the folder of the published
    batches, or the one above it.

    Raises:
        FileNotFoundError: if they are not there.
        ValueError: if a file is damaged, or holds more than arrays and plain values.
    """
    layout = _LAYOUTS[name]
    base = root if root is not None else Path(os.environ.get("GRATICULE_DATA", "data"))
    folder = base / layout["folder"] if (base / layout["folder"]).is_dir() else base
    images, labels = [], []
    for part in layout[split]:
        batch = read_batch(folder / part)
        try:
            images.append(np.asarray(batch["data"], np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            labels.append(np.asarray(batch[layout["labels"]], np.int64))
        except (KeyError, ValueError, TypeError):
            raise ValueError(f"{folder / part} must be a batch of {name}, with data and {layout['labels']}.") from None
    label = np.concatenate(labels)
    if label.min() < 0 or label.max() >= layout["classes"]:
        raise ValueError(f"{folder} must have labels from 0 to {layout['classes'] - 1}, got up to {label.max()}.")
    names, key = layout["names"]
    known = read_batch(folder / names).get(key) if (folder / names).exists() else None
    class_names = tuple(map(str, known or range(layout["classes"])))
    info = DatasetInfo(name, class_names, 3, (32, 32), layout["mean"], layout["std"])
    return ArrayImages(np.ascontiguousarray(np.concatenate(images)), label), info


def read_batch(path: Path) -> dict[str, Any]:
    """Read a batch, a pickle that Python 2 wrote, without importing anything but NumPy's arrays.

    Raises:
        FileNotFoundError: if it is not there.
        ValueError: if it is damaged, or would run code.
    """
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, encoding="bytes").load()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"`data_root` must hold the published files of CIFAR for Python; {path} is not there."
        ) from None
    except _ForbiddenError as error:
        raise ValueError(f"{path} is no batch of CIFAR: it wants to import {error}, and was not read.") from None
    except Exception as error:  # a damaged pickle can raise almost anything
        raise ValueError(f"{path} is damaged, or no batch of CIFAR ({type(error).__name__}: {error}).") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a dictionary, got {type(content).__name__}.")
    return {
        _text(key): [_text(v) for v in value] if isinstance(value, list) else value for key, value in content.items()
    }


class _ForbiddenError(Exception):
    pass


class _ArraysOnly(pickle.Unpickler):
    """Knows what NumPy's arrays are made of, by its old and new names, and imports nothing."""

    _KNOWN: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): codecs.encode,
        **{
            (f"numpy.{core}.{module}", name): np.zeros(1).__reduce_ex__(protocol)[0]
            for core in ("core", "_core")
            for module, name, protocol in (("multiarray", "_reconstruct", 2), ("numeric", "_frombuffer", 5))
        },
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._KNOWN[module, name]
        except KeyError:
            raise _ForbiddenError(f"{module}.{name}") from None


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
