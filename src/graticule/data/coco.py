"""Objects in the format of COCO: boxes, and masks as polygons or run lengths, including crowds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torchvision import tv_tensors

from graticule.checks import printable
from graticule.data.dense import DenseImages, DenseInfo, Target, boxes_target, inside, read_image
from graticule.data.images import MOST_CLASSES, Split
from graticule.files import read_json

log = logging.getLogger(__name__)

#: The names of a split, in `annotations/instances_NAME.json` and of the folder of its images.
_NAMES: dict[Split, tuple[str, ...]] = {"train": ("train2017", "train"), "test": ("val2017", "val")}
#: Largest annotation file in bytes; that of COCO's training images has 450 MB.
_LARGEST = 2 << 30


class CocoImages(DenseImages):
    """The images of one annotation file.

    In training, crowds and objects whose box has no area are left out and counted in `left_out`; in evaluation all of
    them are part of the target.

    Args:
        folder: of the images.
        file: of the annotations.
        training: whether the images are trained on.
    """

    def __init__(self, folder: Path, file: Path, training: bool) -> None:
        values = read_json(file, _LARGEST)
        for key in ("images", "annotations", "categories"):
            if not isinstance(values, dict) or not isinstance(values.get(key), list):
                raise ValueError(f"{file} must have the list `{key}`, as COCO's annotations of instances have.")
        self.folder, self.file = folder, file
        names = {_whole(one, "id", file, "categories"): str(one.get("name")) for one in values["categories"]}
        if not 1 <= len(names) <= MOST_CLASSES or len(names) < len(values["categories"]):
            raise ValueError(f"{file} must have 1 to {MOST_CLASSES:,} categories with different ids, got {len(names)}.")
        self.category_ids = tuple(sorted(names))
        self.class_names = tuple(names[number] for number in self.category_ids)
        images = {_whole(one, "id", file, "images"): one for one in values["images"]}
        if not images or len(images) < len(values["images"]):
            raise ValueError(f"{file} must have images with different ids, got {len(values['images'])}.")
        self.ids = sorted(images)
        self.files = [inside(folder, images[number].get("file_name")) for number in self.ids]
        sides = [[_whole(images[n], side, file, "images") for side in ("height", "width")] for n in self.ids]
        self.sizes = np.array(sides)
        if missing := [path for path in self.files if not path.is_file()]:
            raise FileNotFoundError(
                f"`data_root` must have the images that {file} names; {len(missing)} of {len(self.files)} do not "
                f"exist, such as {missing[0]}."
            )
        self._objects: dict[int, list[dict[str, Any]]] = {number: [] for number in self.ids}
        label = {number: index for index, number in enumerate(self.category_ids)}
        self.left_out = 0
        for one in values["annotations"]:
            number, kept = self._object(one, label)
            if training and (kept["iscrowd"] or not _has_area(kept["bbox"])):
                self.left_out += 1
            else:
                self._objects[number].append(kept)
        if self.left_out:
            log.info("%s: %d crowds and boxes without area are not trained on", file, self.left_out)
        super().__init__(len(self.ids), skip_broken=training)

    def _object(self, one: object, label: dict[int, int]) -> tuple[int, dict[str, Any]]:
        """Return the id of the image of an annotation, and the fields of the annotation that are used.

        Raises:
            ValueError: if its image or its category is not in the file, or its box is invalid.
        """
        named = f"annotation {printable(str(one.get('id')))} of {self.file}" if isinstance(one, dict) else self.file
        if not isinstance(one, dict):
            raise ValueError(f"{self.file} must have objects as annotations, got {str(one)[:80]}.")
        number, category = one.get("image_id"), one.get("category_id")
        if number not in self._objects:
            raise ValueError(f"`image_id` must be of an image of the file, got {number!r} in {named}.")
        if category not in label:
            raise ValueError(f"`category_id` must be of a category of the file, got {category!r} in {named}.")
        box = one.get("bbox")
        if not isinstance(box, list) or len(box) != 4 or not all(_number(side) for side in box):
            raise ValueError(f"`bbox` must be left, top, width and height in pixels, got {str(box)[:80]} in {named}.")
        area = one.get("area", box[2] * box[3])
        return number, {
            "id": one.get("id"),
            "bbox": box,
            "label": label[category],
            "iscrowd": bool(one.get("iscrowd", 0)),
            "area": float(area) if _number(area) else 0.0,
            "segmentation": one.get("segmentation"),
        }

    def place(self, index: int) -> Path:
        """Return the path of an image."""
        return self.files[index]

    def example(self, index: int) -> tuple[Tensor, Target]:
        """Return an image and its objects.

        Raises:
            ValueError, OSError: if the image cannot be read, or it or a mask has another size than in the file.
        """
        assert self.sizes is not None
        size = (int(self.sizes[index][0]), int(self.sizes[index][1]))
        image = read_image(self.files[index], size)
        objects = self._objects[self.ids[index]]
        boxes = np.array([one["bbox"] for one in objects], dtype=np.float64).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        target = boxes_target(boxes, np.array([one["label"] for one in objects]), size, self.ids[index])
        target["iscrowd"] = torch.tensor([one["iscrowd"] for one in objects], dtype=torch.bool)
        target["area"] = torch.tensor([one["area"] for one in objects], dtype=torch.float64)
        if all(one["segmentation"] is not None for one in objects):
            masks = np.zeros((len(objects), *size), np.uint8)
            for n, one in enumerate(objects):
                masks[n] = decoded_mask(one["segmentation"], size, f"annotation {one['id']}")
            target["masks"] = tv_tensors.Mask(torch.from_numpy(masks))
        return image, target


def decoded_mask(segmentation: object, size: tuple[int, int], named: str) -> np.ndarray:
    """Return the mask (height, width), of 0 and 1, from polygons or from run lengths, compressed or not.

    Raises:
        ValueError: if it is none of these, or of another size.
    """
    height, width = size
    if isinstance(segmentation, list):
        good = (isinstance(p, list) and len(p) >= 6 and not len(p) % 2 and all(map(_number, p)) for p in segmentation)
        if not segmentation or not all(good):
            raise ValueError(f"the polygons of {named} must be lists of at least 3 points, x and y")
        from pycocotools import mask as coco_mask

        counts = coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))["counts"].decode("ascii")
    elif isinstance(segmentation, dict) and "counts" in segmentation:
        if segmentation.get("size") != [height, width]:
            raise ValueError(
                f"the mask of {named} has the size {segmentation.get('size')}, its image {height}, {width}"
            )
        counts = segmentation["counts"]
    else:
        raise ValueError(f"the mask of {named} must be polygons or run lengths, got {type(segmentation).__name__}")
    runs = _run_lengths(counts, named) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or not all(isinstance(run, int) and 0 <= run <= height * width for run in runs):
        raise ValueError(f"the run lengths of {named} must be whole numbers, or text")
    if sum(runs) != height * width:
        raise ValueError(f"the run lengths of {named} must add up to its {height} x {width} pixels")
    values = (np.arange(len(runs)) % 2).astype(np.uint8)  # alternating zeros and ones, zeros first
    return np.repeat(values, runs).reshape(width, height).T  # in column-major order


def _run_lengths(counts: str, named: str) -> list[int]:
    """Read COCO's compressed run lengths: five bits per character; from the fourth run on, differences.

    The decoder of pycocotools does not check them, and would write beyond the end of a mask.

    Raises:
        ValueError: if they are damaged.
    """
    runs: list[int] = []
    value = shift = 0
    for character in counts:
        code = ord(character) - 48
        if not 0 <= code < 64 or shift > 35:
            raise ValueError(f"the run lengths of {named} are damaged")
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:
            if code & 16:
                value |= -1 << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    if shift or any(run < 0 for run in runs):
        raise ValueError(f"the run lengths of {named} are damaged")
    return runs


def coco(split: Split, root: Path | None) -> tuple[CocoImages, DenseInfo]:
    """Load `root`/annotations/instances_train2017.json and `root`/train2017, or those of val2017.

    Names without the year are found, too.

    Raises:
        ValueError, FileNotFoundError: for files that are missing or damaged.
    """
    return _loaded(split, root, training=split == "train")


def coco_train(split: Split, root: Path | None) -> tuple[CocoImages, DenseInfo]:
    """Load the training images for both splits, to test whether a model can memorize them.

    Raises:
        ValueError, FileNotFoundError: for files that are missing or damaged.
    """
    return _loaded("train", root, training=split == "train")


def _loaded(files: Split, root: Path | None, training: bool) -> tuple[CocoImages, DenseInfo]:
    names = _NAMES[files]
    found = (name for name in names if root and (root / "annotations" / f"instances_{name}.json").is_file())
    name = next(found, None)
    if root is None or name is None or not (root / name).is_dir():
        raise FileNotFoundError(
            f"`data_root` must be a folder with annotations/instances_{names[0]}.json and the images in {names[0]}, "
            f"got {str(root)!r}, which does not."
        )
    folder = root / name
    images = CocoImages(folder, root / "annotations" / f"instances_{name}.json", training)
    return images, DenseInfo(
        "coco",
        images.class_names,
        3,
        None,
        IMAGENET_DEFAULT_MEAN,
        IMAGENET_DEFAULT_STD,
        truth=("boxes", "masks"),
        category_ids=images.category_ids,
    )


def _whole(one: object, key: str, file: Path, where: str) -> int:
    value = one.get(key) if isinstance(one, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{file} must have a whole number as `{key}` of every entry of `{where}`, got {value!r}.")
    return value


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


def _has_area(box: list[float]) -> bool:
    return box[2] > 0 and box[3] > 0
