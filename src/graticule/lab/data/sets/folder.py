"""Image folders in ImageNet's layout: root/train/CLASS/*.JPEG and root/val/CLASS/*.JPEG."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS

from graticule.lab.data.images import LARGEST, DatasetInfo, EncodedImages, Split
from graticule.lab.data.registry import register_dataset
from graticule.system.files import read_bytes, read_utf8

#: The folders of a split; the first that exists is used.
SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("val", "validation", "test")}


class FolderImages(EncodedImages):
    """Images of a folder, one sub-folder per class."""

    def __init__(self, files: list[tuple[Path, int]], skip_broken: bool) -> None:
        super().__init__(np.asarray([label for _, label in files]), skip_broken)
        self.files = files

    def read(self, index: int) -> bytes:
        return read_bytes(self.files[index][0], LARGEST)

    def files_of(self, index: int) -> tuple[Path]:
        return (self.files[index][0],)


@register_dataset("unlabeled_folder")
def unlabeled_folder(split: Split, root: Path | None) -> tuple[FolderImages, DatasetInfo]:
    """Load the images of a folder at any depth, without labels; every tenth one, in the order of paths, is held out."""
    root = existing_folder(root, "of images")
    files = images_below(root)
    if len(files) < 2:
        raise ValueError(f"`data_root` must have two images or more, got {len(files)} in {root}.")
    chosen = [(path, 0) for index, path in enumerate(files) if (index % 10 == 0) == (split == "test")]
    return FolderImages(chosen, skip_broken=split == "train"), DatasetInfo("unlabeled_folder", ("any",))


def existing_folder(root: Path | None, content: str) -> Path:
    """Return the folder of a data set, which must exist; `content` describes it in the error."""
    if root is None or not root.is_dir():
        missing = "none; a folder that is named as a data set is written ./NAME"
        wrong = f"{str(root)!r}, which {'is not a folder' if root.exists() else 'does not exist'}" if root else missing
        raise FileNotFoundError(f"`data_root` must be a folder {content}, got {wrong}.")
    return root


def folder_files(root: Path, split: Split) -> tuple[tuple[str, ...], list[tuple[Path, int]]]:
    """Find the names of the classes, and (file, label) of every image of a split."""
    folder = split_folder(root, split)
    names = classes_of(folder)
    if len(names) < 2:
        raise ValueError(f"`data_root` must have two classes or more, got {len(names)} in {folder}.")
    files = {name: images_below(folder / name) for name in names}
    if empty := [str(folder / name) for name in names if not files[name]]:
        raise ValueError(
            f"`data_root` must have images ({', '.join(IMG_EXTENSIONS)}) in every class, got none in "
            f"{', '.join(empty[:3])}."
        )
    return names, [(path, label) for label, name in enumerate(names) for path in files[name]]


def split_folder(root: Path, split: Split) -> Path:
    """Return the folder of a split."""
    folder = next((root / name for name in SPLITS[split] if (root / name).is_dir()), None)
    if folder is None:
        hint = "" if split == "train" else "; `val_split` 0.2 holds a fifth of train out"
        if split == "train" and len(classes_of(root)) > 1:
            move = f"pass {root.parent}" if root.name == "train" else f"move them to {root / 'train'}"
            hint = f"; if its folders are the classes, {move}"
        raise FileNotFoundError(
            f"`data_root` must have a folder {' or '.join(SPLITS[split])}, got {root}, which has none{hint}."
        )
    return folder


def classes_of(folder: Path) -> tuple[str, ...]:
    """Return the names of the folders of classes in a folder."""
    return tuple(sorted(path.name for path in folder.glob("[!.]*") if path.is_dir()))


def read_class_names(path: Path, most: int) -> tuple[str, ...]:
    """Read 2 to `most` different names, one per line."""
    names = tuple(line.strip() for line in read_utf8(path, 1 << 26).splitlines())
    if not 2 <= len(names) <= most or "" in names or len(set(names)) < len(names):
        raise ValueError(f"{path} must have 2 to {most:,} different names, one per line, got {len(names)} lines.")
    return names


def images_below(folder: Path) -> list[Path]:
    """Find the images at any depth below `folder`, in the order of their paths; links are followed."""
    places = os.walk(folder, followlinks=True)
    return sorted(Path(place, name) for place, _, names in places for name in names if is_image(name))


def is_image(name: str) -> bool:
    """Return whether a file of this name is an image."""
    return name.lower().endswith(IMG_EXTENSIONS)
