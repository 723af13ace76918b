"""Average precision of a detector on held-out images."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class DetectionScore:
    """Scores of a detector at one size.

    values: COCO's average precisions in percent by name, box_map and so on, and mask_map for masks; None if there are
        no objects of this size.
    class_map: average precision of the boxes of each class, by name; None for a class without objects.
    """

    size: tuple[int, int]
    values: dict[str, float | None]
    class_map: dict[str, float | None]
    images: int


#: COCO's summary in its order: name and position.
_SUMMARY = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large")
Entries = list[dict[str, Any]]


class CocoScores:
    """The objects of images and the detections in them, in COCO's format.

    Unlike torchmetrics, it computes in float64 and takes processes with different numbers of images.

    Args:
        category_ids: the number of each class in the files of the data set; from 1 on by default.

    Attributes:
        images: an entry per image, with its `id`, `height` and `width`.
        objects: an entry per object, as in the list `annotations` of COCO's files.
        boxes: an entry per detection, as in COCO's result files.
        masks: the same with masks instead of boxes; empty for a detector without masks.
    """

    def __init__(self, category_ids: Sequence[int] = ()) -> None:
        self.category_ids = tuple(category_ids)
        self.images: Entries = []
        self.objects: Entries = []
        self.boxes: Entries = []
        self.masks: Entries = []

    def add(self, target: Mapping[str, Any], detected: Mapping[str, Tensor], size: tuple[int, int]) -> None:
        """Add an image: its objects and its detections.

        Args:
            target: its target, in pixels of the original image, with the `size`, (height, width), of that.
            detected: `boxes` (n, 4), `labels` (n,) from 1, `scores` (n,), and optionally `masks` (n, 1, height, width)
                in [0, 1], in pixels of the resized image.
            size: (height, width) of the resized image.
        """
        number = int(target["image_id"])
        height, width = map(int, target["size"])
        self.images.append({"id": number, "height": height, "width": width})
        for n, box in enumerate(_sides(target["boxes"].double())):
            entry = {
                "image_id": number,
                "category_id": self._category(int(target["labels"][n]) + 1),
                "bbox": box,
                "area": float(target["area"][n]),
                "iscrowd": int(target["iscrowd"][n]),
            }
            if "masks" in target:
                entry["segmentation"] = encode_mask(target["masks"][n])
            self.objects.append(entry)
        boxes, masks = self.results(number, detected, size, (height, width))
        self.boxes += boxes
        self.masks += masks

    def results(
        self, number: int, detected: Mapping[str, Tensor], size: tuple[int, int], original: tuple[int, int]
    ) -> tuple[Entries, Entries]:
        """Return the detections in image `number` as results of boxes and of masks, in pixels of the original image.

        Args:
            number: the id of the image.
            detected: as in `add`.
            size: (height, width) of the resized image.
            original: (height, width) of the original.
        """
        scale = torch.tensor([original[1] / size[1], original[0] / size[0]] * 2, dtype=torch.float64)
        boxes = _sides(detected["boxes"].detach().double().cpu() * scale)
        labels, scores = detected["labels"].tolist(), detected["scores"].detach().double().cpu().tolist()
        common = [
            {"image_id": number, "category_id": self._category(label), "score": score}
            for label, score in zip(labels, scores, strict=True)
        ]
        masks: Any = restore_masks(detected["masks"], original) if "masks" in detected else []
        return (
            [{**entry, "bbox": box} for entry, box in zip(common, boxes, strict=True)],
            [{**entry, "segmentation": encode_mask(mask)} for entry, mask in zip(common, masks, strict=False)],
        )

    def _category(self, label: int) -> int:
        return self.category_ids[label - 1] if self.category_ids else label

    def gathered(self) -> CocoScores:
        """Return the entries of all processes, in the order of the images; with one process, this object."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, vars(self))
        scores = CocoScores(self.category_ids)
        for name, key in (("images", "id"), ("objects", "image_id"), ("boxes", "image_id"), ("masks", "image_id")):
            entries = [entry for part in parts for entry in part[name]]
            setattr(scores, name, sorted(entries, key=itemgetter(key)))
        return scores

    def truth(self) -> dict[str, Any]:
        """Return the objects of all images in the format of COCO's annotations."""
        used = {entry["category_id"] for entry in (*self.objects, *self.boxes)} | set(self.category_ids)
        categories = [{"id": number, "name": str(number)} for number in sorted(used)]
        objects = [{"id": number, **entry} for number, entry in enumerate(self.objects, 1)]
        return {"info": {}, "images": self.images, "annotations": objects, "categories": categories}

    def compute(self) -> dict[str, float | None]:
        """Return COCO's average precisions in percent by name, box_map and so on; None if there are no such objects.

        Those of the boxes of each class with objects are box_map_class_NUMBER.
        """
        values: dict[str, float | None] = {}
        with_masks = any("segmentation" in entry for entry in self.objects) and (self.masks or not self.boxes)
        for kind, name, results in (("bbox", "box", self.boxes), ("segm", "mask", self.masks)):
            if kind == "segm" and not with_masks:
                continue
            evaluation = _coco_evaluation(self.truth(), results, kind)
            for key, stat in zip(_SUMMARY, evaluation.stats, strict=False):  # of twelve numbers
                values[f"{name}_{key}"] = None if stat < 0 else 100 * float(stat)  # pycocotools' -1
            precision: np.ndarray = evaluation.eval["precision"][:, :, :, 0, -1]  # (thresholds, recalls, categories)
            for index, number in enumerate(evaluation.params.catIds):
                if (class_precision := precision[:, :, index][precision[:, :, index] > -1]).size:
                    values[f"{name}_map_class_{number}"] = 100 * float(class_precision.mean())
        return values


def _sides(corners: Tensor) -> list[list[float]]:
    """Return left, top, width and height of boxes (n, 4), left, top, right, bottom."""
    return torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()


def _coco_evaluation(truth: Mapping[str, Any], results: Entries, kind: str) -> Any:
    """Evaluate results in COCO's format, of the `kind` bbox or segm, with pycocotools."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        annotations, detections = COCO(), COCO()
        # copies, since pycocotools modifies its arguments
        annotations.dataset = {**truth, "annotations": [dict(entry) for entry in truth["annotations"]]}
        annotations.createIndex()
        if results:
            detections = annotations.loadRes([dict(entry) for entry in results])
        else:
            detections.dataset = {**truth, "annotations": []}
            detections.createIndex()
        evaluation = COCOeval(annotations, detections, kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


def encode_mask(mask: Tensor) -> dict[str, Any]:
    """Return the run lengths of a mask (height, width), of 0 and 1, in a form that JSON can store."""
    from pycocotools import mask as coco_mask

    runs = coco_mask.encode(np.asfortranarray(mask.to(torch.uint8).cpu().numpy()))
    return {"size": [int(side) for side in runs["size"]], "counts": runs["counts"].decode("ascii")}


def restore_masks(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """Return predicted masks (n, 1, height, width), in [0, 1], at the size of the original, (n, *size), of 0 and 1."""
    if not len(masks):
        return torch.zeros(0, *size, dtype=torch.uint8)
    if tuple(masks.shape[-2:]) != size:
        masks = F.interpolate(masks.float(), size=size, mode="bilinear", align_corners=False)
    return (masks[:, 0] > 0.5).to(torch.uint8).cpu()
