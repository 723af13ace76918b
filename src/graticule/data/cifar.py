"""CIFAR-10 and CIFAR-100 from their published files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from graticule.data.byte_pickle import read_pickle
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
