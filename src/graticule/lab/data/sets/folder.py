"""Image folders in ImageNet's layout: root/train/CLASS/*.JPEG and root/val/CLASS/*.JPEG."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS

from graticule.lab.data.images import LARGEST, DatasetInfo, EncodedImages, Split
from graticule.lab.data.registry import register_dataset
from graticule.system.files import check_plain, read_bytes, read_utf8

#: The folders of a split; the first that exists is used.
SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("val", "validation", "test")}


def is_image(name: str) -> bool:
    """Return whether a file of this name is an image."""
    return name.lower().endswith(IMG_EXTENSIONS)


class FolderImages(EncodedImages):
    """Images of a folder, one sub-folder per class."""

    def __init__(self, files: list[tuple[Path, int]], skip_broken: bool) -> None:
        super().__init__(np.asarray([label for _, label in files]), skip_broken)
        self.files = files

    def read(self, index: int) -> bytes:
        """Return the bytes of a file."""
        return read_bytes(self.files[index][0], LARGEST)

    def place(self, index: int) -> Path:
        """Return the path of a file."""
        return self.files[index][0]


@register_dataset("unlabeled_folder")
def unlabeled_folder(split: Split, root: Path | None) -> tuple[FolderImages, DatasetInfo]:
    """Load the images of a folder at any depth, without labels; every tenth one, in the order of paths, is held out."""
    root = existing_folder(root, "of images")
    files = files_below(root, is_image)
    if len(files) < 2:
        raise ValueError(f"`data_root` must have two images or more, got {len(files)} in {root}.")
    chosen = [(path, 0) for index, path in enumerate(files) if (index % 10 == 0) == (split == "test")]
    return FolderImages(chosen, skip_broken=split == "train"), DatasetInfo("unlabeled_folder", ("any",))


def existing_folder(root: Path | None, content: str) -> Path:
    """Return the folder of a data set, which must exist; `what` describes it in the error."""
    if root is None or not root.is_dir():
        missing = "none; a folder that is named as a data set is written ./NAME"
        wrong = f"{str(root)!r}, which {'is not a folder' if root.exists() else 'does not exist'}" if root else missing
        raise FileNotFoundError(f"`data_root` must be a folder {content}, got {wrong}.")
    return root


def folder_files(root: Path) -> tuple[tuple[str, ...], dict[Split, list[tuple[Path, int]]]]:
    """Find the names of the classes, and (file, label) of every image of both splits."""
    classes_of = {split: _classes(root, split) for split in SPLITS}
    check_same_classes(classes_of["train"], classes_of["test"], root)
    names = tuple(sorted(classes_of["train"]))
    return names, {
        split: [(path, label) for label, name in enumerate(names) for path in classes[name]]
        for split, classes in classes_of.items()
    }


def check_same_classes(train: Iterable[str], test: Iterable[str], root: Path) -> None:
    """Check that both splits have the same classes, in any order."""
    if differing := sorted({*train} ^ {*test}):
        listed = ", ".join(differing[:5]) + ", ..." * (len(differing) > 5)
        raise ValueError(
            f"`data_root` must have the same classes in training and evaluation; in one only: {listed} ({root})."
        )


def read_class_names(path: Path, most: int) -> tuple[str, ...]:
    """Read 2 to `most` different names, one per line."""
    names = tuple(line.strip() for line in read_utf8(path, 1 << 26).splitlines())
    if not 2 <= len(names) <= most or "" in names or len(set(names)) < len(names):
        raise ValueError(f"{path} must have 2 to {most:,} different names, one per line, got {len(names)} lines.")
    return names


def _classes(root: Path, split: Split) -> dict[str, list[Path]]:
    """Find the images of every class of a split."""
    folder = split_folder(root, split)
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    classes = sorted(entry.name for entry in entries if entry.is_dir() or _leads_nowhere(entry))
    if len(classes) < 2:
        raise ValueError(f"`data_root` must have two classes or more, got {len(classes)} in {folder}.")
    for name in classes:
        check_link(folder / name)
    images_of = {name: files_below(folder / name, is_image) for name in classes}
    if empty := [name for name, images in images_of.items() if not images]:
        raise ValueError(
            f"`data_root` must have images ({', '.join(IMG_EXTENSIONS)}) in every class, got none in "
            f"{', '.join(str(folder / name) for name in empty[:3])}."
        )
    return images_of


def split_folder(root: Path, split: Split) -> Path:
    """Return the folder of a split."""
    folder = next((root / name for name in SPLITS[split] if (root / name).is_dir()), None)
    if folder is None:
        raise FileNotFoundError(
            f"`data_root` must have a folder {' or '.join(SPLITS[split])}, got {root}, which has none."
        )
    return folder


def files_below(folder: Path, accepts: Callable[[str], bool]) -> list[Path]:
    """Find the regular files at any depth below `folder` whose names are `wanted`; links are followed.

    Raises:
        ValueError: for a link that leads nowhere or to a folder that contains it, or a file that is not regular, such
            as a pipe.
    """
    paths: list[Path] = []
    left: list[tuple[Path, tuple[str, ...]]] = [(folder, ())]  # with the folders from which a link was followed
    while left:
        place, origins = left.pop()
        with os.scandir(place) as entries:
            for entry in entries:
                path, link = Path(entry.path), entry.is_symlink()
                if path.is_dir() if link else entry.is_dir():
                    above = (*origins, os.path.realpath(place)) if link else origins
                    if link and any(Path(origin).is_relative_to(os.path.realpath(path)) for origin in above):
                        raise ValueError(f"{path} must not be a link to a folder that contains it.")
                    left.append((path, above))
                elif accepts(entry.name):
                    if not entry.is_file(follow_symlinks=False):
                        check_link(path)
                        check_plain(path)
                    paths.append(path)
    return sorted(paths)


def check_link(path: Path) -> None:
    """Check that `path`, if it is a link, leads to something."""
    if _leads_nowhere(path):
        raise ValueError(f"{path} must be a file or a folder, got a link that leads nowhere, to {os.readlink(path)}.")


def _leads_nowhere(path: Path) -> bool:
    return path.is_symlink() and not path.exists()
