"""Shards in WebDataset's format: root/train/*.tar and root/val/*.tar, of KEY.jpg and KEY.cls."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from graticule.data.encoded import EncodedImages
from graticule.data.folder import SPLITS, stay_inside
from graticule.data.images import MOST_CLASSES, DatasetInfo, Split
from graticule.data.shard_index import ShardIndex, shard_index
from graticule.files import check_plain, read_bytes, read_json

#: What pack writes beside the shards: the names of the classes, a line each, and what it was asked for.
CLASSES = "classes.txt"
PLAN = "pack.json"
#: Shards that an epoch reads from at a time.
GROUP = 8


class ShardImages(EncodedImages):
    """Images of shards, each read at its place in the tar; nothing is unpacked.

    Args:
        shards: the tars.
        indices: where the images of each lie.
        skip_broken: pass over images that cannot be decoded.
    """

    def __init__(self, shards: Sequence[Path], indices: Sequence[ShardIndex], skip_broken: bool) -> None:
        super().__init__(np.concatenate([index.labels for index in indices]).astype(np.int32), skip_broken)
        self.shards = list(shards)
        self.starts = np.cumsum([0, *(len(index) for index in indices)])  # the first image of each shard
        self.offsets = np.concatenate([index.offsets for index in indices])
        self.sizes = np.concatenate([index.sizes for index in indices])
        self._files = _OpenFiles()

    def read(self, index: int) -> bytes:
        """Return the bytes of an image.

        Raises:
            ValueError: if its shard has become shorter since it was opened.
        """
        shard, size = self.shards[self.shard(index)], int(self.sizes[index])
        content = self._files.read(shard, int(self.offsets[index]), size)
        if len(content) < size:
            raise ValueError(f"{shard} was cut while it was read: {self.place(index)} is not all there.")
        return content

    def place(self, index: int) -> Path:
        """Return the shard of an image, and its name there."""
        number = self.shard(index)
        shard = self.shards[number]
        return shard / shard_index(shard).names[index - int(self.starts[number])]

    def shard(self, index: int) -> int:
        """Return the number of the shard that an image is in."""
        return int(np.searchsorted(self.starts, index, side="right")) - 1

    def order(self, seed: int, epoch: int, group: int = GROUP) -> np.ndarray:
        """Return all indices, each once, in an order that is a function of seed and epoch, for reading in a stream.

        The shards come in an order of their own; the images of shard r of it are strewn over the time from r to
        r + `group`, so that at any time `group` shards are mixed and no other is read.
        """
        random = np.random.default_rng([seed, epoch])
        count = len(self.shards)
        group = min(group, count)
        rank = random.permutation(count)
        first = np.maximum(rank, group - 1)  # the first ones all begin when the last of them does
        length = np.minimum(rank + group, count) - first
        counts = np.diff(self.starts)
        time = np.repeat(first, counts) + np.repeat(length, counts) * random.random(len(self))
        return np.argsort(time, kind="stable")


def shards(split: Split, root: Path | None) -> tuple[ShardImages, DatasetInfo]:
    """Load the shards of `root`/train, or of `root`/val (or validation, or test).

    The names of the classes are the lines of `root`/classes.txt; without it they are numbers.

    Raises:
        ValueError, FileNotFoundError: for shards that are missing, cut, changed or refused (see `read_headers`), a
            label without a class, fewer than two classes, or classes that differ between the two.
    """
    if root is None or not root.is_dir():
        raise FileNotFoundError(
            f"`data_root` must be a folder with train/*.tar and val/*.tar, got {str(root)!r}, which is not there."
        )
    paths = {part: find_shards(root, part) for part in SPLITS}
    indices = {part: read_indices(found) for part, found in paths.items()}
    _check_plan(root, indices)
    names = class_names(root)
    most = len(names) or MOST_CLASSES
    for part, found in indices.items():
        for path, index in zip(paths[part], found, strict=True):
            outside = np.flatnonzero((index.labels < 0) | (index.labels >= most))
            if len(outside):
                raise ValueError(
                    f"{path} must have classes from 0 to {most - 1}, got {index.labels[outside[0]]} of "
                    f"{shard_index(path).names[outside[0]]}."
                )
    labels = {part: np.unique(np.concatenate([index.labels for index in found])) for part, found in indices.items()}
    names = names or tuple(map(str, range(max(int(found[-1]) for found in labels.values()) + 1)))
    if len(names) < 2:
        raise ValueError(f"`data_root` must have two classes or more, got {len(names)} in {root}.")
    if len(differing := np.setxor1d(labels["train"], labels["test"])):
        raise ValueError(
            f"`data_root` must have the same classes in training and evaluation; in one only: "
            f"{', '.join(names[label] for label in differing[:5])}{', ...' if len(differing) > 5 else ''} ({root})."
        )
    info = DatasetInfo("shards", names, 3, None, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    return ShardImages(paths[split], indices[split], skip_broken=split == "train"), info


def find_shards(root: Path, split: Split) -> list[Path]:
    """Find the tars of a split, sorted; no link may lead out of `root`."""
    folder = next((root / name for name in SPLITS[split] if (root / name).is_dir()), None)
    if folder is None:
        raise FileNotFoundError(f"`data_root` must have a folder {' or '.join(SPLITS[split])}, which {root} has not.")
    stay_inside(folder, root)
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in entries:
        if path.name.endswith((".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")):
            raise ValueError(f"{path} must be a tar that is not compressed: unpack it to .tar, or pack without.")
    found = [path for path in entries if path.suffix == ".tar"]
    for path in found:
        stay_inside(path, root)
        check_plain(path)
    if not found:
        raise FileNotFoundError(f"`data_root` must have shards, *.tar, got none in {folder}.")
    return found


def read_indices(paths: Sequence[Path]) -> list[ShardIndex]:
    """Read the index of every shard, several at a time, for the disk may be far away; without names, which are many."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda path: replace(shard_index(path), names=()), paths))


