"""Pascal VOC: boxes in XML files, and a class per pixel in PNGs with a palette."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import torch
from torch import Tensor

from graticule.lab.data.dense import (
    DenseImages,
    DenseInfo,
    Target,
    boxes_target,
    clip_boxes,
    inside,
    read_image,
)
from graticule.lab.data.images import Split
from graticule.lab.data.registry import register_dataset
from graticule.lab.data.sets.mask_folder import MaskImages, load_masks
from graticule.system.files import read_bytes, read_utf8

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
_LISTS: dict[Split, str] = {"train": "train.txt", "test": "val.txt"}


class VocImages(DenseImages):
    """Images with boxes; objects marked as difficult count as crowds: neither learned nor counted as missed.

    Boxes are clipped to their image, and objects whose box has no area in it are left out.

    Args:
        root: the folder of one year, such as VOC2012.
        names: the names of the images.
        training: whether the images are trained on; then difficult objects are left out.
    """

    def __init__(self, root: Path, names: list[str], training: bool) -> None:
        super().__init__(len(names), skip_broken=training)
        self.root = root
        self.names = names
        self.training = training

    def place(self, index: int) -> Path:
        """Return the path of an image."""
        return self.root / "JPEGImages" / f"{self.names[index]}.jpg"

    def example(self, index: int) -> tuple[Tensor, Target]:
        """Return an image and its boxes."""
        file = self.root / "Annotations" / f"{self.names[index]}.xml"
        size, boxes, labels, difficult = read_objects(file)
        image = read_image(self.place(index), size, file)
        boxes = clip_boxes(boxes, size)
        kept = (boxes[:, 2:] > boxes[:, :2]).all(-1)
        if self.training:
            kept &= ~difficult
        target = boxes_target(boxes[kept], labels[kept], size, index)
        target["iscrowd"] = torch.from_numpy(difficult[kept])
        return image, target


def read_objects(file: Path) -> tuple[tuple[int, int], np.ndarray, np.ndarray, np.ndarray]:
    """Return (height, width), boxes (n, 4), labels (n,) from 0, and flags of difficult objects (n,) of a file.

    The file counts pixels from 1 and includes the last one; the boxes count from 0 and exclude it.
    """
    content = read_bytes(file, 1 << 22)
    if b"<!DOCTYPE" in content.replace(b"\0", b"").upper():  # a document type could define entities
        raise ValueError(f"{file} must have no document type, whose entities could expand without limit")
    try:
        root = ElementTree.fromstring(content)
        size = int(root.findtext("size/height", "")), int(root.findtext("size/width", ""))
        boxes, labels, difficult = [], [], []
        for one in root.iterfind("object"):
            name = one.findtext("name", "").strip()
            if name not in CLASSES:
                raise ValueError(f"its classes must be Pascal VOC's, got {name[:40]!r}")
            sides = [float(one.findtext(f"bndbox/{side}", "")) for side in ("xmin", "ymin", "xmax", "ymax")]
            boxes.append([sides[0] - 1, sides[1] - 1, sides[2], sides[3]])
            labels.append(CLASSES.index(name))
            difficult.append(one.findtext("difficult", "0").strip() == "1")
    except (ElementTree.ParseError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    found = np.array(boxes, dtype=np.float64).reshape(-1, 4)
    if not np.isfinite(found).all():
        raise ValueError(f"{file} is damaged: a box is not finite")
    return size, found, np.array(labels, dtype=np.int64), np.array(difficult, dtype=bool)


@register_dataset("voc_detection")
def voc_detection(split: Split, root: Path | None) -> tuple[VocImages, DenseInfo]:
    """Load the boxes of the images in `root`/ImageSets/Main/train.txt or val.txt, such as of VOCdevkit/VOC2012."""
    base, names = _listed(root, "Main", split, ("JPEGImages/{}.jpg", "Annotations/{}.xml"))
    info = DenseInfo("voc_detection", CLASSES, category_ids=tuple(range(1, 21)))
    return VocImages(base, names, split == "train"), info


@register_dataset("voc_segmentation")
def voc_segmentation(split: Split, root: Path | None) -> tuple[MaskImages, DenseInfo]:
    """Load the masks of the images in `root`/ImageSets/Segmentation/train.txt or val.txt: background and 20 classes."""
    base, names = _listed(root, "Segmentation", split, ("JPEGImages/{}.jpg", "SegmentationClass/{}.png"))
    pairs = [(base / "JPEGImages" / f"{name}.jpg", base / "SegmentationClass" / f"{name}.png") for name in names]
    images, info = load_masks("voc_segmentation", ("background", *CLASSES), pairs, split)
    return images, replace(info, category_ids=tuple(range(1, 22)))


def _listed(root: Path | None, kind: str, split: Split, files: tuple[str, ...]) -> tuple[Path, list[str]]:
    """Return `root`, and the names in the list of a split."""
    listed = None if root is None else root / "ImageSets" / kind / _LISTS[split]
    if root is None or listed is None or not listed.is_file():
        raise FileNotFoundError(
            f"`data_root` must be a folder with ImageSets/{kind}/{_LISTS[split]}, such as VOCdevkit/VOC2012, got "
            f"{str(root)!r}, which does not."
        )
    lines = read_utf8(listed, 1 << 24).splitlines()
    names = [line.split()[0] for line in lines if line.strip()]
    paths = [inside(root, file.format(name)) for name in names for file in files]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"{listed} must list different names of images, got {len(names)} of which {len(set(names))} differ."
        )
    if missing := [path for path in paths if not path.is_file()]:
        raise FileNotFoundError(
            f"`data_root` must have the files that {listed} lists; {len(missing)} do not exist, such as {missing[0]}."
        )
    return root, names
