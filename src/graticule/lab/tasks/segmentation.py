"""Semantic segmentation: recipe, model, loss and score."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.dense.factory import create_segmenter
from graticule.dense.segmentation import segment_in_windows
from graticule.lab.data.dense import IGNORED
from graticule.lab.tasks.options import SegmentationOptions, SegmentationRecipe
from graticule.lab.tasks.parts.dense import DenseEvaluation, DenseTask, Sides
from graticule.lab.training.results import Evaluated, Prediction, show
from graticule.lab.training.task import register_task
from graticule.lab.training.validation import held_out_sums


@dataclass(frozen=True)
class PixelScore:
    """Scores of a segmentation model at one size.

    window, stride: of the windows that images were split into, in pixels; None for whole images.
    miou, accuracy: percent; mean over the classes, and over the pixels.
    class_iou: by the name of the class; None for one that is neither present nor predicted.
    """

    size: Sides
    window: int | None
    stride: int | None
    miou: float
    accuracy: float
    class_iou: dict[str, float | None]
    images: int


class SegmentationEvaluation(SegmentationOptions, DenseEvaluation[PixelScore]):
    """Intersection over union and accuracy of pixels at several sizes, on the original images."""

    star = "the size and the windows of the recipe"

    def check(self, task: Any, model: Any, data: Any) -> None:
        super().check(task, model, data)
        self.recipe_of(task)

    def score(self, task: Any, model: Any, data: Any, size: Sides, device: str) -> PixelScore:
        task = Segmentation(self.recipe_of(task))
        sums = held_out_sums(task, model, data, size, device=device)
        counts, (window, stride) = counts_of(sums.values), task.recipe.windows
        right, truth, _ = map(sum, counts)
        return PixelScore(
            size=size,
            window=window,
            stride=stride,
            miou=mean_iou(counts),
            accuracy=100 * right / max(truth, 1),
            class_iou=dict(zip(data.class_names, class_ious(counts), strict=True)),
            images=sums.count,
        )

    def rows(self, run: Evaluated[PixelScore]) -> Iterator[dict[str, str]]:
        """Yield a row for each size, and one per class if `per_class`."""
        for score in run.scores:
            size, windows = f"{score.size[0]}x{score.size[1]}", (score.window, score.stride)
            if score.window is not None:
                size += f" in {score.window}/{score.stride}"
            same = score.size == tuple(run.recipe.fit) and windows == run.recipe.windows
            scores = {"mIoU (%)": f"{score.miou:.2f}", "pixels (%)": f"{score.accuracy:.2f}"}
            yield {"size": size + " *" * same, **scores, "images": f"{score.images:,}"}
            if self.per_class:
                for name, iou in score.class_iou.items():
                    yield {"run": f"  {name}", "size": size, "mIoU (%)": show(iou)}

    def notes(self, evaluated: Sequence[Evaluated[PixelScore]]) -> list[str]:
        """Explain the scores and the windows."""
        notes = ["scores are on the original images"]
        if any(score.window is not None for run in evaluated for score in run.scores):
            notes.append("in SIDE/STRIDE: in windows of this side and distance, in pixels")
        return notes

    def recipe_of(self, task: Any) -> Any:
        """Return the recipe of a task with the windows of the options."""
        recipe, window, stride = task.recipe, self.window, self.stride
        if window is None:
            window, stride = recipe.window, recipe.stride if stride is None else stride
        return dataclasses.replace(recipe, window=window, stride=stride)


@register_task("segmentation")
class Segmentation(DenseTask[SegmentationRecipe]):
    """A model that classifies every pixel, trained by cross-entropy and scored by the mean intersection over union.

    The loss of an image is the sum over its pixels that are not ignored, divided by the number of all its pixels, as in
    mmsegmentation; or the same over the hardest pixels only (Bridging Category-level and Instance-level Semantic Image
    Segmentation, Wu et al., 2016).
    """

    recipe_class = SegmentationRecipe
    evaluation = SegmentationEvaluation

    @property
    def truth(self) -> tuple[str, ...]:
        return ("classes",)

    def create(self, backbone: str | Backbone, num_classes: int, **arguments: Any) -> Any:
        parts: dict[str, Any] = {name: getattr(self.recipe, name) for name in ("decoder", "neck", "auxiliary")}
        return create_segmenter(backbone, num_classes, **parts, **arguments)

    def loss(self, model: nn.Module, batch: Any, epoch: int) -> Tensor:
        """Return the mean loss of images and the classes of their pixels."""
        images, targets = batch
        by_size: dict[Any, list[int]] = {}
        for number, image in enumerate(images):
            by_size.setdefault(tuple(image.shape), []).append(number)
        losses = []
        for numbers in by_size.values():
            classes = torch.stack([targets[n]["classes"] for n in numbers])
            inputs = torch.stack([images[n] for n in numbers])
            outputs = [model(inputs)] if self.recipe.auxiliary is None else cast("Any", model).all_logits(inputs)
            total = self._image_losses(outputs[0], classes)
            for logits in outputs[1:]:
                total = total + _AUXILIARY * self._image_losses(logits, classes)
            losses.append(total)
        return torch.cat(losses).mean()

    def _image_losses(self, logits: Tensor, classes: Tensor) -> Tensor:
        """Return the loss of each image, (B,)."""
        pixels = pixel_losses(logits, classes).flatten(1)
        count = max(1, round(self.recipe.hardest * pixels.shape[1]))
        return (pixels if count == pixels.shape[1] else pixels.topk(count, sorted=False).values).mean(1)

    def validate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the loss of each image, and its numbers of pixels per class: present, predicted, and both."""
        rows = []
        for image, target in zip(*batch, strict=True):
            logits, truth = logits_of(model, image, target["size"], self.recipe), target["classes"]
            counts = per_class(confusion(logits.argmax(0), truth, len(logits)))  # (3, classes)
            rows.append([*counts.flatten(), pixel_losses(logits[None], truth[None]).mean()])
        names = [*(f"{name}_{n}" for name in _COUNTS for n in range(cast("Any", model).num_classes)), "loss"]
        return dict(zip(names, map(torch.stack, zip(*rows, strict=True)), strict=True))

    def predict(self, model: nn.Module, image: Tensor, number: int, described: Mapping[str, Any]) -> Prediction:
        """Return the class of every pixel of an image, and the share of each class."""
        small = self.prepared(image, described).to(next(model.parameters()).device)
        classes = logits_of(model, small, image.shape[1:], self.recipe).argmax(0).cpu()
        names = tuple(described["class_names"])
        shares = (classes.flatten().bincount(minlength=len(names)).double() / classes.numel()).tolist()
        present = {name: share for name, share in zip(names, shares, strict=True) if share}
        entries = {"classes.json": [{"image_id": number, "shares": present}]}
        return Prediction(image, classes=classes, class_names=names, entries=entries)

    def score(self, sums: Mapping[str, float], count: int) -> float:
        """Return the mean over the classes of intersection over union, in percent."""
        return mean_iou(counts_of(sums))