def read_plan(root: Path) -> dict[str, Any] | None:
    """Read what pack was asked for and found; None where it was not at work."""
    path = root / PLAN
    try:
        plan = read_json(path)
    except FileNotFoundError:
        return None
    counts = plan.get("images") if isinstance(plan, dict) else None
    if not isinstance(counts, dict) or not all(type(counts.get(part)) is int for part in SPLITS):
        raise ValueError(f"{path} is damaged: it must have the number of images of every split. Pack again, elsewhere.")
    return plan


def class_names(root: Path) -> tuple[str, ...]:
    """Read the names of the classes, one per line; none where there is no classes.txt."""
    path = root / CLASSES
    stay_inside(path, root)
    try:
        lines = read_bytes(path, 1 << 26).decode("utf-8").split("\n")
    except FileNotFoundError:
        return ()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must have one name per line, in UTF-8 ({error}).") from None
    names = tuple(line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines))
    if not all(names) or len(set(names)) < len(names) or not 0 < len(names) <= MOST_CLASSES:
        raise ValueError(
            f"{path} must have one name per line, each once and none empty, {MOST_CLASSES:,} at most, got {len(names)}."
        )
    return names


def _check_plan(root: Path, indices: dict[Split, list[ShardIndex]]) -> None:
    """See that a folder that pack made has all it should have."""
    plan = read_plan(root)
    for part, found in indices.items():
        count = sum(map(len, found))
        if plan is not None and count != plan["images"][part]:
            raise ValueError(
                f"{root} must have {plan['images'][part]} images for {part}, as its {PLAN} says, got {count}: shards "
                "are missing, or packing was not finished. Pack again, and it goes on."
            )


class _OpenFiles:
    """Reads pieces of many files, of which it holds a few open; each process opens its own."""

    def __init__(self, limit: int = 2 * GROUP) -> None:
        self.limit = limit
        self._open: OrderedDict[Path, _OpenFile] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit, "_open": OrderedDict()}

    def read(self, path: Path, offset: int, size: int) -> bytes:
        file = self._open.pop(path, None) or _OpenFile(path)
        self._open[path] = file  # the last is the one used last
        if len(self._open) > self.limit:
            self._open.popitem(last=False)
        return file.read(offset, size)


class _OpenFile:
    """A file that is open as long as something holds it; a forked process may read from it too."""

    def __init__(self, path: Path) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))

    def read(self, offset: int, size: int) -> bytes:
        if hasattr(os, "pread"):  # a place in the file of its own, whoever else reads
            return os.pread(self.number, size, offset)
        os.lseek(self.number, offset, os.SEEK_SET)
        return os.read(self.number, size)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)
