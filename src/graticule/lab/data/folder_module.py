"""The images of a folder at any depth, to inspect a model with; the folders name the classes, if possible."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from graticule.lab.data.augmentation import Augmentation
from graticule.lab.data.images import DatasetInfo, class_labels, spread
from graticule.lab.data.module import DataModule
from graticule.lab.data.sets.folder import SPLITS, FolderImages, images_below
from graticule.system.files import read_bytes

#: Largest file of labels in bytes.
_LARGEST = 1 << 28


class FolderModule(DataModule):
    """The images of a folder as test images; there are no training images.

    FOLDER/val/CLASS/*, FOLDER/CLASS/* and FOLDER/* are used. The names of the folders decide the labels: the indices of
    the model's classes if they are names of these. If the model does not name its classes and there are as many
    folders, it is their alphabetical order, as in ImageNet's folders. Otherwise there are no labels.

    Args:
        folder: the folder of the images.
        info: facts of the model's images, with the names of its classes, if they are known.
        size: (height, width) in pixels.
        num_classes: number of classes of the model.
        labels: file of lines `path,label`, paths relative to the folder, labels as numbers or names of classes.
        count: use at most this many images, evenly spaced.
        batch_size: images per batch.
        augmentation: gives resizing and center crop.

    Raises:
        ValueError, FileNotFoundError: for a folder that is missing or empty, or labels that do not fit.
    """

    def __init__(
        self,
        folder: Path,
        info: DatasetInfo,
        size: tuple[int, int],
        num_classes: int,
        *,
        labels: Path | None = None,
        count: int | None = None,
        batch_size: int = 64,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.facts, self.num_classes, self.labels_file, self.count = info, num_classes, labels, count
        augmentation = augmentation or Augmentation()
        super().__init__("image_folder", root=folder, size=size, eval_batch_size=batch_size, augmentation=augmentation)

    def read(self) -> None:
        root, paths = find_images(Path(str(self.root)))
        chosen = [paths[index] for index in spread(len(paths), self.count or len(paths))]
        places = [path.relative_to(root) for path in chosen]
        flat = any(path.parent == root for path in paths)
        #: The classes, if every image is in the folder of one.
        self.folders = () if flat else tuple(sorted({path.relative_to(root).parts[0] for path in paths}))
        label_list: list[int] | None = None
        if self.labels_file is not None:
            self.folders = ()
            table = _read_labels(self.labels_file, self.facts.class_names, self.num_classes)
            if missing := [place for place in places if place.as_posix() not in table]:
                raise ValueError(
                    f"`labels` must have a line for each image, got none for {missing[0]} in {self.labels_file}."
                )
            label_list = [table[place.as_posix()] for place in places]
        elif outputs := class_labels(self.folders, self.facts.class_names, self.num_classes) if self.folders else None:
            label_list = [outputs[self.folders.index(place.parts[0])] for place in places]
        #: The labels of the images, (n,); None if they are not known.
        self.labels = None if label_list is None else np.asarray(label_list)
        several = len(self.folders) > 1
        #: The index of the folder of each image, (n,), for models without classes; None if images are in one folder.
        self.groups = np.array([self.folders.index(place.parts[0]) for place in places]) if several else None
        names = self.facts.class_names or tuple(map(str, range(self.num_classes)))
        self.info = replace(self.facts, name="images", class_names=names)
        pairs = list(zip(chosen, label_list or [0] * len(chosen), strict=True))
        self.images = {"test": FolderImages(pairs, skip_broken=False)}
        self.rows = {"test": np.arange(len(pairs))}


def find_images(folder: Path) -> tuple[Path, list[Path]]:
    """Return the folder of the test images in `folder`, and the images below it."""
    if not folder.is_dir():
        wrong = "is not a folder" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"`images` must be a folder, got {str(folder)!r}, which {wrong}.")
    root = next((folder / name for name in SPLITS["test"] if (folder / name).is_dir()), folder)
    if not (paths := images_below(root)):
        raise ValueError(f"`images` must have images in it, got none in {folder}.")
    return root, paths


def _read_labels(path: Path, names: Sequence[str], num_classes: int) -> Mapping[str, int]:
    """Read a file of lines `path,label`."""
    table: dict[str, int] = {}
    lines = read_bytes(path, _LARGEST).decode("utf-8", errors="replace").splitlines()
    for number, row in enumerate(csv.reader(lines), start=1):
        if not row or (number == 1 and row[-1].strip() == "label"):
            continue
        text = row[-1].strip()
        label = list(names).index(text) if text in names else int(text) if text.isdecimal() else -1
        if len(row) != 2 or not 0 <= label < num_classes:
            raise ValueError(
                f"`labels` must have lines path,label with labels from 0 to {num_classes - 1} or names of classes, got "
                f"{','.join(row)[:80]!r} in line {number} of {path}."
            )
        table[row[0].strip()] = label
    return table
