"""Tar shards in WebDataset's format: the positions of their images, read from the headers of the members."""

from __future__ import annotations

import io
import itertools
import re
import tarfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

from torchvision.datasets.folder import IMG_EXTENSIONS

from graticule.lab.data.images import LARGEST, MOST_CLASSES, Split
from graticule.lab.data.sets.folder import SPLITS, check_link, check_same_classes, split_folder
from graticule.system.files import check_plain, read_utf8

#: The file that names the classes, one per line.
CLASSES = "classes.txt"
#: The key and the extension of a member; hidden ones and those without a dot, as WebDataset's own notes, have none.
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_IMAGES = frozenset(extension[1:] for extension in IMG_EXTENSIONS)
_BLOCK = 512
#: Most bytes of a header with its long names, and of the zeros after a tar.
_LONGEST_HEADER, _PADDING = 1 << 20, 1 << 26


class Source(NamedTuple):
    """An image in a file, such as a tar: `size` bytes at `offset` of `file`, called `name`."""

    file: Path
    offset: int
    size: int
    label: int
    name: str


def tar_files(root: Path) -> tuple[tuple[str, ...], dict[Split, list[Source]]]:
    """Find the names of the classes, and every image in `root`/train/*.tar and `root`/val/*.tar.

    The names are the lines of `root`/classes.txt; without that file they are numbers.

    Raises:
        ValueError, FileNotFoundError: for tars that are missing or refused (see `read_tar`), a label without a class,
            fewer than two classes, or classes that differ between the splits.
    """
    found = {part: [image for path in _find_tars(root, part) for image in read_tar(path)] for part in SPLITS}
    names = class_names(root)
    most = len(names) or MOST_CLASSES
    labels: dict[Split, set[int]] = {part: {image.label for image in images} for part, images in found.items()}
    for images in found.values():
        for image in images:
            if not 0 <= image.label < most:
                raise ValueError(
                    f"{image.file} must have classes from 0 to {most - 1}, got {image.label} for {image.name}."
                )
    names = names or tuple(map(str, range(max(labels["train"] | labels["test"]) + 1)))
    if len(names) < 2:
        raise ValueError(f"`folder` must have two classes or more, got {len(names)} in {root}.")
    check_same_classes(root, *([names[label] for label in sorted(chosen)] for chosen in labels.values()))
    return names, found


def has_tars(root: Path) -> bool:
    """Return whether `root`/train has tars, including compressed ones, and no folders."""
    train = root / "train"
    entries = list(train.iterdir()) if train.is_dir() else []
    return any(_is_tar(path.name) for path in entries) and not any(path.is_dir() for path in entries)


def _is_tar(name: str) -> bool:
    return not name.startswith(".") and re.search(r"\.(tar(\.(gz|bz2|xz|zst))?|tgz)$", name) is not None


def _find_tars(root: Path, part: Split) -> list[Path]:
    """Find the tars of a split, sorted."""
    folder = split_folder(root, part)
    found = sorted(path for path in folder.iterdir() if _is_tar(path.name))
    for path in found:
        if path.suffix != ".tar":
            raise ValueError(f"{path} must be a tar that is not compressed, got {path.suffix}; decompress it to .tar.")
        check_link(path)
        check_plain(path)
    if not found:
        raise FileNotFoundError(f"`folder` must have tars, *.tar, got none in {folder}.")
    return found


def class_names(root: Path) -> tuple[str, ...]:
    """Read the names of the classes, one per line; empty without classes.txt."""
    path = root / CLASSES
    check_link(path)
    try:
        lines = read_utf8(path, 1 << 26).split("\n")
    except FileNotFoundError:
        return ()
    names = tuple(line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines))
    if not all(names) or len(set(names)) < len(names) or not 0 < len(names) <= MOST_CLASSES:
        raise ValueError(
            f"{path} must have {MOST_CLASSES:,} different names at most, one per line and none empty, got {len(names)}."
        )
    return names


