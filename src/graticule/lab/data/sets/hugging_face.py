"""Data sets in the format of Hugging Face `datasets`, as `DatasetDict.save_to_disk` writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from graticule.lab.data.images import LARGEST, MOST_CLASSES, DatasetInfo, EncodedImages, Split
from graticule.lab.data.registry import register_dataset
from graticule.lab.data.sets.folder import SPLITS, existing_folder, files_below
from graticule.registry.checks import install


class TableImages(EncodedImages):
    """Images in a table of `datasets`; the bytes of an image are read on access.

    Args:
        rows: the table, with the one column of the images, not decoded.
        labels: (n,).
        folder: the folder of the table.
        skip_broken: replace images that cannot be decoded.
    """

    def __init__(self, rows: Any, labels: np.ndarray, folder: Path, skip_broken: bool) -> None:
        super().__init__(labels, skip_broken)
        self.rows = rows
        self.folder = folder

    def read(self, index: int) -> bytes:
        """Return the bytes of an image; empty if the data set has none, such as those of a path."""
        content: bytes = self._cell(index).get("bytes") or b""
        return content if len(content) <= LARGEST else b""

    def place(self, index: int) -> Path:
        """Return the folder of the split and the number of the row, with the name of its original file."""
        name = self._cell(index).get("path")
        return self.folder / (f"row {index}: {name}" if name else f"row {index}")

    def _cell(self, index: int) -> dict[str, Any]:
        (cell,) = self.rows[index].values()
        return cell or {}


@register_dataset("hugging_face")
def hugging_face(split: Split, root: Path | None) -> tuple[TableImages, DatasetInfo]:
    """Load train, or validation (or val, or test), of a DatasetDict that `save_to_disk` wrote to `root`.

    The images are the first column of kind Image, the labels the first of kind ClassLabel. No code of the data set
    runs.
    """
    root = existing_folder(root, "of DatasetDict.save_to_disk")
    files_below(root, lambda name: True)  # checks that all files are regular before one is opened
    try:
        import datasets
    except ImportError:
        raise ImportError(f"`dataset` hugging_face needs the library datasets: {install('datasets')}.") from None
    with _undamaged(root):
        tables: Any = datasets.load_from_disk(str(root))
    if not isinstance(tables, datasets.DatasetDict):
        raise ValueError(f"`data_root` must have splits, of DatasetDict.save_to_disk, got one table in {root}.")
    parts = {part: next((name for name in names if name in tables), "") for part, names in SPLITS.items()}
    if missing := [part for part, name in parts.items() if not name]:
        expected = " or ".join(SPLITS[missing[0]])
        raise ValueError(f"`data_root` must have a split {expected}, got {', '.join(tables)} in {root}.")
    names, others = (_names(tables[name], datasets.ClassLabel, root / name) for name in parts.values())
    if names != others:
        raise ValueError(
            f"`data_root` must have the same classes in both splits, got {names[:5]} and {others[:5]} in {root}."
        )
    rows, folder = tables[parts[split]], root / parts[split]
    image, label = (_column(rows, kind, folder) for kind in (datasets.Image, datasets.ClassLabel))
    with _undamaged(root):
        rows.data.validate(full=True)  # Arrow would read beyond a damaged file
        labels = np.asarray(rows[label][:])
        stored = rows.select_columns(image).cast_column(image, datasets.Image(decode=False))
    if not len(labels):
        raise ValueError(f"{folder} must have rows, got none.")
    if labels.dtype == object:
        raise ValueError(f"`data_root` must have a label for every row, got one without in {folder}.")
    if len(outside := np.flatnonzero((labels < 0) | (labels >= len(names)))):
        raise ValueError(
            f"{folder} must have labels from 0 to {len(names) - 1}, got {labels[outside[0]]} in row {outside[0]}."
        )
    return TableImages(stored, labels, folder, skip_broken=split == "train"), DatasetInfo("hugging_face", names)


@contextlib.contextmanager
def _undamaged(root: Path) -> Iterator[None]:
    """Report an error of reading the files of a data set; damaged ones can raise almost anything."""
    try:
        yield
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"`data_root` must be a folder of DatasetDict.save_to_disk, whole and undamaged, got {root} "
            f"({type(error).__name__}: {message})."
        ) from None


def _column(rows: Any, kind: type, folder: Path) -> str:
    """Return the name of the first column of a kind."""
    name: str | None = next((name for name, feature in rows.features.items() if isinstance(feature, kind)), None)
    if name is None:
        listed = ", ".join(f"{name} ({type(feature).__name__})" for name, feature in rows.features.items())
        raise ValueError(
            f"`data_root` must have a column of kind Image and one of ClassLabel, got {listed} in {folder}."
        )
    return name


def _names(rows: Any, kind: type, folder: Path) -> tuple[str, ...]:
    """Return the names of the classes."""
    names = rows.features[_column(rows, kind, folder)].names
    if not 2 <= len({name for name in names if isinstance(name, str)}) == len(names) <= MOST_CLASSES:
        raise ValueError(
            f"`data_root` must have two classes or more, {MOST_CLASSES:,} at most, with different names, got "
            f"{len(names)} in {folder}."
        )
    return tuple(names)
