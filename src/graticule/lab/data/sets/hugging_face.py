"""Data sets in the format of Hugging Face `datasets`, as `DatasetDict.save_to_disk` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from graticule.lab.data.images import LARGEST, MOST_CLASSES, DatasetInfo, EncodedImages, Split
from graticule.lab.data.registry import register_dataset
from graticule.lab.data.sets.folder import SPLITS, existing_folder
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
        """Return the bytes of an image; empty if the data set has only its path."""
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
def hugging_face(split: Split, root: Path | None, name: str = "") -> tuple[TableImages, DatasetInfo]:
    """Load train, or validation (or val, or test), of a DatasetDict that `save_to_disk` wrote to `root`.

    The data set hfds/NAME, timm's name, is NAME on the Hugging Face Hub; its files are kept in `root` or the cache. The
    images are the first column of kind Image, the labels the first of kind ClassLabel. No code of the data set runs.
    """
    place = Path(name) if name else existing_folder(root, "of DatasetDict.save_to_disk")
    try:
        import datasets
    except ImportError:
        raise ImportError(f"`dataset` hugging_face needs the library datasets: {install('datasets')}.") from None
    try:
        tables: Any = (
            datasets.load_dataset(name, cache_dir=None if root is None else str(root))
            if name
            else datasets.load_from_disk(str(place))
        )
        part = next((part for part in SPLITS[split] if part in tables), None)
        rows = tables[part] if part and isinstance(tables, datasets.DatasetDict) else None
        if rows is not None:
            rows.data.validate(full=True)  # Arrow would read beyond a damaged file
    except Exception as error:  # damaged files raise almost anything
        message = str(error).strip().partition("\n")[0]
        rule = "`data_root` must be a folder of DatasetDict.save_to_disk, whole and undamaged"
        if name:
            rule = "`dataset` must be hfds/NAME of a data set on the Hugging Face Hub that can be reached"
        raise ValueError(f"{rule}, got {place} ({type(error).__name__}: {message}).") from None
    if rows is None:
        raise ValueError(
            f"`data_root` must have a split {' or '.join(SPLITS[split])}, got {place} "
            f"with {', '.join(tables) if isinstance(tables, datasets.DatasetDict) else 'one table'}."
        )
    columns = [*rows.features.items()]
    image = next((key for key, kind in columns if isinstance(kind, datasets.Image)), None)
    label = next((key for key, kind in columns if isinstance(kind, datasets.ClassLabel)), None)
    if image is None or label is None:
        listed = ", ".join(f"{key} ({type(kind).__name__})" for key, kind in columns)
        raise ValueError(f"`data_root` must have a column of Image and one of ClassLabel, got {listed} in {place}.")
    names, labels = tuple(map(str, rows.features[label].names)), np.array(rows[label][:], dtype=object)
    if not 2 <= len({*names}) == len(names) <= MOST_CLASSES:
        raise ValueError(
            f"`data_root` must have 2 to {MOST_CLASSES:,} classes with different names, got {len(names)} in {place}."
        )
    wrong = [(row, value) for row, value in enumerate(labels) if value is None or not 0 <= value < len(names)]
    if wrong or not len(labels):
        row, value = wrong[0] if wrong else ("any row", "none")
        raise ValueError(f"{place} must have a label below {len(names)} in every row, got {value} in row {row}.")
    stored = rows.select_columns(image).cast_column(image, datasets.Image(decode=False))
    info = DatasetInfo("hugging_face", names)
    return TableImages(stored, labels.astype(np.int64), place / str(part), skip_broken=split == "train"), info