def read_tar(path: Path) -> list[Source]:
    """Find the images of a tar from the headers of its members, without unpacking it.

    As in WebDataset, successive members whose names agree up to the first dot form a sample: here an image, and KEY.cls
    with the number of its class as text. Other members of a sample are ignored.

    Raises:
        ValueError: for a file that is truncated, compressed or not a tar, a member whose name leads out of it or that
            is not a regular file, or a sample without exactly one image and class.
    """
    with _Headers(path.open("rb", buffering=0)) as file:
        named = ((_NAME.fullmatch(member.name), member) for member in _members(path, file))
        members = [(found[1], found[2].lower(), member) for found, member in named if found]
        found = [
            _image(path, file, key, [(extension, member) for _, extension, member in sample])
            for key, sample in itertools.groupby(members, key=lambda entry: entry[0])
        ]
    if not found:
        raise ValueError(f"{path} must have samples, got none.")
    return found


def _image(path: Path, file: BinaryIO, key: str, sample: list[tuple[str, tarfile.TarInfo]]) -> Source:
    """Return the image of a sample, given as pairs of an extension and a member."""
    images = [member for extension, member in sample if extension in _IMAGES]
    classes = [member for extension, member in sample if extension == "cls"]
    for what, of_kind in (("an image", images), (".cls, the number of its class", classes)):
        if len(of_kind) != 1:
            got = ", ".join([repr(member.name) for _, member in sample[:5]] + ["..."] * bool(sample[5:]))
            raise ValueError(f"{path}: every sample must have {what}, exactly one; {key!r} has {got}.")
    if images[0].size > LARGEST:
        raise ValueError(f"{path}: {images[0].name!r} must have at most {LARGEST:,} bytes.")
    file.seek(classes[0].offset_data)
    text = file.read(min(classes[0].size, 64))
    if not re.fullmatch(rb"\s*-?[0-9]{1,9}\s*", text):
        raise ValueError(f"{path}: {classes[0].name!r} must be the number of a class, got {text[:20]!r}.")
    return Source(path, images[0].offset_data, images[0].size, int(text), images[0].name)


def _members(path: Path, file: BinaryIO) -> list[tarfile.TarInfo]:
    """Return the regular files of a tar, and check that it is complete.

    `tarfile` itself takes a damaged header, and the end of a tar that was truncated between members, for the end.
    """
    found, end = [], 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.size < 0 or member.offset < end:
                    raise tarfile.ReadError(f"{member.name!r} has {member.size} bytes")
                found.append(member)
                end = member.offset_data + (-(-member.size // _BLOCK) * _BLOCK if member.isreg() else 0)
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path} must be a tar that is not compressed, and is truncated, damaged or of another kind ({error})."
        ) from None
    for member in found:
        parts = member.name.replace("\\", "/").split("/")
        if parts[0] == "" or ".." in parts or re.match(r"[A-Za-z]:", member.name):
            raise ValueError(f"{path} must not have names that lead out of it, got {member.name!r}.")
        if not (member.isdir() or member.isreg()) or member.issparse():
            raise ValueError(f"{path} must have regular files only, no links or devices, got {member.name!r}.")
    file.seek(end)
    rest = file.read(_BLOCK)
    if len(rest) < _BLOCK or rest.strip(b"\0"):
        raise ValueError(
            f"{path} is truncated or damaged: after {end} bytes a member or the end of the tar is missing."
        )
    while rest:
        if rest.strip(b"\0"):
            raise ValueError(f"{path} must be one tar, or data would be lost; are two concatenated? Keep them apart.")
        if file.tell() - end > _PADDING:
            raise ValueError(f"{path} must end after its tar, got more than {_PADDING:,} zero bytes after it.")
        rest = file.read(_LONGEST_HEADER)
    return [member for member in found if member.isreg()]


class _Headers(io.BufferedReader):
    """Reader of tar headers only: one that claims an absurd size must not exhaust memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _LONGEST_HEADER:
            raise ValueError(f"a header of {size} bytes")
        return super().read(size)
