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
    """Images and their masks: PNGs of 8 bits, gray or with a palette, that have the class of every pixel.

    Args:
        root: the folder of both.
        split: train or test.
        classes: number of classes, which are the values from `first` on.
        first: the value of the first class.
        ignored: values without a class, beside 255; all others are invalid.
    """

    def __init__(
        self, root: Path | None, split: Split, classes: int, first: int = 0, ignored: Sequence[int] = ()
    ) -> None:
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
        self.pairs = [(images[key], masks[key]) for key in sorted(images)]
        self.values = np.full(256, -1)
        self.values[first : first + classes] = np.arange(classes)
        self.values[[IGNORED, *ignored]] = IGNORED
        super().__init__(len(self.pairs), skip_broken=split == "train")

    def files_of(self, index: int) -> Sequence[Path]:
        return self.pairs[index]

    def example(self, index: int) -> tuple[Tensor, Target]:
        image_file, mask_file = self.pairs[index]
        with Image.open(io.BytesIO(read_bytes(mask_file, LARGEST)), formats=("PNG",)) as stored:
            if stored.mode not in ("L", "P", "1"):
                raise ValueError(f"{mask_file} must have one channel of 8 bits, got Pillow's mode {stored.mode}")
            mask = np.array(stored).astype(np.uint8)
        image = read_image(image_file, (mask.shape[0], mask.shape[1]), mask_file)
        classes = self.values[mask]
        if (classes < 0).any():
            known, wrong = (self.values >= 0).sum(), mask[classes < 0][0]
            raise ValueError(f"the class of a pixel must be one of {known}, and {mask_file} has the value {wrong}")
        return image, {"classes": tv_tensors.Mask(torch.from_numpy(classes.astype(np.uint8))), "image_id": index}


@register_dataset("ade20k")
def ade20k(split: Split, root: Path | None) -> tuple[MaskImages, DenseInfo]:
    """Load ADE20K, the folder ADEChallengeData2016: 150 classes, the value 0 is ignored.

    `root`/objectInfo150.txt names the classes, if it exists.
    """
    names = tuple(map(str, range(1, 151)))
    if root is not None and (listed := root / "objectInfo150.txt").is_file():
        lines = read_utf8(listed, 1 << 20).splitlines()[1:]
        names = tuple(line.split("\t")[-1].split(",")[0].strip() for line in lines if line.strip())
        if len(names) != 150:
            raise ValueError(f"{listed} must list 150 classes after its header, got {len(names)}.")
    return MaskImages(root, split, 150, 1, (0,)), DenseInfo("ade20k", names, truth=("classes",))


@register_dataset("camvid")
def camvid(split: Split, root: Path | None) -> tuple[MaskImages, DenseInfo]:
    """Load CamVid in 11 classes, the values 0 to 10 in the order of SegNet; 11, void, is ignored."""
    return MaskImages(root, split, 11, ignored=(11,)), DenseInfo("camvid", CAMVID, truth=("classes",))


@register_dataset("mask_folder")
def mask_folder(split: Split, root: Path | None) -> tuple[MaskImages, DenseInfo]:
    """Load any folder of this layout; line n of `root`/classes.txt names the value n, from 0; 255 is ignored."""
    names: tuple[str, ...] = ()
    if root is not None and root.is_dir():
        if not (listed := root / "classes.txt").is_file():
            raise FileNotFoundError(
                f"`data_root` must have classes.txt, the names of the classes by line, got {root}, which has none."
            )
        names = read_class_names(listed, 255)  # of masks of 8 bits
    return MaskImages(root, split, len(names)), DenseInfo("mask_folder", names, truth=("classes",))
