"""Data sets of the library `datasets` on disk: what `DatasetDict.save_to_disk` wrote."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from graticule.data.encoded import EncodedImages
from graticule.data.folder import SPLITS, files_below
from graticule.data.images import DatasetInfo, Split
from graticule.files import read_json


class HuggingFaceImages(EncodedImages):
    """Images of a table on disk, read row by row.

    Args:
        rows: the table, whose images are not decoded.
        column: which of its columns they are.
        labels: (n,).
        root: its folder.
        skip_broken: pass over images that cannot be decoded.
    """

    def __init__(self, rows: Any, column: str, labels: np.ndarray, root: Path, skip_broken: bool) -> None:
        super().__init__(labels, skip_broken)
        self.rows = rows
        self.column = column
        self.root = root

    def read(self, index: int) -> bytes:
        """Return the bytes of an image, none where the table has none.

        Raises:
            ValueError: if the table says only where an image was: nothing outside of `root` is read.
        """
        cell = self.rows[index][self.column] or {}
        content = cell.get("bytes")
        if content is None and cell.get("path"):
            raise ValueError(
                f"{self.place(index)} must be in the table, got the path {cell['path']!r}; save the data set again, "
                "with save_to_disk, which takes images in."
            )
        return content or b""

    def place(self, index: int) -> Path:
        """Return the folder of the table, and the number of the row."""
        return self.root / f"row {index}"


def hf_disk(split: Split, root: Path | None) -> tuple[HuggingFaceImages, DatasetInfo]:
    """Load train, or validation (or val, or test), of a DatasetDict that `save_to_disk` wrote to `root`.

    The images are its first column of kind Image, the labels its first of kind ClassLabel. No code of the data set
    runs.

    Raises:
        ImportError: if the library `datasets` is not installed.
        ValueError, FileNotFoundError: for a folder that is missing, damaged or none of these, a split or column that
            is not there, labels without a class, classes that differ between the two, or a link that leads out of it.
    """
    if root is None or not root.is_dir():
        raise FileNotFoundError(
            f"`data_root` must be a folder that DatasetDict.save_to_disk wrote, got {str(root)!r}, which is not there."
        )
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f'`dataset` hf_disk needs the library datasets ({error}): pip install "graticule[hf]"'
        ) from None

    _check_files(root)
    try:
        found = datasets.load_from_disk(str(root.absolute()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"`data_root` must be a folder that DatasetDict.save_to_disk wrote, whole, got {root} "
            f"({type(error).__name__}: {error})."
        ) from None
    if not isinstance(found, datasets.DatasetDict):
        raise ValueError(f"`data_root` must have a split to train on and one to evaluate on, got one table in {root}.")
    parts = {part: _part(found, part, root) for part in SPLITS}
    column, label, names = _columns(parts[split], root)
    if differing := {part: _columns(rows, root)[2] for part, rows in parts.items() if _columns(rows, root)[2] != names}:
        raise ValueError(
            f"`data_root` must have the same classes in training and evaluation, got {names[:5]} and "
            f"{next(iter(differing.values()))[:5]} in {root}."
        )
    rows = parts[split].with_format(None).cast_column(column, datasets.Image(decode=False))
    labels = _labels(rows, label, len(names), root)
    info = DatasetInfo("hf_disk", names, 3, None, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    return HuggingFaceImages(rows.select_columns([column]), column, labels, root, skip_broken=split == "train"), info


#: Files that name others, which the library opens, and how they do.
_NAMING: dict[str, Callable[[Any], list[Any]]] = {
    "dataset_dict.json": lambda values: list(values["splits"]),
    "state.json": lambda values: [table["filename"] for table in values["_data_files"]],
}


def _check_files(root: Path) -> None:
    """Check, before the library opens any, that all files are plain, and that they name no files outside of `root`."""
    for path in files_below(root, root, lambda name: True):
        if path.name not in _NAMING:
            continue
        try:
            named = [path.parent / name for name in _NAMING[path.name](read_json(path))]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}).") from None
        for file in named:
            if not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(root)):
                raise ValueError(f"`data_root` must have its tables in itself, got {file} for {root}.")


def _part(found: Any, part: Split, root: Path) -> Any:
    """Return the rows of a split."""
    name = next((name for name in SPLITS[part] if name in found), None)
    if name is None or not len(found[name]):
        raise ValueError(
            f"`data_root` must have rows in a split {' or '.join(SPLITS[part])}, got {', '.join(found) or 'none'} in "
            f"{root}."
        )
    return found[name]


def _columns(rows: Any, root: Path) -> tuple[str, str, tuple[str, ...]]:
    """Return the column of the images, that of the labels, and the names of the classes."""
    import datasets

    kinds = {name: type(feature) for name, feature in rows.features.items()}
    images = [name for name, kind in kinds.items() if issubclass(kind, datasets.Image)]
    labels = [name for name, kind in kinds.items() if issubclass(kind, datasets.ClassLabel)]
    if not images or not labels:
        listed = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
        raise ValueError(f"`data_root` must have a column of kind Image and one of ClassLabel, got {listed} in {root}.")
    names = tuple(map(str, rows.features[labels[0]].names))
    if len(names) < 2:
        raise ValueError(f"`data_root` must have two classes or more, got {len(names)} in {root}.")
    return images[0], labels[0], names


def _labels(rows: Any, column: str, classes: int, root: Path) -> np.ndarray:
    """Return the labels, (n,), and see that each has a class."""
    cells = rows.select_columns([column]).with_format("arrow")[:].column(column)
    if cells.null_count:
        raise ValueError(f"`data_root` must have a label for every row, got {cells.null_count} without in {root}.")
    labels = cells.to_numpy().astype(np.int64)
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(outside):
        raise ValueError(
            f"`data_root` must have labels from 0 to {classes - 1}, got {labels[outside[0]]} in row {outside[0]} of "
            f"{root}."
        )
    return labels
