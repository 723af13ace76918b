"""Object detection, with or without masks: recipe, model, loss and score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.dense.detector import HEADS
from graticule.dense.factory import create_detector
from graticule.lab.data.dense import Target
from graticule.lab.tasks.options import DetectionRecipe
from graticule.lab.tasks.parts.dense import DenseEvaluation, DenseTask, Sides
from graticule.lab.tasks.parts.detection_scores import CocoScores, DetectionScore, restore_masks
from graticule.lab.training.results import Evaluated, Prediction, show
from graticule.lab.training.task import register_task
from graticule.lab.training.validation import held_out


class DetectionEvaluation(DenseEvaluation["DetectionScore"]):
    """COCO's average precision of boxes and masks at several sizes, on the original images."""

    def score(self, task: Any, model: Any, data: Any, size: Sides, device: str) -> DetectionScore:
        images = held_out(task, model, data, size, device=device).examples
        values = task.scores.gathered().compute()
        return DetectionScore(
            size=size,
            values={name: value for name, value in values.items() if "_class_" not in name},
            class_map={name: values.get(f"box_map_class_{number}") for number, name in enumerate(data.class_names, 1)},
            images=images,
        )

    def rows(self, run: Evaluated[DetectionScore]) -> Iterator[dict[str, str]]:
        """Yield a row of boxes for each size, one of masks if predicted, and one per class if `per_class`."""
        for score in run.scores:
            size = f"{score.size[0]}x{score.size[1]}" + (" *" if score.size == tuple(run.recipe.fit) else "")
            for kind in dict.fromkeys(name.partition("_")[0] for name in score.values):
                values = [show(value) for name, value in score.values.items() if name.startswith(kind)]
                scores = dict(zip(("mAP", "at 0.50", "at 0.75", "S", "M", "L"), values, strict=True))
                yield {"size": size, "of": kind, **scores, "images": f"{score.images:,}"}
            if self.per_class:
                for name, value in score.class_map.items():
                    yield {"run": f"  {name}", "size": size, "of": "box", "mAP": show(value)}

    def notes(self, evaluated: Sequence[Evaluated[DetectionScore]]) -> list[str]:
        """Explain the scores."""
        return ["mAP in percent over IoU 0.50 to 0.95, as COCO's; S, M, L: areas"]


@register_task("detection")
class Detection(DenseTask[DetectionRecipe]):
    """A detector, trained by its own losses and scored by COCO's average precision of its boxes."""

    recipe_class = DetectionRecipe
    evaluation = DetectionEvaluation
    normalize = False

    scores: CocoScores

    @property
    def truth(self) -> tuple[str, ...]:
        """Return boxes, and masks if the head predicts them."""
        return ("boxes", "masks") if HEADS[HEADS.specs(self.recipe.head)[0].name].masks else ("boxes",)

    def create(self, backbone: str | Backbone, num_classes: int, **arguments: Any) -> Any:
        recipe = self.recipe
        return create_detector(backbone, num_classes, head=recipe.head, neck=recipe.neck, **arguments)

    def loss(self, model: nn.Module, batch: Any, epoch: int) -> Tensor:
        """Return the sum of the detector's losses of images and their objects."""
        images, targets = batch
        losses = model(images, [self._objects(target, images[0].dtype, epoch) for target in targets])
        return torch.stack(list(losses.values())).sum()

    def _objects(self, target: Target, dtype: Any, epoch: int) -> dict[str, Any]:
        """Return the objects of an image as input of detectors: classes from 1, and a seed of two-stage detectors."""
        masks = {"masks": target["masks"]} if "masks" in target else {}
        seed = image_seed(self.recipe.seed, epoch, int(target["image_id"]))
        return {"boxes": target["boxes"].to(dtype), "labels": target["labels"] + 1, **masks, "seed": seed}

    def start_validation(self) -> None:
        self.scores = CocoScores()

    def validate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Store the detections of each image for the score; returns ones, one per image."""
        images, targets = batch
        for image, target, boxes in zip(images, targets, model(images), strict=True):
            self.scores.add(target, boxes, tuple(image.shape[-2:]))
        return {"images": torch.ones(len(images), device=images[0].device)}

    def predict(self, model: nn.Module, image: Tensor, number: int, described: Mapping[str, Any]) -> Prediction:
        """Return the detections in an image; they are written as COCO results of boxes, and of masks."""
        size = (int(image.shape[1]), int(image.shape[2]))
        small = self.prepared(image, described).to(next(model.parameters()).device)
        (detected,) = model([small])
        names, scores = described["class_names"], CocoScores(described["category_ids"])
        boxes, masks = scores.results(number, detected, (small.shape[1], small.shape[2]), size)
        sides = torch.tensor([entry["bbox"] for entry in boxes], dtype=torch.float64).reshape(-1, 4)
        numbers = [int(label) - 1 for label in detected["labels"]]
        return Prediction(
            image,
            boxes=torch.cat([sides[:, :2], sides[:, :2] + sides[:, 2:]], 1),
            labels=[f"{names[n]} {entry['score']:.2f}" for n, entry in zip(numbers, boxes, strict=True)],
            numbers=numbers,
            masks=restore_masks(detected["masks"], size).bool() if "masks" in detected else None,
            entries={"boxes.json": boxes, **({"masks.json": masks} if "masks" in detected else {})},
        )

    def score(self, sums: Mapping[str, float], count: int) -> float:
        """Return the average precision of the boxes over all images of all processes, in percent."""
        return self.scores.gathered().compute()["box_map"] or 0.0


def image_seed(seed: int, epoch: int, image: int) -> int:
    """Return the seed of the draws for an image in an epoch, whatever process and batch it is in."""
    return int(np.random.SeedSequence([seed, epoch, image]).generate_state(1)[0])
