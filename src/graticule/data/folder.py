"""Image folders in ImageNet's layout: root/train/CLASS/*.JPEG and root/val/CLASS/*.JPEG."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFile
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

from graticule.data.images import DatasetInfo, Split

log = logging.getLogger(__name__)

#: What an image may be, whatever its name says; Pillow would start other programs for some of the rest.
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
_SPLITS = {"train": ("train",), "test": ("val", "validation", "test")}


class FolderImages(Dataset[tuple[Image.Image, int]]):
    """Images of a folder, one sub-folder a class.

    A file that is no readable image is counted in `skipped`, named in the log and replaced by the next one of
    its class in training (`skip_broken`); in evaluation it is an error. A file that the disk does not give is
    an error in both.
    """

    def __init__(self, files: list[tuple[Path, int]], skip_broken: bool) -> None:
        self.files = files
        self.labels = np.asarray([label for _, label in files])
        self.skip_broken = skip_broken
        self._broken = torch.zeros(len(files), dtype=torch.bool).share_memory_()  # workers report here

    @property
    def skipped(self) -> list[Path]:
        """The broken files that were met, in this process or in a worker of it."""
        return [self.files[index][0] for index in self._broken.nonzero().flatten().tolist()]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        label = self.files[index][1]
        for step in range(len(self.files)):
            candidate = (index + step) % len(self.files)
            path, found = self.files[candidate]
            if found != label or self._broken[candidate]:
                continue
            content = path.read_bytes()
            try:
                return _decode(content), label
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                reason = str(error).replace(repr(content), path.name) or type(error).__name__
                if not self.skip_broken:
                    raise ValueError(
                        f"{path} cannot be read as an image ({reason}); an evaluation must see every image, so mend "
                        "or remove it."
                    ) from None
                self._broken[candidate] = True
                log.warning("skipped %s (%s); %d skipped so far", path, reason, len(self.skipped))
        raise ValueError(f"no image of class {label} can be read, the last of them {self.files[index][0]}.")


def image_folder(split: Split, root: Path | None) -> tuple[FolderImages, DatasetInfo]:
    """Load `root`/train, or `root`/val (or validation, or test).

    Raises:
        ValueError, FileNotFoundError: for a folder that is missing or empty, fewer than two classes, a class
            without images, classes that differ between the two, or a link that leads out of the folder.
    """
    if root is None or not root.is_dir():
        raise FileNotFoundError(
            f"`data_root` must be a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG, got {str(root)!r}, which is "
            "not there."
        )
    found = {part: _classes(root, part) for part in _SPLITS}
    if differing := sorted(set(found["train"]) ^ set(found["test"])):
        raise ValueError(
            f"`data_root` must have the same classes in training and evaluation; in one only: "
            f"{', '.join(differing[:5])}{', ...' if len(differing) > 5 else ''}."
        )
    names = tuple(sorted(found[split]))
    files = [(path, label) for label, name in enumerate(names) for path in found[split][name]]
    info = DatasetInfo("image_folder", names, 3, None, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    return FolderImages(files, skip_broken=split == "train"), info


def _classes(root: Path, split: str) -> dict[str, list[Path]]:
    """Find the images of every class of a split."""
    folder = next((root / name for name in _SPLITS[split] if (root / name).is_dir()), None)
    if folder is None:
        raise FileNotFoundError(f"`data_root` must have a folder {' or '.join(_SPLITS[split])}, which {root} has not.")
    _stay_inside(folder, root)
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
            _stay_inside(path, root)
        found = [Path(place, name) for name in names if name.lower().endswith(IMG_EXTENSIONS)]
        for path in found:
            _stay_inside(path, root)
        images += found
    return sorted(images)


def _stay_inside(path: Path, root: Path) -> None:
    if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"`data_root` must not have a link that leads out of it, got {path} -> {path.resolve()}.")


def _decode(content: bytes) -> Image.Image:
    """Decode a whole image; a truncated one is an error, whatever the process has told Pillow."""
    allowed, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            return image.convert("RGB")
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = allowed
