"""Where the images of a shard lie: what NAME.tar.json says beside it, or what its headers say."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS

from graticule.data.encoded import LARGEST
from graticule.files import check_plain, read_json, write_text

#: How packed files begin, which cannot be read from the middle.
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_IMAGES = frozenset(extension[1:] for extension in IMG_EXTENSIONS)
_BLOCK = 512
#: Bytes of a header with its long names, and of the zeros after a tar, at most.
_LONGEST_HEADER, _PADDING = 1 << 20, 1 << 26


@dataclass(frozen=True)
class ShardIndex:
    """Where the images of a shard lie: the n-th is the member `names[n]`, at `offsets[n]`, of `sizes[n]` bytes.

    `bytes` is the size of the tar; `sha256` its checksum where we packed it, else empty. `names` may have been dropped.
    """

    names: tuple[str, ...]
    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray
    bytes: int
    sha256: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    def same_images(self, other: ShardIndex) -> bool:
        """Return whether both have the same images in the same places."""
        pairs = ((self.offsets, other.offsets), (self.sizes, other.sizes), (self.labels, other.labels))
        return self.names == other.names and all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def index_file(shard: Path) -> Path:
    """Return where the index of a shard is: NAME.tar.json."""
    return shard.with_name(shard.name + ".json")


def shard_index(shard: Path) -> ShardIndex:
    """Read the index of a shard; one that was packed elsewhere gets its own from its headers, and it is kept beside it.

    Raises:
        ValueError: if index and shard do not fit each other, or for what `read_headers` refuses.
    """
    found = read_index(shard)
    if found is not None:
        return found
    index = read_headers(shard)
    with contextlib.suppress(OSError):  # a folder that cannot be written: it lives in memory alone
        write_index(shard, index)
    return index


def read_index(shard: Path) -> ShardIndex | None:
    """Read NAME.tar.json; None if there is none, or one made from the headers of a shard that has changed since.

    Raises:
        ValueError: if it is damaged, or that of a shard of another size.
    """
    path = index_file(shard)
    limit = max(check_plain(shard), 1 << 20)  # an image has fewer bytes in the index than its headers have in the tar
    try:
        values = read_json(path, limit)
        index = ShardIndex(
            tuple(values["names"]),
            _numbers(values["offsets"]),
            _numbers(values["sizes"]),
            _numbers(values["labels"]),
            bytes=int(values["bytes"]),
            sha256=str(values["sha256"]),
        )
        if values["count"] != len(index) or not _sound(index):
            raise ValueError("the numbers in it do not fit each other")
        modified = values["modified"]
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{path} must be the index of {shard.name}, and is damaged ({type(error).__name__}: {error}); remove it, "
            "and it is made anew."
        ) from None
    found = shard.stat()
    if not index.sha256:
        return index if (index.bytes, modified) == (found.st_size, found.st_mtime_ns) else None
    if index.bytes != found.st_size:
        raise ValueError(
            f"{shard} must have {index.bytes} bytes, as {path.name} says, got {found.st_size}: it was "
            f"{'cut' if found.st_size < index.bytes else 'changed'} after it was packed. Copy or pack it again."
        )
    return index


def write_index(shard: Path, index: ShardIndex) -> None:
    """Write the index of a shard beside it, whole or not at all."""
    values = {
        "count": len(index),
        "bytes": index.bytes,
        "sha256": index.sha256,
        "modified": None if index.sha256 else shard.stat().st_mtime_ns,
        "names": index.names,
        "offsets": index.offsets.tolist(),
        "sizes": index.sizes.tolist(),
        "labels": index.labels.tolist(),
    }
    write_text(index_file(shard), json.dumps(values, separators=(",", ":")) + "\n")


def read_headers(shard: Path) -> ShardIndex:
    """Make the index of a shard from the headers of its members; the images are passed over.

    As in WebDataset, members one after another whose names begin alike, up to the first dot, are a sample: here an
    image, and the number of its class, as text, in KEY.cls. Other members of a sample are passed over.

    Raises:
        ValueError: for a shard that is cut, compressed or no tar, a member whose name leads out of it or that is no
            plain file, or a sample without an image or class.
    """
    names, offsets, sizes, labels = [], [], [], []
    with _Headers(shard.open("rb", buffering=0)) as file:
        for key, members in _samples(shard, file):
            images = [member for extension, member in members if extension in _IMAGES]
            classes = [member for extension, member in members if extension == "cls"]
            for what, of_kind in (("an image", images), (".cls, the number of its class", classes)):
                if len(of_kind) != 1:
                    got = ", ".join([repr(member.name) for _, member in members[:5]] + ["..."] * bool(members[5:]))
                    raise ValueError(f"{shard}: every sample must have {what}, and one only; {key!r} has {got}.")
            if images[0].size > LARGEST:
                raise ValueError(f"{shard}: {images[0].name!r} must have at most {LARGEST:,} bytes.")
            names.append(images[0].name)
            offsets.append(images[0].offset_data)
            sizes.append(images[0].size)
            labels.append(_class_number(shard, file, classes[0]))
        length = file.seek(0, os.SEEK_END)
    if not names:
        raise ValueError(f"{shard} must have samples, got none.")
    return ShardIndex(tuple(names), np.asarray(offsets), np.asarray(sizes), np.asarray(labels), bytes=length)


def _samples(shard: Path, file: BinaryIO) -> Iterator[tuple[str, list[tuple[str, tarfile.TarInfo]]]]:
    """Yield (key, [(extension, member), ...]) of every sample."""
    key = ""
    sample: list[tuple[str, tarfile.TarInfo]] = []
    for member in _members(shard, file):
        found = re.fullmatch(r"((?:.*/)?[^./][^./]*)\.([^/]*)", member.name, re.DOTALL)
        if not found:  # hidden, or without a dot, as WebDataset's own notes are
            continue
        if sample and found[1] != key:
            yield key, sample
            sample = []
        key = found[1]
        sample.append((found[2].lower(), member))
    if sample:
        yield key, sample


def _members(shard: Path, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the plain files of a tar, and see that it is whole."""
    start = file.read(8)
    for magic, kind in _PACKED.items():
        if start.startswith(magic):
            raise ValueError(f"{shard} must be a tar that is not compressed, got {kind}: unpack it with {kind} first.")
    file.seek(0)
    end = 0
    with _named(shard), tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            _check(shard, member)
            if member.size < 0 or member.offset < end:
                raise ValueError(f"{member.name!r} has {member.size} bytes")
            end = member.offset_data
            if member.isreg():
                end += -(-member.size // _BLOCK) * _BLOCK
                yield member
    file.seek(end)
    rest = file.read(_BLOCK)
    if len(rest) < _BLOCK or rest.strip(b"\0"):
        raise ValueError(
            f"{shard} is cut or damaged: after {end} bytes there is neither a member nor the end of a tar; copy or "
            "pack it again."
        )
    while rest:
        rest = file.read(1 << 20)
        if rest.strip(b"\0"):
            raise ValueError(
                f"{shard} must end with its tar, or something would be lost; are these two, one after the other? Keep "
                "each in a file of its own."
            )
        if file.tell() - end > _PADDING:
            raise ValueError(f"{shard} must end with its tar, got more than {_PADDING:,} zero bytes after it.")


class _Headers(io.BufferedReader):
    """A tar of which nothing but headers is read: one that claims an absurd size must not take all memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _LONGEST_HEADER:
            raise ValueError(f"a header of {size} bytes")
        return super().read(size)


@contextlib.contextmanager
def _named(shard: Path) -> Iterator[None]:
    """Turn what tarfile says of a bad tar into an error that names it."""
    try:
        yield
    except _Refused:
        raise
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{shard} is cut, damaged or no tar ({error}); copy or pack it again.") from None


class _Refused(ValueError):
    pass


def _check(shard: Path, member: tarfile.TarInfo) -> None:
    parts = member.name.replace("\\", "/").split("/")
    if parts[0] == "" or ".." in parts or re.match(r"[A-Za-z]:", member.name):
        raise _Refused(f"{shard} must not have names that lead out of it, got {member.name!r}.")
    if not (member.isdir() or member.isreg()) or member.issparse():
        raise _Refused(f"{shard} must have plain files only, no links or devices, got {member.name!r}.")


def _class_number(shard: Path, file: BinaryIO, member: tarfile.TarInfo) -> int:
    place = file.tell()
    file.seek(member.offset_data)
    text = file.read(min(member.size, 64))
    file.seek(place)
    if not re.fullmatch(rb"\s*-?[0-9]{1,9}\s*", text):
        raise ValueError(f"{shard}: {member.name!r} must be the number of a class, got {text[:20]!r}.")
    return int(text)


def _numbers(values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind != "i":
        raise ValueError("whole numbers are missing")
    return array.astype(np.int64)


def _sound(index: ShardIndex) -> bool:
    arrays = index.offsets, index.sizes, index.labels
    return (
        len(index) > 0
        and all(isinstance(name, str) for name in index.names)
        and all(len(column) == len(index) for column in (index.names, *arrays))
        and min(index.offsets.min(), index.sizes.min()) >= 0
        and index.sizes.max() <= LARGEST
        and bool((index.offsets <= index.bytes - index.sizes).all())
    )
