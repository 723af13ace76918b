"""Image folders in ImageNet's layout: root/train/CLASS/*.JPEG and root/val/CLASS/*.JPEG."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torchvision.datasets.folder import IMG_EXTENSIONS

from graticule.data.encoded import EncodedImages
from graticule.data.images import DatasetInfo, Split

#: The folders of a split, the first that is there.
SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("val", "validation", "test")}


class FolderImages(EncodedImages):
    """Images of a folder, one sub-folder a class."""

    def __init__(self, files: list[tuple[Path, int]], skip_broken: bool) -> None:
        super().__init__(np.asarray([label for _, label in files]), skip_broken)
        self.files = files

    def read(self, index: int) -> bytes:
        """Return the bytes of a file."""
        return self.files[index][0].read_bytes()

    def place(self, index: int) -> Path:
        """Return the path of a file."""
        return self.files[index][0]


def image_folder(split: Split, root: Path | None) -> tuple[FolderImages, DatasetInfo]:
    """Load `root`/train, or `root`/val (or validation, or test).

    Raises:
        ValueError, FileNotFoundError: for a folder that is missing or empty, fewer than two classes, a class
            without images, classes that differ between the two, or a link that leads out of the folder.
    """
    names, files = folder_files(root)
    info = DatasetInfo("image_folder", names, 3, None, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    return FolderImages(files[split], skip_broken=split == "train"), info


def folder_files(root: Path | None) -> tuple[tuple[str, ...], dict[Split, list[tuple[Path, int]]]]:
    """Find the names of the classes, and (file, label) of every image of both splits.

    Raises:
        ValueError, FileNotFoundError: as `image_folder` does.
    """
    if root is None or not root.is_dir():
        raise FileNotFoundError(
            f"`data_root` must be a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG, got {str(root)!r}, which is "
            "not there."
        )
    found = {split: _classes(root, split) for split in SPLITS}
    if differing := sorted(set(found["train"]) ^ set(found["test"])):
        raise ValueError(
            f"`data_root` must have the same classes in training and evaluation; in one only: "
            f"{', '.join(differing[:5])}{', ...' if len(differing) > 5 else ''}."
        )
    names = tuple(sorted(found["train"]))
    return names, {
        split: [(path, label) for label, name in enumerate(names) for path in classes[name]]
        for split, classes in found.items()
    }


def _classes(root: Path, split: Split) -> dict[str, list[Path]]:
    """Find the images of every class of a split."""
    folder = next((root / name for name in SPLITS[split] if (root / name).is_dir()), None)
    if folder is None:
        raise FileNotFoundError(f"`data_root` must have a folder {' or '.join(SPLITS[split])}, which {root} has not.")
    stay_inside(folder, root)
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(classes) < 2:
        raise ValueError(f"`data_root` must have two classes or more, got {len(classes)} in {folder}.")
    found = {name: _images(folder / name, root) for name in classes}
    if empty := [name for name, images in found.items() if not images]:
        raise ValueError(
            f"`data_root` must have images ({', '.join(IMG_EXTENSIONS)}) in every class, got none in "
            f"{', '.join(str(folder / name) for name in empty[:3])}."
        )
    return found


def _images(folder: Path, root: Path) -> list[Path]:
    """Find the images below the folder of a class; no link may lead out of `root`."""
    images = []
    for place, folders, names in os.walk(folder):
        for path in [Path(place), *(Path(place, name) for name in folders)]:
            stay_inside(path, root)
        found = [Path(place, name) for name in names if name.lower().endswith(IMG_EXTENSIONS)]
        for path in found:
            stay_inside(path, root)
        images += found
    return sorted(images)


def stay_inside(path: Path, root: Path) -> None:
    """Check that `path` is no link that leads out of `root`.

    Raises:
        ValueError: if it is, naming both ends.
    """
    if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"`data_root` must not have a link that leads out of it, got {path} -> {path.resolve()}.")
