"""The interface of detectors: torchvision's, for any feature maps of the library."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from graticule.backbones.base import Backbone
from graticule.dense.features import Features, dense_config, dense_groups, not_decayed
from graticule.dense.torchvision_parts import Batch
from graticule.hub.kinds import HubModel
from graticule.registry.registry import Option, Registry, options_of

Target = Mapping[str, Tensor]


class Detector(HubModel, ABC):
    """Finds objects: boxes, classes and scores, and masks if it can.

    It is called like torchvision's detectors. In training it takes a list of images (C, height, width) in [0, 1], of
    any sizes, and a list of targets with `boxes` (n, 4), (x1, y1, x2, y2) in pixels, `labels` (n,) from 1 to
    `num_classes`, and for masks `masks` (n, height, width); it returns a dictionary of losses. In evaluation it takes
    only images and returns a list of dictionaries of `boxes`, `labels`, `scores`, and `masks` (n, 1, height, width) in
    [0, 1]. Images are normalized by the mean and standard deviation of the backbone's configuration and padded with
    zeros to a common size; they are never resized.

    A subclass takes `features` and `num_classes` and builds `model`, a detector of torchvision. Its further arguments
    are options.

    Args:
        features: images to feature maps with the same number of channels.
        num_classes: number of classes of objects.
        model: the detector of torchvision.
    """

    no_program: ClassVar[str] = (
        "the number of detections depends on the image, and no program of fixed operators selects them; export "
        "its backbone with its pyramid, `model.features` (on the command line --maps)"
    )
    #: Default options of the last neck.
    neck_options: ClassVar[Mapping[str, Any]] = {}
    #: torchvision's index of the first class: 1 if 0 is the background.
    first_class: ClassVar[int] = 0
    #: True if it takes and returns masks.
    masks: ClassVar[bool] = False

    def __init__(self, features: Features, num_classes: int, model: Any) -> None:
        super().__init__()
        self.num_classes = num_classes
        model.transform = Batch(features)
        self.model: Any = model

    @property
    def features(self) -> Features:
        """Images to feature maps."""
        features: Features = self.model.backbone
        return features

    @property
    def backbone(self) -> Backbone:
        """The backbone."""
        return self.features.backbone

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[Target] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Return losses in training, detections otherwise.

        Raises:
            ValueError: for targets that are missing or wrong.
        """
        if not self.training:
            found: list[dict[str, Tensor]] = self.model(list(images))
            return [{**one, "labels": one["labels"] + (1 - self.first_class)} for one in found]
        if targets is None or len(targets) != len(images):
            given = "none" if targets is None else len(targets)
            raise ValueError(
                f"`targets` must have one entry per image in training, got {given} for {len(images)} images."
            )
        for index, (image, target) in enumerate(zip(images, targets, strict=True)):
            self._check(index, image, target)
        shifted = [{**target, "labels": target["labels"] + (self.first_class - 1)} for target in targets]
        losses: dict[str, Tensor] = self.model(list(images), shifted)
        return losses

    def _check(self, index: int, image: Tensor, target: Target) -> None:
        """Check a target for errors that torchvision would find later, or not at all."""
        missing = [key for key in ("boxes", "labels") if key not in target]
        if missing:
            raise ValueError(f"`targets` must have `boxes` and `labels`, got no `{missing[0]}` for image {index}.")
        boxes, labels = target["boxes"], target["labels"]
        if boxes.ndim != 2 or boxes.shape[-1] != 4 or len(labels) != len(boxes):
            raise ValueError(
                f"`targets` must have `boxes` (n, 4) and `labels` (n,), got {tuple(boxes.shape)} and "
                f"{tuple(labels.shape)} for image {index}."
            )
        if self.masks and ("masks" not in target or len(target["masks"]) != len(boxes)):
            got = len(target["masks"]) if "masks" in target else "none"
            raise ValueError(
                f"`targets` must have one mask for each of the {len(boxes)} boxes of image {index}, got {got}."
            )
        if self.masks and target["masks"].shape[1:] != image.shape[-2:]:
            raise ValueError(
                f"`masks` must be (n, {image.shape[-2]}, {image.shape[-1]}), of the size of image {index}, got "
                f"{tuple(target['masks'].shape)}."
            )
        if not len(boxes):
            return
        if labels.is_floating_point():
            raise ValueError(f"`labels` must be whole numbers, got {labels.dtype} for image {index}.")
        if labels.min() < 1 or labels.max() > self.num_classes:
            raise ValueError(
                f"`labels` must be from 1 to {self.num_classes}, got {int(labels.min())} to {int(labels.max())} for "
                f"image {index}."
            )
        good = boxes.isfinite().all(1) & (boxes[:, 2:] > boxes[:, :2]).all(1)
        if not good.all():
            raise ValueError(
                f"`boxes` must be finite, with a positive width and height, got {boxes[~good][0].tolist()} for image "
                f"{index}."
            )

    def hub_config(self, preprocessing: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config.json of the model (see `HubModel`), which normalizes its images itself."""
        batch = self.model.transform
        normalized = {"mean": list(batch.image_mean), "std": list(batch.image_std)}
        return dense_config(self, "detector", {**preprocessing, **normalized})

    def no_weight_decay(self) -> set[str]:
        """Return the names of the backbone's parameters without weight decay (see `Backbone.no_weight_decay`)."""
        return not_decayed(self, self.backbone)

    def group_matcher(self, coarse: bool = False) -> dict[str, object]:
        """Return patterns that group the parameters by layer of the backbone; all others are in the last group."""
        return dense_groups(self, self.backbone, coarse)


def _options(kind: Any) -> dict[str, Option]:
    return options_of(kind.__init__, frozenset({"self", "features", "num_classes"}))


#: Detectors by name: the values of the argument `head`.
HEADS: Registry[type[Detector]] = Registry("head", Detector, _options, "graticule.dense")
register_head = HEADS.register
