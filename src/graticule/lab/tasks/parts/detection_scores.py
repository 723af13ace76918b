"""Average precision of a detector on held-out images."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.lab.tasks.parts.dense import DenseScore, show
from graticule.lab.training.validation import batch_results


@dataclass(frozen=True)
class DetectionScore(DenseScore):
    """Scores of a detector at one size.

    values: COCO's average precisions in percent by name, box_map and so on, and mask_map for masks; None if there are
        no objects of this size.
    class_map: average precision of the boxes of each class, by name; None for a class without objects.
    """

    values: dict[str, float | None]
    class_map: dict[str, float | None]
    images: int
    images_per_second: float

    @property
    def main(self) -> float:
        """Return the average precision of the boxes, in percent."""
        return self.values["box_map"] or 0.0

    @property
    def kinds(self) -> list[list[str]]:
        """Return a row for boxes, and one for masks if they were predicted."""
        kinds = dict.fromkeys(name.partition("_")[0] for name in self.values)
        return [[one, *(show(value) for name, value in self.values.items() if name.startswith(one))] for one in kinds]


#: COCO's summary in its order: name and position.
_SUMMARY = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large")


class CocoScores:
    """The objects of images and the detections in them, in COCO's format.

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
        self.images: list[dict[str, Any]] = []
        self.objects: list[dict[str, Any]] = []
        self.boxes: list[dict[str, Any]] = []
        self.masks: list[dict[str, Any]] = []

    def add(self, target: Mapping[str, Any], found: Mapping[str, Tensor], size: tuple[int, int]) -> None:
        """Add an image: its objects and its detections.

        Args:
            target: its target, in pixels of the original image, with the `size`, (height, width), of that.
            found: `boxes` (n, 4), `labels` (n,) from 1, `scores` (n,), and optionally `masks` (n, 1, height, width) in
                [0, 1], in pixels of the resized image.
            size: (height, width) of the resized image.
        """
        number = int(target["image_id"])
        height, width = map(int, target["size"])
        self.images.append({"id": number, "height": height, "width": width})
        sides = target["boxes"].double()
        sides = torch.cat([sides[:, :2], sides[:, 2:] - sides[:, :2]], 1).tolist()
        for n, box in enumerate(sides):
            entry = {
                "id": len(self.objects) + 1,
                "image_id": number,
                "category_id": self._category(int(target["labels"][n]) + 1),
                "bbox": box,
                "area": float(target["area"][n]),
                "iscrowd": int(target["iscrowd"][n]),
            }
            if "masks" in target:
                entry["segmentation"] = encoded(target["masks"][n])
            self.objects.append(entry)
        boxes, masks = self.results(number, found, size, (height, width))
        self.boxes += boxes
        self.masks += masks

    def results(
        self, number: int, found: Mapping[str, Tensor], size: tuple[int, int], original: tuple[int, int]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the detections in an image as results of boxes and of masks, in pixels of the original image.

        Args:
            number: the id of the image.
            found: as in `add`.
            size: (height, width) of the resized image.
            original: (height, width) of the original.
        """
        scale = torch.tensor([original[1] / size[1], original[0] / size[0]] * 2, dtype=torch.float64)
        corners = found["boxes"].detach().double().cpu() * scale
        sides = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()
        labels, scores = found["labels"].tolist(), found["scores"].detach().double().cpu().tolist()
        common = [
            {"image_id": number, "category_id": self._category(label), "score": score}
            for label, score in zip(labels, scores, strict=True)
        ]
        boxes = [{**entry, "bbox": box} for entry, box in zip(common, sides, strict=True)]
        if "masks" not in found:
            return boxes, []
        masks = [
            {**entry, "segmentation": encoded(mask)}
            for entry, mask in zip(common, restored(found["masks"], original), strict=True)
        ]
        return boxes, masks

    def _category(self, label: int) -> int:
        return self.category_ids[label - 1] if self.category_ids else label

    def gathered(self) -> CocoScores:
        """Return the entries of all processes; with one process, this object."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, (self.images, self.objects, self.boxes, self.masks))
        whole = CocoScores(self.category_ids)
        for images, objects, boxes, masks in parts:
            whole.images += images
            whole.objects += objects
            whole.boxes += boxes
            whole.masks += masks
        order = {image["id"]: place for place, image in enumerate(sorted(whole.images, key=lambda one: one["id"]))}
        for name in ("objects", "boxes", "masks"):
            setattr(whole, name, sorted(getattr(whole, name), key=lambda one: order[one["image_id"]]))
        whole.images.sort(key=lambda one: order[one["id"]])
        for number, entry in enumerate(whole.objects, 1):
            entry["id"] = number
        return whole

    def truth(self) -> dict[str, Any]:
        """Return the objects of all images in the format of COCO's annotations."""
        used = {entry["category_id"] for entry in (*self.objects, *self.boxes)} | set(self.category_ids)
        categories = [{"id": number, "name": str(number)} for number in sorted(used)]
        return {"info": {}, "images": self.images, "annotations": self.objects, "categories": categories}

    def compute(self) -> dict[str, float | None]:
        """Return COCO's average precisions in percent by name, box_map and so on; None if there are no such objects."""
        values: dict[str, float | None] = {}
        for kind, results in (("box", self.boxes), ("mask", self.masks)):
            if kind == "mask" and not any("segmentation" in entry for entry in self.objects):
                continue
            if kind == "mask" and not results and self.boxes:
                continue
            stats, each = average_precision(self.truth(), results, "bbox" if kind == "box" else "segm")
            values |= {
                f"{kind}_{name}": None if stat < 0 else 100 * stat  # pycocotools' -1
                for name, stat in zip(_SUMMARY, stats[:6], strict=True)
            }
            values |= {f"{kind}_map_class_{number}": 100 * value for number, value in each.items()}
        return values


def average_precision(
    truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], kind: str
) -> tuple[list[float], dict[int, float]]:
    """Return COCO's summary, 12 numbers, and the average precision of each category that has objects.

    Args:
        truth: annotations in COCO's format.
        results: detections in COCO's format.
        kind: bbox or segm.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        annotations = COCO()
        # copies, since pycocotools modifies its arguments
        annotations.dataset = {**truth, "annotations": [dict(entry) for entry in truth["annotations"]]}
        annotations.createIndex()
        if results:
            detections = annotations.loadRes([dict(entry) for entry in results])
        else:
            detections = COCO()
            detections.dataset = {**truth, "annotations": []}
            detections.createIndex()
        evaluation = COCOeval(annotations, detections, kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    precision: np.ndarray = evaluation.eval["precision"][:, :, :, 0, -1]  # (thresholds, recalls, categories)
    each = {}
    for index, number in enumerate(evaluation.params.catIds):
        found = precision[:, :, index]
        if (found > -1).any():
            each[int(number)] = float(found[found > -1].mean())
    return [float(stat) for stat in evaluation.stats], each


def encoded(mask: Tensor) -> dict[str, Any]:
    """Return the run lengths of a mask (height, width), of 0 and 1, in a form that JSON can store."""
    from pycocotools import mask as coco_mask

    runs = coco_mask.encode(np.asfortranarray(mask.to(torch.uint8).cpu().numpy()))
    return {"size": [int(side) for side in runs["size"]], "counts": runs["counts"].decode("ascii")}


def restored(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """Return predicted masks (n, 1, height, width), in [0, 1], at the size of the original, (n, *size), of 0 and 1."""
    if not len(masks):
        return torch.zeros(0, *size, dtype=torch.uint8)
    if tuple(masks.shape[-2:]) != size:
        masks = F.interpolate(masks.float(), size=size, mode="bilinear", align_corners=False)
    return (masks[:, 0] > 0.5).to(torch.uint8).cpu()


@torch.inference_mode()
def evaluate_detection(
    model: nn.Module,
    data: Any,
    size: tuple[int, int],
    *,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> DetectionScore:
    """Score `model`, in evaluation mode, on the held-out images, fitted to `size`; targets are of the original images.

    Args:
        model: a detector.
        data: the held-out images.
        size: the shorter and the longer side that images are fitted to.
        device: the device of the model.
        progress: whether to show a bar.
    """
    names = data.class_names
    model.to(device)
    scores = CocoScores()
    seconds = 0.0
    loader, label = data.eval_dataloader(size), f"{size[0]}x{size[1]}"
    for batch, detected, spent in batch_results(lambda batch: model(batch[0]), loader, label, device, progress):
        seconds += spent
        for image, target, found in zip(*batch, detected, strict=True):
            found = {name: value.cpu() for name, value in found.items()}
            scores.add(target, found, (image.shape[-2], image.shape[-1]))
    values = scores.compute()
    each = {int(name.rpartition("_")[2]): value for name, value in values.items() if name.startswith("box_map_class_")}
    return DetectionScore(
        size=size,
        values={name: value for name, value in values.items() if "_class_" not in name},
        class_map={name: each.get(number) for number, name in enumerate(names, 1)},
        images=len(scores.images),
        images_per_second=len(scores.images) / seconds,
    )
