"""Objects in the format of COCO: boxes, and masks as polygons or run lengths, including crowds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torchvision import tv_tensors
from typing_extensions import TypedDict

from graticule.lab.data.dense import DenseImages, DenseInfo, Target, boxes_target, inside, read_image
from graticule.lab.data.images import MOST_CLASSES, Split
from graticule.lab.data.registry import register_dataset
from graticule.registry.checks import printable
from graticule.registry.fields import Count, Finite, Whole, check_value
from graticule.system.files import read_json

log = logging.getLogger(__name__)

#: The names of a split, in `annotations/instances_NAME.json` and of the folder of its images.
_NAMES: dict[Split, tuple[str, ...]] = {"train": ("train2017", "train"), "test": ("val2017", "val")}
#: Largest annotation file in bytes; that of COCO's training images has 450 MB.
_LARGEST = 2 << 30
#: Longest edges of the polygons of an object, for which pycocotools takes 80 bytes per pixel, and largest distance.
_LONGEST = 2_000_000


Pixels = Annotated[float, Field(strict=True, gt=-1e9, lt=1e9)]
Number = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class _Image(TypedDict):
    id: Number
    file_name: str
    height: Count
    width: Count


class _Category(TypedDict):
    id: Number
    name: str


class _Annotation(TypedDict):
    image_id: Number
    category_id: Number
    bbox: tuple[Pixels, Pixels, Pixels, Pixels]  # left, top, width, height
    id: NotRequired[Any]
    area: NotRequired[Finite]
    iscrowd: NotRequired[Literal[0, 1]]
    segmentation: NotRequired[Any]  # a list of polygons or `_Runs`, checked when it is decoded


class _Runs(TypedDict):
    size: tuple[Whole, Whole]
    counts: str | list[Whole]


class _File(TypedDict):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


class CocoImages(DenseImages):
    """The images of one annotation file.

    Boxes are clipped to their image. Objects whose box has no area in it are left out and counted in `left_out`, and so
    are crowds in training; in evaluation these are part of the target.

    Args:
        folder: of the images.
        file: of the annotations.
        training: whether the images are trained on.
    """

    def __init__(self, folder: Path, file: Path, training: bool) -> None:
        values: _File = check_value(_File, read_json(file, _LARGEST), f"{file} must be annotations of COCO's format")
        self.file = file
        names = {entry["id"]: entry["name"] for entry in values["categories"]}
        if not 1 <= len(names) <= MOST_CLASSES or len(names) < len(values["categories"]):
            raise ValueError(f"{file} must have 1 to {MOST_CLASSES:,} categories with different ids, got {len(names)}.")
        if len(set(names.values())) < len(names):
            raise ValueError(f"{file} must have categories of different names, got {len(names)} of fewer names.")
        self.category_ids = tuple(sorted(names))
        self.class_names = tuple(names[number] for number in self.category_ids)
        images = {entry["id"]: entry for entry in values["images"]}
        if not images or len(images) < len(values["images"]):
            raise ValueError(f"{file} must have images with different ids, got {len(values['images'])}.")
        self.ids = sorted(images)
        self.files = [inside(folder, images[number]["file_name"]) for number in self.ids]
        self.sizes = np.array([[images[number]["height"], images[number]["width"]] for number in self.ids])
        if missing := [path for path in self.files if not path.is_file()]:
            raise FileNotFoundError(
                f"`data_root` must have the images that {file} names; {len(missing)} of {len(self.files)} do not "
                f"exist, such as {missing[0]}."
            )
        self._objects: dict[int, list[dict[str, Any]]] = {number: [] for number in self.ids}
        self._take(values["annotations"], images, training)
        entries = [entry for objects in self._objects.values() for entry in objects]
        self.truth = ("boxes", "masks") if all(entry["segmentation"] for entry in entries) else ("boxes",)
        super().__init__(len(self.ids), skip_broken=training)

    def _take(self, annotations: list[_Annotation], images: dict[int, _Image], training: bool) -> None:
        """Keep the fields that are used of the objects, and say how many are left out or clipped."""
        label = {number: index for index, number in enumerate(self.category_ids)}
        for annotation in annotations:
            checks: Any = (("image_id", "images", images), ("category_id", "categories", label))
            for key, table, known in checks:
                if (number := dict(annotation)[key]) not in known:
                    named = f"annotation {printable(str(annotation.get('id')))} of {self.file}"
                    raise ValueError(f"`{key}` must be an `id` of `{table}`, got {number} in {named}.")
        stated = np.array([annotation["bbox"] for annotation in annotations], dtype=np.float64).reshape(-1, 4)
        stated[:, 2:] += stated[:, :2]
        of = [images[annotation["image_id"]] for annotation in annotations]
        boxes = stated.clip(0, np.array([(image["width"], image["height"]) * 2 for image in of]).reshape(-1, 4))
        areas = (boxes[:, 2:] - boxes[:, :2]).clip(0).prod(-1)
        crowds = np.array([annotation.get("iscrowd", False) for annotation in annotations], dtype=bool)
        left_out = (training & crowds) | (areas <= 0)
        self.left_out = int(left_out.sum())
        empty, clipped = int((areas <= 0).sum()), int(((abs(boxes - stated) >= 1).any(-1) & ~left_out).sum())
        if left_out.all():
            raise ValueError(
                f"`data_root` must have objects{', other than crowds,' * training} with an area in their image, got "
                f"none in {self.file}: of {len(annotations)} objects, {empty} have no area; a box must be left, top, "
                "width and height in pixels."
            )
        if empty or clipped:
            log.warning(
                "%s: of %d objects, %d are left out, as they have no area in their image, and %d are clipped to it",
                *(self.file, len(annotations), empty, clipped),
            )
        for row in np.flatnonzero(~left_out).tolist():
            annotation = annotations[row]
            values = {"box": boxes[row], "label": label[annotation["category_id"]], "iscrowd": bool(crowds[row])}
            values |= {key: annotation.get(key) for key in ("id", "segmentation")}
            values["area"] = annotation.get("area", float(areas[row]))
            self._objects[annotation["image_id"]].append(values)

    def place(self, index: int) -> Path:
        """Return the path of an image."""
        return self.files[index]

    def files_of(self, index: int) -> tuple[Path]:
        """Return the path of an image."""
        return (self.files[index],)

    def example(self, index: int) -> tuple[Tensor, Target]:
        """Return an image and its objects."""
        assert self.sizes is not None
        size = (int(self.sizes[index][0]), int(self.sizes[index][1]))
        image = read_image(self.files[index], size)
        objects = self._objects[self.ids[index]]
        boxes = np.array([entry["box"] for entry in objects]).reshape(-1, 4)
        target = boxes_target(boxes, np.array([entry["label"] for entry in objects]), size, self.ids[index])
        target["iscrowd"] = torch.tensor([entry["iscrowd"] for entry in objects], dtype=torch.bool)
        target["area"] = torch.tensor([entry["area"] for entry in objects], dtype=torch.float64)
        if "masks" in (self.truth if self.wanted is None else self.wanted):
            masks = np.zeros((len(objects), *size), np.uint8)
            for n, entry in enumerate(objects):
                masks[n] = decoded_mask(entry["segmentation"], size, f"annotation {entry['id']}")
            target["masks"] = tv_tensors.Mask(torch.from_numpy(masks))
        return image, target


def decoded_mask(segmentation: object, size: tuple[int, int], named: str) -> np.ndarray:
    """Return the mask (height, width), of 0 and 1, from polygons or from run lengths, compressed or not."""
    height, width = size
    if isinstance(segmentation, list):
        polygons: list[list[float]] = check_value(list[list[Pixels]], segmentation, f"the polygons of {named}")
        if not polygons or not all(len(polygon) >= 6 and not len(polygon) % 2 for polygon in polygons):
            raise ValueError(f"the polygons of {named} must be lists of at least 3 points, x and y")
        points = [np.array(polygon).reshape(-1, 2) for polygon in polygons]
        edges = sum(abs(np.diff(corners, axis=0, append=corners[:1])).max(1).sum() for corners in points)
        if max(edges, *(abs(corners).max() for corners in points)) > _LONGEST:  # pycocotools does not check it
            raise ValueError(
                f"the polygons of {named} must lie within {_LONGEST:,} pixels and have edges of as many at most"
            )
        from pycocotools import mask as coco_mask

        counts = coco_mask.merge(coco_mask.frPyObjects(polygons, height, width))["counts"].decode("ascii")
        runs = _run_lengths(counts, named)
    elif isinstance(segmentation, dict):
        encoded: _Runs = check_value(_Runs, segmentation, f"the run lengths of {named} are damaged")
        if encoded["size"] != size:
            raise ValueError(f"the mask of {named} has the size {encoded['size']}, and its image {size}")
        counts = encoded["counts"]
        runs = _run_lengths(counts, named) if isinstance(counts, str) else counts
    else:
        raise ValueError(f"the mask of {named} must be polygons or run lengths, got {type(segmentation).__name__}")
    if sum(runs) != height * width:
        raise ValueError(f"the run lengths of {named} must add up to its {height} x {width} pixels")
    values = (np.arange(len(runs)) % 2).astype(np.uint8)  # alternating zeros and ones, zeros first
    return np.repeat(values, runs).reshape(width, height).T  # in column-major order


def _run_lengths(counts: str, named: str) -> list[int]:
    """Read COCO's compressed run lengths: five bits per character; from the fourth run on, differences.

    The decoder of pycocotools does not check them, and would write beyond the end of a mask.
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


@register_dataset("coco")
def coco(split: Split, root: Path | None) -> tuple[CocoImages, DenseInfo]:
    """Load `root`/annotations/instances_train2017.json and `root`/train2017, or those of val2017.

    Names without the year are found, too.
    """
    return _loaded(split, root, training=split == "train")


@register_dataset("coco_train")
def coco_train(split: Split, root: Path | None) -> tuple[CocoImages, DenseInfo]:
    """Load the training images for both splits, to test whether a model can memorize them."""
    return _loaded("train", root, training=split == "train")


def _loaded(files: Split, root: Path | None, training: bool) -> tuple[CocoImages, DenseInfo]:
    names = _NAMES[files]
    existing = (name for name in names if root and (root / "annotations" / f"instances_{name}.json").is_file())
    name = next(existing, None)
    if root is None or name is None or not (root / name).is_dir():
        raise FileNotFoundError(
            f"`data_root` must be a folder with annotations/instances_{names[0]}.json and the images in {names[0]}, "
            f"got {str(root)!r}, which does not."
        )
    images = CocoImages(root / name, root / "annotations" / f"instances_{name}.json", training)
    return images, DenseInfo("coco", images.class_names, truth=images.truth, category_ids=images.category_ids)
