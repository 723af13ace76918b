"""Data sets in the format of Hugging Face `datasets`, as `DatasetDict.save_to_disk` writes them."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
import pyarrow as pa
from pydantic import Field
from typing_extensions import TypedDict

from graticule.lab.data.images import LARGEST, MOST_CLASSES, DatasetInfo, EncodedImages, Split
from graticule.lab.data.registry import register_dataset
from graticule.lab.data.sets.folder import SPLITS, existing, files_below
from graticule.registry.fields import check_value
from graticule.system.files import check_plain, read_json

#: The file that lists the splits.
DICT = "dataset_dict.json"
#: Most files that are open at a time.
_OPEN = 32


# The fields of the JSON files of a data set that are needed.


class _Splits(TypedDict):
    splits: list[str]


class _Info(TypedDict):
    features: dict[str, Any]


class _File(TypedDict):
    filename: str


class _State(TypedDict):
    _data_files: Annotated[list[_File], Field(min_length=1)]
    _indices_data_files: NotRequired[list[_File] | None]


@dataclass(frozen=True)
class Rows:
    """Index of the images in Arrow files: `offsets` and `sizes` in bytes, and `labels`, (n,) each.

    The rows of `files[i]` begin at row `starts[i]`; an image that does not exist has size 0.
    """

    files: tuple[Path, ...]
    starts: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray


class ArrowImages(EncodedImages):
    """Images in Arrow files; the bytes of an image are read on access.

    They are not read through a memory map: a truncated file or a failing disk would kill the process (SIGBUS).

    Args:
        rows: the index of the images.
        column: the column of the images.
        skip_broken: replace images that cannot be decoded.
    """

    def __init__(self, rows: Rows, column: str, skip_broken: bool) -> None:
        super().__init__(rows.labels, skip_broken)
        self.rows = rows
        self.column = column

    @functools.cached_property
    def _open(self) -> Callable[[str], pa.OSFile]:
        """Open a file by its name; the last ones stay open, also in forked processes, as `read_at` moves no offset."""
        return functools.lru_cache(_OPEN)(pa.OSFile)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_open"}

    def read(self, index: int) -> bytes:
        """Return the bytes of an image; empty if the data set has none."""
        file, _ = self._find(index)
        size = int(self.rows.sizes[index])
        content: bytes = self._open(str(self.rows.files[file])).read_at(size, int(self.rows.offsets[index]))
        if len(content) < size:
            raise ValueError(f"{self.rows.files[file]} was truncated while it was read: row {index} is incomplete.")
        return content

    def place(self, index: int) -> Path:
        """Return the folder of the split and the number of the row, with the name of its original file."""
        file, row = self._find(index)
        path = self.rows.files[file]
        cell = open_arrow(path)[0].column(self.column)[row]
        name = cell["path"].as_py() if cell.is_valid else None
        return path.parent / (f"row {index}: {name}" if name else f"row {index}")

    def _find(self, index: int) -> tuple[int, int]:
        """Return the number of the file of an image, and the row in it."""
        file = int(np.searchsorted(self.rows.starts, index, side="right")) - 1
        return file, index - int(self.rows.starts[file])


@register_dataset("hugging_face")
def hugging_face(split: Split, root: Path | None) -> tuple[ArrowImages, DatasetInfo]:
    """Load train, or validation (or val, or test), of a DatasetDict that `save_to_disk` wrote to `root`.

    The images are the first column of kind Image, the labels the first of kind ClassLabel. No code of the data set
    runs.

    Raises:
        ValueError, FileNotFoundError: for a folder that is missing, damaged or of another kind, a split or column that
            does not exist, labels without a class, images that are paths, classes that differ between the splits, or a
            name that leads out of the folder.
    """
    root = existing(root, "of DatasetDict.save_to_disk")
    files_below(root, lambda name: True)  # checks that all files are regular before one is opened
    listed = _listed_splits(root)
    folders = {part: _folder(root, part, listed) for part in SPLITS}
    columns = {part: _columns(folder) for part, folder in folders.items()}
    image, label, names = columns[split]
    if columns["train"][2] != columns["test"][2]:
        raise ValueError(
            f"`data_root` must have the same classes in training and evaluation, got {columns['train'][2][:5]} and "
            f"{columns['test'][2][:5]} in {root}."
        )
    rows = read_rows(_data_files(folders[split]), image, label)
    if not len(rows.labels):
        raise ValueError(f"{folders[split]} must have rows, got none.")
    outside = np.flatnonzero((rows.labels < 0) | (rows.labels >= len(names)))
    if len(outside):
        raise ValueError(
            f"`data_root` must have labels from 0 to {len(names) - 1}, got {rows.labels[outside[0]]} in row "
            f"{outside[0]} of {folders[split]}."
        )
    info = DatasetInfo("hugging_face", names)
    return ArrowImages(rows, image, skip_broken=split == "train"), info


def open_arrow(path: Path) -> tuple[pa.Table, pa.Buffer]:
    """Open an Arrow file without reading the values; returns its table and the buffer of the file, which it refers to.

    `datasets.load_from_disk` would read whole files, since Arrow asks the system to page in every file that it opens.
    """
    check_plain(path)
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):
            mapping.madvise(mmap.MADV_RANDOM)  # no read-ahead
        if mapping[-8:] != b"\xff\xff\xff\xff\0\0\0\0":
            raise ValueError("its end is missing")
        buffer = pa.py_buffer(mapping)
        return pa.ipc.open_stream(buffer).read_all(), buffer
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(
            f"{path} is truncated, damaged or no Arrow file ({str(error).splitlines()[0]}); write the data set again."
        ) from None


def read_rows(files: Sequence[Path], image: str, label: str) -> Rows:
    """Find the images of Arrow files, several files at a time, since the disk may have a high latency."""
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda path: _read_file(path, image, label), files))
    offsets, sizes, labels = np.concatenate(found, axis=1)
    return Rows(tuple(files), np.cumsum([0, *(rows.shape[1] for rows in found)]), offsets, sizes, labels)


def _read_file(path: Path, image: str, label: str) -> np.ndarray:
    """Return offset, size and label of the images of a file: (3, n)."""
    table, buffer = open_arrow(path)
    try:
        images, labels = table.column(image), table.column(label)
        labels.validate(full=True)
        if not (pa.types.is_struct(images.type) and pa.types.is_integer(labels.type)):
            raise KeyError(f"{images.type}, {labels.type}")
        places = [_places(chunk, buffer, path) for chunk in images.chunks]
    except (pa.ArrowException, KeyError) as error:
        raise ValueError(f"{path} is damaged: its rows are not images and labels ({error}).") from None
    if labels.null_count:
        raise ValueError(f"`data_root` must have a label for every row, got {labels.null_count} without in {path}.")
    return np.vstack([np.concatenate([np.zeros((2, 0), np.int64), *places], axis=1), labels.to_numpy()])


def _places(images: pa.StructArray, file: pa.Buffer, path: Path) -> np.ndarray:
    """Return offset in the file and size of the images of a batch: (2, n)."""
    content, paths = images.field("bytes"), images.field("path")
    if content.type not in (pa.binary(), pa.large_binary()):
        raise KeyError(content.type)
    content.validate(full=True)
    missing = np.asarray(images.is_null()) | np.asarray(content.is_null())
    if (rows := np.flatnonzero(missing & np.asarray(images.is_valid()) & np.asarray(paths.is_valid()))).size:
        raise ValueError(
            f"{path} must contain the images themselves, got the path {paths[rows[0]].as_py()!r}; save the data set "
            "again with save_to_disk, which embeds the images."
        )
    _, bounds, data = content.buffers()
    if missing.all() or data is None:
        return np.zeros((2, len(images)), np.int64)
    start = data.address - file.address
    if not 0 <= start <= file.size - data.size:
        raise ValueError(f"{path} must not be compressed; save the data set again with save_to_disk.")
    number = np.dtype(np.int32 if content.type == pa.binary() else np.int64)
    ends = np.frombuffer(bounds, number, len(content) + 1, content.offset * number.itemsize).astype(np.int64)
    sizes = np.where(missing, 0, np.diff(ends))
    if sizes.max() > LARGEST:
        raise ValueError(f"{path} must have images of at most {LARGEST:,} bytes, got {sizes.max():,}.")
    return np.stack([start + ends[:-1], sizes])


def _read(path: Path, kind: object) -> Any:
    """Read a JSON file of a data set as `kind`."""
    return check_value(kind, read_json(path), f"{path} is damaged")


def _listed_splits(root: Path) -> list[str]:
    try:
        names: list[str] = _read(root / DICT, _Splits)["splits"]
    except FileNotFoundError:
        one = (root / "state.json").exists()
        problem = "one table, which has no split to evaluate on" if one else f"no {DICT}"
        raise ValueError(
            f"`data_root` must be a folder of DatasetDict.save_to_disk, got {root} with {problem}."
        ) from None
    return names


def _folder(root: Path, part: Split, listed: list[str]) -> Path:
    """Return the folder of a split."""
    name = next((name for name in SPLITS[part] if name in listed), None)
    if name is None:
        raise ValueError(
            f"`data_root` must have a split {' or '.join(SPLITS[part])}, got {', '.join(listed) or 'none'} in {root}."
        )
    return root / name


def _columns(folder: Path) -> tuple[str, str, tuple[str, ...]]:
    """Return the column of the images, that of the labels, and the names of the classes."""
    path = folder / "dataset_info.json"
    features = _read(path, _Info)["features"]
    kinds = {name: kind.get("_type") if isinstance(kind, dict) else None for name, kind in features.items()}
    image = next((name for name, kind in kinds.items() if kind == "Image"), None)
    label = next((name for name, kind in kinds.items() if kind == "ClassLabel"), None)
    if image is None or label is None:
        listed = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise ValueError(f"`data_root` must have a column of kind Image and one of ClassLabel, got {listed} in {path}.")
    about = f"`data_root` must have names of its classes in {path}"
    names: list[str] = check_value(list[str], features[label].get("names"), about)
    if not 2 <= len(set(names)) == len(names) <= MOST_CLASSES:
        raise ValueError(
            f"`data_root` must have two classes or more, {MOST_CLASSES:,} at most, with different names, got "
            f"{len(names)} in {path}."
        )
    return image, label, tuple(names)


def _data_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a split, which must be in its folder."""
    path = folder / "state.json"
    state: _State = _read(path, _State)
    names = [file["filename"] for file in state["_data_files"]]
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"`data_root` must contain its own tables, got {name!r} in {path}.")
    if state.get("_indices_data_files"):
        raise ValueError(f"{path} lists rows by index; save the data set again, with a newer version of datasets.")
    return [folder / name for name in names]
