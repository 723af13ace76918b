"""ImageNet's layout in folders, or in .tar files (shards), whose images are read at their offsets, never extracted."""

from __future__ import annotations

import json
import re
import tarfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from graticule.lab.data.images import LARGEST, MOST_CLASSES, DatasetInfo, EncodedImages, Split
from graticule.lab.data.registry import register_dataset
from graticule.lab.data.sets.folder import (
    SPLITS,
    FolderImages,
    existing_folder,
    folder_files,
    is_image,
    read_class_names,
)
from graticule.system.files import check_plain

#: The .tar files of a split, each with its size and its time of modification.
Shards = tuple[tuple[Path, int, int], ...]
#: The images of a split in arrays (n,): the index of the .tar file, offset and size in bytes, label, and name.
Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class ShardImages(EncodedImages):
    """Images in uncompressed .tar files, which each read opens."""

    def __init__(self, shards: Shards, rows: Rows, skip_broken: bool) -> None:
        self.shards, (self.shard, self.offset, self.size, labels, self.names) = shards, rows
        super().__init__(labels, skip_broken)

    def read(self, index: int) -> bytes:
        if (size := int(self.size[index])) > LARGEST:
            raise ValueError(f"{self.place(index)} must have at most {LARGEST:,} bytes, got {size:,}.")
        with self.files_of(index)[0].open("rb") as file:
            file.seek(self.offset[index])
            return file.read(size)

    def place(self, index: int) -> Path:
        """Return the path of the .tar file, followed by the name of the image in it."""
        return Path(f"{self.files_of(index)[0]}/{self.names[index].decode('utf-8', 'surrogateescape')}")

    def files_of(self, index: int) -> tuple[Path]:
        return (self.shards[self.shard[index]][0],)


@register_dataset("image_folder")
def image_folder(split: Split, root: Path | None) -> tuple[EncodedImages, DatasetInfo]:
    """Load `root`/train, or `root`/val (or validation, or test): a folder per class, or .tar files.

    The .tar files are `root`/train/*.tar, or `root`/train.tar, `root`/*-train-*.tar and the like. Their images are
    CLASS/NAME.jpg, or in a file CLASS.tar without folders; or a WebDataset's, with labels from 0 in KEY.cls or
    as "label" in KEY.json. Its classes are called "0", "1" and so on, or as the lines of `root`/classes.txt.
    """
    root = existing_folder(root, "with train/CLASS/*.JPEG and val/CLASS/*.JPEG, or with .tar files of images")
    if not (shards := _find_shards(root, split)):
        names, files = folder_files(root, split)
        return FolderImages(files, split == "train"), DatasetInfo("image_folder", names)
    names, rows = _read_shards(shards)
    if names == tuple(map(str, range(len(names)))) and (listed := root / "classes.txt").exists():
        names, count = read_class_names(listed, MOST_CLASSES), len(names)
        if len(names) != count:
            raise ValueError(f"{listed} must have a line for each of {count} classes, got {len(names)} lines.")
    return ShardImages(shards, rows, split == "train"), DatasetInfo("image_folder", names)


def _find_shards(root: Path, split: Split) -> Shards:
    """Find the .tar files of a split; none if it has folders of classes."""
    for name in SPLITS[split]:
        inside = sorted((root / name).glob("[!.]*")) if (root / name).is_dir() else []
        if any(path.is_dir() for path in inside):
            return ()
        paths = [path for path in inside if path.suffix == ".tar"]
        beside = (path for path in root.glob("[!.]*") if re.fullmatch(rf"(.+-)?{name}(-.+)?\.tar", path.name))
        if paths := paths or sorted(beside):
            return tuple((path, check_plain(path), path.stat().st_mtime_ns) for path in paths)
    return ()


@lru_cache(maxsize=2)
def _read_shards(shards: Shards) -> tuple[tuple[str, ...], Rows]:
    """Return the names of the classes, and the images by class and name; once per process."""
    images: list[tuple[Any, str, int, int, int]] = []  # class, name, shard, offset, size
    for number, (path, length, _) in enumerate(shards):
        parts, classes = _read_shard(path, length)
        images += [(classes[name], name, number, *part) for name, part in parts.items()]
    if len(kinds := {type(image[0]) for image in images}) > 1:
        raise ValueError(
            f"`data_root` must have labels in all .tar files, or folders in all, got both, as in {shards[0][0]}."
        )
    names: list[Any] = sorted({image[0] for image in images})
    if len(names) < 2 or (int in kinds and names[-1] != len(names) - 1):
        listed = ", ".join(map(str, names[:5])) + ", ..." * (len(names) > 5) or "none"
        rule = "images of every class from 0 on" if int in kinds else "two classes or more"
        raise ValueError(f"`data_root` must have {rule}, got {listed} in .tar files such as {shards[0][0]}.")
    images.sort(key=lambda image: (image[0], image[1].replace("/", "\0")))  # the order of paths
    labels = {name: label for label, name in enumerate(names)}
    groups, files, *place = zip(*images, strict=True)
    shard, offset, size = map(np.array, place)
    encoded = np.array([file.encode("utf-8", "surrogateescape") for file in files])
    return tuple(map(str, names)), (shard, offset, size, np.array([labels[group] for group in groups]), encoded)


def _read_shard(path: Path, length: int) -> tuple[dict[str, tuple[int, int]], dict[str, str | int]]:
    """Return the offset and size of each image in a .tar file, and its class: a name, or a number of a WebDataset."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, Any] = {}
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as archive:
            listed: list[Any] = vars(archive)["members"]
            while (member := archive.next()) is not None:
                listed.clear()  # otherwise all are kept
                name, part = member.name, (member.offset_data, member.size)
                if member.size < 0 or sum(part) > length:
                    raise tarfile.ReadError(f"{name!r} goes beyond its end")
                if is_image(name) and (not member.isreg() or member.issparse()):
                    raise tarfile.ReadError(f"{name!r} is a link, or no plain file")
                if is_image(name):
                    images[name] = part
                elif name.endswith((".cls", ".json")) and member.isreg():
                    file.seek(part[0])
                    label = _label(file.read(min(part[1], 1 << 20)))
                    labels[_key(name)] = label if name.endswith(".cls") else labels.get(_key(name), label)
            file.seek(archive.offset)
            rest = file.read(1 << 16)
            if len(rest) < tarfile.BLOCKSIZE or rest.strip(b"\0"):  # `tarfile` takes a damaged header for the end
                raise tarfile.ReadError(f"it is damaged or cut off at byte {archive.offset:,}")
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
        raise ValueError(f"`data_root` must have whole, uncompressed .tar files, got {path}: {error}.") from None
    if not labels.keys() & {_key(name) for name in images}:
        folders = {name: name.rpartition("/")[0].rpartition("/")[2] for name in images}
        return images, {name: path.stem if above in ("", ".") else above for name, above in folders.items()}
    classes = {name: labels.pop(_key(name), None) for name in images}  # a second image of a key has none
    for name, label in classes.items():
        if type(label) is not int or not 0 <= label < MOST_CLASSES:
            raise ValueError(
                f"{path}/{name} must have its own label below {MOST_CLASSES:,}, a number in a file .cls or "
                f'"label" in a file .json, got {str(label)[:40]}.'
            )
    return images, classes


def _key(name: str) -> str:
    """Return the name of a member up to the first point of its last part, which its image and its label share."""
    above, _, file = name.rpartition("/")
    return f"{above}/{file.partition('.')[0]}"


def _label(content: bytes) -> Any:
    """Return the label in a file .cls or .json; its text if it is not JSON."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return content[:40]
    return value.get("label") if isinstance(value, dict) else value
