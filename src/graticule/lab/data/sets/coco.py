"""Objects in the format of COCO: boxes, and masks as polygons or run lengths, including crowds."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torchvision import tv_tensors
from typing_extensions import TypedDict

from graticule.lab.data.dense import DenseImages, DenseInfo, Target, boxes_target, read_image
from graticule.lab.data.images import Split
from graticule.lab.data.registry import register_dataset
from graticule.registry.checks import printable
from graticule.registry.fields import Count, Finite, check_value
from graticule.system.files import read_json

log = logging.getLogger(__name__)

#: The names of a split, in `annotations/instances_NAME.json` and of the folder of its images.
_NAMES: dict[Split, tuple[str, ...]] = {"train": ("train2017", "train"), "test": ("val2017", "val")}
#: Largest annotation file in bytes; the file of COCO's training images has 450 MB.
_LARGEST = 2 << 30

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
    segmentation: NotRequired[Any]  # polygons or run lengths, checked when they are decoded


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
        images = {entry["id"]: entry for entry in values["images"]}
        counts = len(values["images"]), len(values["categories"])
        if not 0 < counts[0] == len(images) or not 0 < counts[1] == len({*names.values()}):
            raise ValueError(
                f"{file} must have images of different ids and categories of different names, got {counts[0]} images "
                f"with {len(images)} ids and {counts[1]} categories with {len({*names.values()})} names."
            )
        self.category_ids = tuple(sorted(names))
        self.class_names = tuple(names[number] for number in self.category_ids)
        self.ids = sorted(images)
        self.files = [folder / images[number]["file_name"] for number in self.ids]
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

    def files_of(self, index: int) -> tuple[Path]:
        return (self.files[index],)

    def example(self, index: int) -> tuple[Tensor, Target]:
        assert self.sizes is not None
        size = (int(self.sizes[index][0]), int(self.sizes[index][1]))
        objects = self._objects[self.ids[index]]
        boxes, labels = (np.array([entry[key] for entry in objects]) for key in ("box", "label"))
        target = boxes_target(boxes, labels, size, self.ids[index])
        target["iscrowd"] = torch.tensor([entry["iscrowd"] for entry in objects], dtype=torch.bool)
        target["area"] = torch.tensor([entry["area"] for entry in objects], dtype=torch.float64)
        if "masks" in (self.truth if self.wanted is None else self.wanted):
            masks = [decoded_mask(entry["segmentation"], size, f"annotation {entry['id']}") for entry in objects]
            target["masks"] = tv_tensors.Mask(torch.from_numpy(np.array(masks, np.uint8).reshape(-1, *size)))
        return read_image(self.files[index], size), target


def decoded_mask(segmentation: Any, size: tuple[int, int], named: str) -> np.ndarray:
    """Return the mask (height, width), of 0 and 1, from polygons or from run lengths, compressed or not."""
    from pycocotools import mask as coco_mask

    try:
        if isinstance(segmentation, list):
            polygons = [np.array(polygon, dtype=np.float64).reshape(-1, 2) for polygon in segmentation]
            if not all(len(polygon) > 2 and (abs(polygon) < 100 * max(size)).all() for polygon in polygons):
                raise ValueError("a polygon must have at least 3 points, at most 100 sides of the image away")
            flat: Any = [polygon.ravel().tolist() for polygon in polygons]
            runs = coco_mask.merge(coco_mask.frPyObjects(flat, *size))
        elif tuple(segmentation["size"]) != size:
            raise ValueError(f"it has the size {segmentation['size']}, and its image {list(size)}")
        else:
            compressed = isinstance(segmentation["counts"], str)
            runs = segmentation if compressed else coco_mask.frPyObjects(segmentation, *size)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)  # of pycocotools 2.0.11
            mask: np.ndarray = coco_mask.decode(runs)
    except Exception as error:  # pycocotools raises almost anything
        raise ValueError(f"the mask of {named} is damaged: {error}") from None
    return mask


@register_dataset("coco")
def coco(split: Split, root: Path | None) -> tuple[CocoImages, DenseInfo]:
    """Load `root`/annotations/instances_train2017.json and `root`/train2017, or val2017; the year can be left out."""
    names = _NAMES[split]
    existing = (name for name in names if root and (root / "annotations" / f"instances_{name}.json").is_file())
    name = next(existing, None)
    if root is None or name is None or not (root / name).is_dir():
        raise FileNotFoundError(
            f"`data_root` must be a folder with annotations/instances_{names[0]}.json and the images in {names[0]}, "
            f"got {str(root)!r}, which does not."
        )
    images = CocoImages(root / name, root / "annotations" / f"instances_{name}.json", training=split == "train")
    return images, DenseInfo("coco", images.class_names, truth=images.truth, category_ids=images.category_ids)
