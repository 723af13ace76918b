"""Images with a class per pixel in the layout of ADE20K: images/SPLIT/NAME.jpg and annotations/SPLIT/NAME.png."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors

from graticule.lab.data.dense import IGNORED, DenseImages, DenseInfo, Target, read_image
from graticule.lab.data.images import LARGEST, Split
from graticule.lab.data.registry import register_dataset
from graticule.lab.data.sets.folder import images_below, read_class_names
from graticule.system.files import read_bytes, read_utf8

#: The folders of a split; the first that exists is used.
_SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train", "training"), "test": ("val", "validation", "test")}
CAMVID = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")


class MaskImages(DenseImages):
    """Images and their masks, PNGs of 8 bits with the class of every pixel.

    Args:
        pairs: the files of every image and its mask.
        values: the meaning of each value of a mask, (256,): a class, or `IGNORED`; -1 for an invalid value.
        training: whether the images are trained on.
    """

    def __init__(self, pairs: Sequence[tuple[Path, Path]], values: np.ndarray, training: bool) -> None:
        super().__init__(len(pairs), skip_broken=training)
        self.pairs = pairs
        self.values = values

    def place(self, index: int) -> Path:
        """Return the path of an image."""
        return self.pairs[index][0]

    def files_of(self, index: int) -> Sequence[Path]:
        """Return the paths of an image and its mask."""
        return self.pairs[index]

    def example(self, index: int) -> tuple[Tensor, Target]:
        """Return an image and the class of each of its pixels."""
        image_file, mask_file = self.pairs[index]
        mask = read_mask(mask_file)
        image = read_image(image_file, (mask.shape[0], mask.shape[1]), mask_file)
        classes = self.values[mask]
        if (classes < 0).any():
            known, wrong = (self.values >= 0).sum(), mask[classes < 0][0]
            raise ValueError(f"the class of a pixel must be one of {known}, and {mask_file} has the value {wrong}")
        return image, {"classes": tv_tensors.Mask(torch.from_numpy(classes.astype(np.uint8))), "image_id": index}


def read_mask(path: Path) -> np.ndarray:
    """Read a mask, (height, width), uint8: a gray PNG, or one with a palette, whose indices are the classes.

    Raises:
        ValueError, OSError, SyntaxError: if it cannot be read, or has colors.
    """
    with Image.open(io.BytesIO(read_bytes(path, LARGEST)), formats=("PNG",)) as image:
        if image.mode not in ("L", "P", "1"):
            raise ValueError(f"the mask {path} must have one channel of 8 bits, got Pillow's mode {image.mode}")
        return np.array(image).astype(np.uint8)


def load_masks(
    name: str,
    class_names: Sequence[str],
    pairs: Sequence[tuple[Path, Path]],
    split: Split,
    first: int = 0,
    ignored: Sequence[int] = (),
) -> tuple[MaskImages, DenseInfo]:
    """Return the images of a data set and its facts; its classes are the values from `first` on.

    The value 255 and those of `ignored` are `IGNORED`, and all others are invalid.
    """
    values = np.full(256, -1)
    values[first : first + len(class_names)] = np.arange(len(class_names))
    values[[IGNORED, *ignored]] = IGNORED
    return MaskImages(pairs, values, split == "train"), DenseInfo(name, tuple(class_names), truth=("classes",))


def mask_pairs(root: Path | None, split: Split) -> tuple[Path, list[tuple[Path, Path]]]:
    """Return `root`, and the files of each image of a split and its mask."""
    names = _SPLITS[split]
    name = next((name for name in names if root and (root / "images" / name).is_dir()), None)
    if root is None or name is None or not (root / "annotations" / name).is_dir():
        raise FileNotFoundError(
            f"`data_root` must be a folder with images/{names[0]} and annotations/{names[0]} (or "
            f"{', '.join(names[1:])}), got {str(root)!r}, which does not."
        )
    folders = [root / kind / name for kind in ("images", "annotations")]
    images, masks = (
        {path.relative_to(folder).with_suffix(""): path for path in images_below(folder)} for folder in folders
    )
    if not images:
        raise ValueError(f"`data_root` must have images, got none in {folders[0]}.")
    if alone := sorted(images.keys() ^ masks.keys()):
        raise ValueError(
            f"`data_root` must have one mask per image with its name; {len(alone)} have no counterpart, such as "
            f"{(images | masks)[alone[0]]}."
        )
    return root, [(images[key], masks[key]) for key in sorted(images)]


@register_dataset("ade20k")
def ade20k(split: Split, root: Path | None) -> tuple[MaskImages, DenseInfo]:
    """Load ADE20K, the folder ADEChallengeData2016: 150 classes, the value 0 is ignored.

    The names of the classes are those of `root`/objectInfo150.txt, if it exists.
    """
    base, pairs = mask_pairs(root, split)
    names = tuple(map(str, range(1, 151)))
    if (listed := base / "objectInfo150.txt").is_file():
        lines = read_utf8(listed, 1 << 20).splitlines()[1:]
        names = tuple(line.split("\t")[-1].split(",")[0].strip() for line in lines if line.strip())
        if len(names) != 150:
            raise ValueError(f"{listed} must list 150 classes after its header, got {len(names)}.")
    return load_masks("ade20k", names, pairs, split, first=1, ignored=(0,))


@register_dataset("camvid")
def camvid(split: Split, root: Path | None) -> tuple[MaskImages, DenseInfo]:
    """Load CamVid in 11 classes, the values 0 to 10 in the order of SegNet; 11, void, is ignored."""
    _, pairs = mask_pairs(root, split)
    return load_masks("camvid", CAMVID, pairs, split, ignored=(11,))


@register_dataset("mask_folder")
def mask_folder(split: Split, root: Path | None) -> tuple[MaskImages, DenseInfo]:
    """Load any folder of this layout; line n of `root`/classes.txt names the value n, from 0; 255 is ignored."""
    base, pairs = mask_pairs(root, split)
    listed = base / "classes.txt"
    if not listed.is_file():
        raise FileNotFoundError(
            f"`data_root` must have classes.txt, the names of the classes by line, got {base}, which has none."
        )
    names = read_class_names(listed, 255)  # of masks of 8 bits
    return load_masks("mask_folder", names, pairs, split)
