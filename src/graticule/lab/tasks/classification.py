"""Image classification: recipe, data, model, loss and score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import Mixup
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image
from typing_extensions import TypedDict

from graticule.backbones.base import Backbone
from graticule.hub.config import Preparation, prepare
from graticule.lab.data.images import DatasetInfo, check_class_names, same_classes
from graticule.lab.data.module import DataModule, build_mixup
from graticule.lab.data.transforms import evaluation_transform
from graticule.lab.tasks.distillation import Teacher, build_teacher
from graticule.lab.tasks.options import Recipe
from graticule.lab.tasks.parts.image_scores import ImageEvaluation, image_scores
from graticule.lab.tasks.parts.models import build_backbone, describe_source
from graticule.lab.training.results import Prediction
from graticule.lab.training.task import SourceModel, Task, TrainedRun, register_task
from graticule.registry.checks import parse_sizes
from graticule.registry.fields import Count, Finite, Side


class _Classes(TypedDict):
    """The description of the data in recipe.json."""

    num_classes: Count
    channels: Count
    class_names: tuple[str, ...]
    size: tuple[Side, Side] | None
    mean: tuple[Finite, ...]
    std: tuple[Finite, ...]
    backbone: NotRequired[SourceModel]


@register_task("classification")
class Classification(Task[Recipe, "DataModule"]):
    """A backbone with a classifier, trained by cross-entropy, with the mixing, smoothing and teacher of the recipe.

    mixup: timm's Mixup, or None; it returns soft labels, including smoothing.
    teacher: the teacher of distillation, or None; it is neither trained nor saved.
    """

    recipe_class = Recipe
    evaluation = ImageEvaluation
    description = _Classes
    unit = "img"

    mixup: Mixup | None = None
    teacher: Teacher | None = None

    def build_data(self, run: TrainedRun | None = None) -> DataModule:
        """Build the data; for a run, they must have its classes, in the same order."""
        recipe = self.recipe
        data = DataModule(
            **recipe.data_arguments(),
            size=recipe.img_size,
            augmentation=recipe.augmentation,
            val_split=recipe.val_split,
            train_share=recipe.train_share,
            drop_last=recipe.mixing.mixup > 0 or recipe.mixing.cutmix > 0,
            repeats=recipe.aug_repeats,
            train_sizes=parse_sizes(recipe.train_sizes, "train_sizes"),
        )
        augmentation, small = recipe.augmentation, data.info.size is not None
        recipe.check_effect("augmentation.crop_pct", not small, f"larger images than {recipe.dataset} has")
        by_area = augmentation.scale is not None or not (small or augmentation.random_crop_padding)
        for name in ("augmentation.ratio", "augmentation.random_interpolation"):
            recipe.check_effect(name, augmentation.random and by_area, "random crops by area, of augmentation.scale")
        if run is not None:
            check_class_names(data.info.class_names, class_names(run), str(run.folder))
        return data

    def describe(self, data: DataModule) -> dict[str, Any]:
        """Return the classes, their names in the order of the model's outputs, and the facts of the images."""
        info = data.info
        return {
            "num_classes": info.num_classes,
            **{name: getattr(info, name) for name in ("channels", "class_names", "size", "mean", "std")},
            **describe_source(self.recipe),
        }

    def build_model(self, described: Mapping[str, Any]) -> Backbone:
        """Build the backbone for `num_classes` and `channels` (default: 1); its configuration describes the images."""
        recipe, classes, channels = self.recipe, described["num_classes"], described.get("channels", 1)
        arguments = recipe.img_size, recipe.patch_size, recipe.global_pool, described.get("backbone")
        model: Backbone = build_backbone(recipe, classes, channels, *arguments)
        if "mean" in described:
            mean, std, names = (list(described[key]) for key in ("mean", "std", "class_names"))
            # images of one native size are resized without a crop
            large = described.get("size") is None
            crop = recipe.augmentation.crop_pct if large else 1.0
            mode: Literal["center", "squash"] = "center" if large else "squash"
            prepare(model, Preparation(mean, std, recipe.augmentation.interpolation, crop, mode, names))
        return model

    def notes(self, data: DataModule) -> list[str]:
        """Say which part of images of another aspect ratio a center crop leaves out, or that they are squashed."""
        size = self.recipe.img_size
        if data.info.size is not None:
            height, width = data.info.size
            changed = height * size[1] != width * size[0]
            how = f"images of {height} x {width} pixels are resized to {size[0]} x {size[1]}, another aspect ratio"
            return [f"{how}; `img_size` {height} {width} would keep it"] if changed else []
        height, width = np.array(data.stored_sizes("train")).T
        ratio = size[0] / size[1] * height / width  # the crop's aspect ratio divided by the image's
        lost = round(100 * (1 - self.recipe.augmentation.crop_pct**2 * np.minimum(ratio, 1 / ratio)).mean())
        same = (height == height[0]).all() and (width == width[0]).all()
        native = f"; all have {height[0]} x {width[0]} pixels" if same else ""
        crop = f"evaluation crops the center to {size[0]} x {size[1]}, which leaves out {lost} % of an image"
        return [f"{crop} (mean of {len(height)}{native})"] if lost >= 1 else []

    def same_outputs(self, source: TrainedRun | None, names: Sequence[str], data: DataModule) -> bool:
        """Return whether the data have these classes, as far as the classes have names."""
        return not names or same_classes(names, data.info.class_names)

    def setup(self, model: nn.Module, data: DataModule, device: torch.device) -> None:
        """Build the mixing and the teacher; check that the model accepts all sizes of the training images."""
        recipe = self.recipe
        data.to(device)
        for size in data.train_sizes:
            cast("Any", model).grid_at(size)
        mixing = {name: getattr(recipe.mixing, name) for name in ("mixup", "cutmix", "prob", "switch_prob")}
        self.mixup = build_mixup(**mixing, label_smoothing=recipe.label_smoothing, num_classes=data.info.num_classes)
        self.teacher = build_teacher(recipe.distillation, data.info, recipe.img_size)
        if self.teacher is not None:
            self.teacher.to(device)
            if hasattr(model, "set_distilled_training"):
                cast("Any", model).set_distilled_training(True)

    def mix(self, batch: Any, epoch: int) -> Any:
        """Mix images (B, C, height, width) and their labels (B,), which become (B, num_classes)."""
        if self.mixup is None:
            return batch
        off = self.recipe.mixing.off_epoch
        self.mixup.mixup_enabled = not off or epoch < off
        return self.mixup(*batch)

    def loss(self, model: nn.Module, batch: Any, epoch: int) -> Tensor:
        """Return the loss of images (B, C, height, width) and labels (B,)."""
        return self.mixed_loss(model, self.mix(batch, epoch))

    def mixed_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch after `mix`."""
        images, labels = batch
        smoothing = 0.0 if labels.is_floating_point() else self.recipe.label_smoothing  # mixed labels are smoothed
        outputs = model(images)
        # a distillation token has its own head for the teacher; other models learn from both in one classifier
        logits, distilled = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        if self.teacher is not None:
            loss = self.teacher.combine(loss, distilled, self.teacher(images))
        return loss

    def validate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return loss and top-1 (100 if the highest logit is right, else 0) of each image."""
        images, labels = batch
        return image_scores(model(images), labels)

    def predict(self, model: nn.Module, image: Tensor, number: int, described: Mapping[str, Any]) -> Prediction:
        """Return the five most likely classes of an image."""
        recipe = self.recipe
        info = cast("DatasetInfo", self.images(described))
        pillow = to_pil_image(image).convert("L" if info.channels == 1 else "RGB")
        if info.size is not None:  # all images of the data set have this size
            pillow = pillow.resize((info.size[1], info.size[0]), Image.Resampling.BICUBIC)
        small = evaluation_transform(info, recipe.img_size, recipe.augmentation)(pillow)
        shares = model(small[None].to(next(model.parameters()).device))[0].softmax(-1).cpu()
        names = described["class_names"]
        likeliest = shares.topk(min(5, len(shares))).indices.tolist()
        top = [{"class": names[n], "probability": float(shares[n])} for n in likeliest]
        labels = [f"{entry['class']} {100 * entry['probability']:.1f} %" for entry in top]
        return Prediction(image, labels=labels, entries={"classes.json": [{"image_id": number, "top": top}]})


def class_names(run: TrainedRun) -> tuple[str, ...]:
    """Return the names of the classes of a run, in the order of the model's outputs."""
    names = run.described().get("class_names")
    if names is None:
        raise ValueError(f"`run` must be of an image classifier, got {str(run.folder)!r}, which has no class names.")
    return tuple(names)