#: Weight of the loss of the auxiliary decoder, as in mmsegmentation.
_AUXILIARY = 0.4
#: Pixels that are rightly predicted as a class, that are of the class, and that are predicted as it.
_COUNTS = ("right", "truth", "predicted")


def counts_of(sums: Mapping[str, Any]) -> list[list[float]]:
    """Return `_COUNTS` of each class, (3, classes), from the sums of the values of `Segmentation.validate`."""
    classes = sum(name.startswith("right_") for name in sums)
    return [[float(sums[f"{name}_{n}"]) for n in range(classes)] for name in _COUNTS]


def pixel_losses(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the cross-entropy of logits (B, classes, height, width) at every pixel, 0 where it is `IGNORED`."""
    return F.cross_entropy(logits, classes.long(), ignore_index=IGNORED, reduction="none")


def logits_of(model: Any, image: Tensor, size: Sequence[int], windows: Any) -> Tensor:
    """Return the logits (classes, *size) of a normalized image (3, height, width), resized to the original.

    They are computed as a whole, or in windows of the `window` and `stride` of a recipe.
    """
    if windows.window is None:
        logits = model(image[None])
    else:
        logits = segment_in_windows(model, image[None], windows.window, windows.stride)
    height, width = size
    if tuple(logits.shape[-2:]) != (height, width):
        logits = F.interpolate(logits, size=(height, width), mode="bilinear", align_corners=False)
    return logits[0]


def per_class(matrix: Tensor) -> Tensor:
    """Return the pixels that are right, of the class, and predicted as it, (3, classes), from the `confusion`."""
    return torch.stack([matrix.diagonal(), matrix.sum(1), matrix.sum(0)])


def confusion(predicted: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Return the numbers of pixels of each class (row) predicted as each (column), (classes, classes).

    Pixels that are `IGNORED` in the truth, (height, width) as the prediction, do not count.
    """
    counts = truth != IGNORED
    pairs = truth[counts].long() * classes + predicted[counts].long()
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def class_ious(counts: Any) -> list[float | None]:
    """Return the intersection over union of each class in percent; None if neither present nor predicted."""
    both, truth, predicted = (list(map(float, row)) for row in counts)
    return [
        100 * right / union if (union := truth_count + predicted_count - right) else None
        for right, truth_count, predicted_count in zip(both, truth, predicted, strict=True)
    ]


def mean_iou(counts: Any) -> float:
    """Return the mean of `class_ious`, over the classes that are present or predicted."""
    ious = [iou for iou in class_ious(counts) if iou is not None]
    return sum(ious) / len(ious) if ious else 0.0
