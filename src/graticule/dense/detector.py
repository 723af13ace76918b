"""Detectors: the interface, which is torchvision's with other batches and anchors, and one-stage detectors."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS
from torchvision.models.detection import RetinaNet as TorchvisionRetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from graticule.backbones.base import Backbone
from graticule.backbones.token_model import check_image
from graticule.dense.features import DenseModel, Features
from graticule.registry.fields import Classes, LayerIndex, Positive, SmallCount
from graticule.registry.registry import Registry, options_of

Target = Mapping[str, Tensor]


class Detector(DenseModel, ABC):
    """Finds objects: boxes, classes and scores, and masks if it can.

    It is called like torchvision's detectors. In training it takes a list of images (C, height, width) in [0, 1], of
    any sizes, and a list of targets with `boxes` (n, 4), (x1, y1, x2, y2) in pixels, `labels` (n,) from 1 to
    `num_classes`, and for masks `masks` (n, height, width); it returns a dictionary of losses. In evaluation it takes
    only images and returns a list of dictionaries of `boxes`, `labels`, `scores`, and `masks` (n, 1, height, width) in
    [0, 1]. Images are normalized by the mean and standard deviation of the backbone's configuration and padded with
    zeros to a common size; they are never resized.

    A subclass takes `features` and `num_classes` and builds `model`, a detector of torchvision. Its further arguments
    are options. All have these: detections below `score` are left out, of two boxes of a class that overlap more than
    `nms` (IoU) the one with the lower score is left out, and `most` detections per image are kept.

    Args:
        features: images to feature maps with the same number of channels.
        num_classes: number of classes of objects.
        model: the detector of torchvision.
    """

    kind = "detector"
    no_program: ClassVar[str] = (
        "the number of detections depends on the image, and no program of fixed operators selects them; export "
        "its backbone with its pyramid, `model.features` (on the command line --maps), or with the head of a one-stage "
        "detector, too, `model.predictions`"
    )
    #: Default options of the last neck.
    neck_options: ClassVar[Mapping[str, Any]] = {}
    #: torchvision's index of the first class: 1 if 0 is the background.
    first_class: ClassVar[int] = 0
    #: True if it takes and returns masks.
    masks: ClassVar[bool] = False

    def __init__(self, features: Features, num_classes: Classes, model: Any) -> None:
        super().__init__()
        self.num_classes = num_classes
        model.transform = Batch(features)
        self.model: Any = model

    @property
    def features(self) -> Features:
        """Images to feature maps."""
        return self.model.backbone

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[Target] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Return losses in training, detections otherwise.

        Raises:
            ValueError: for targets that are missing or wrong.
        """
        every: Sequence[Any] = images if isinstance(images, (list, tuple)) else [images]
        for image in every:
            check_image(image, "images")
            if not image.is_floating_point():
                raise ValueError(f"`images` must be of real numbers, in [0, 1], got {image.dtype}.")
        if not len(images):
            raise ValueError("`images` must be at least one image (C, height, width), got none.")
        if not self.training:
            detections: list[dict[str, Tensor]] = self.model(list(images))
            return [{**detection, "labels": detection["labels"] + (1 - self.first_class)} for detection in detections]
        if targets is None or len(targets) != len(images):
            count = "none" if targets is None else len(targets)
            raise ValueError(
                f"`targets` must have one entry per image in training, got {count} for {len(images)} images."
            )
        for index, (image, target) in enumerate(zip(images, targets, strict=True)):
            self._check(index, image, target)
        shifted = [{**target, "labels": target["labels"] + (self.first_class - 1)} for target in targets]
        return self.model(list(images), shifted)

    def _check(self, index: int, image: Tensor, target: Target) -> None:
        """Check a target for errors that torchvision would find later, or not at all."""
        missing = [key for key in ("boxes", "labels") if key not in target]
        if missing:
            raise ValueError(f"`targets` must have `boxes` and `labels`, got no `{missing[0]}` for image {index}.")
        boxes, labels, masks = target["boxes"], target["labels"], target.get("masks")
        size, count = image.shape[-2:], "none" if masks is None else len(masks)
        shapes = tuple(boxes.shape), tuple(labels.shape)
        if boxes.ndim != 2 or boxes.shape[-1] != 4 or len(labels) != len(boxes):
            rule = f"`targets` must have `boxes` (n, 4) and `labels` (n,), got {shapes[0]} and {shapes[1]}"
        elif self.masks and count != len(boxes):
            rule = f"`targets` must have one mask for each of the {len(boxes)} boxes, got {count}"
        elif self.masks and masks is not None and masks.shape[1:] != size:
            rule = f"`masks` must be (n, {size[0]}, {size[1]}), of the size of the image, got {tuple(masks.shape)}"
        elif labels.is_floating_point() and len(boxes):
            rule = f"`labels` must be whole numbers, got {labels.dtype}"
        elif len(boxes) and (labels.min() < 1 or labels.max() > self.num_classes):
            rule = f"`labels` must be from 1 to {self.num_classes}, got {int(labels.min())} to {int(labels.max())}"
        elif not (good := boxes.isfinite().all(1) & (boxes[:, 2:] > boxes[:, :2]).all(1)).all():
            rule = f"`boxes` must be finite, with a positive width and height, got {boxes[~good][0].tolist()}"
        else:
            return
        raise ValueError(f"{rule}, for image {index}.")

    def hub_config(self, preprocessing: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config.json of the model (see `HubModel`), which normalizes its images itself."""
        batch = self.model.transform
        normalized = {"mean": list(batch.image_mean), "std": list(batch.image_std)}
        return super().hub_config({**preprocessing, **normalized})


#: The arguments of a class that are not options.
_CONTEXT = frozenset({"features", "num_classes", "build", "parts", "head", "anchors"})
#: Detectors by name: the values of the argument `head`.
HEADS: Registry[type[Detector]] = Registry("head", Detector, lambda kind: options_of(kind, _CONTEXT), "graticule.dense")
register_head = HEADS.register


class Batch(GeneralizedRCNNTransform):
    """Normalizes images and pads them to one batch, without resizing them."""

    def __init__(self, features: Features) -> None:
        configuration = getattr(features.backbone, "pretrained_cfg", None) or {}
        mean, std = (list(configuration.get(name, ())) for name in ("mean", "std"))
        if not len(mean) == len(std) == features.backbone.in_chans:
            mean = std = [0.5] * features.backbone.in_chans
        super().__init__(1, 1, mean, std, size_divisible=features.divisor)

    def resize(self, image: Tensor, target: Any = None) -> tuple[Tensor, Any]:
        """Return both unchanged."""
        return image, target


class Anchors(AnchorGenerator):
    """Anchors of exact sizes, centered at multiples of the stride of their level, as in mmdetection.

    torchvision rounds their sides to whole pixels, and computes the stride as the quotient of the sides of image and
    map, which differs from the true stride at coarse levels.

    Args:
        strides: pixels per cell of each level.
        scales: sides of the anchors of ratio 1, in strides.
        ratios: height / width.
    """

    def __init__(self, strides: Sequence[int], scales: Sequence[float], ratios: Sequence[float]) -> None:
        sizes = tuple(tuple(scale * stride for scale in scales) for stride in strides)
        super().__init__(sizes, (tuple(ratios),) * len(sizes))
        self.strides = tuple(strides)

    def generate_anchors(
        self, scales: Any, aspect_ratios: Any, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return the anchors of a cell at the origin, (ratios * scales, 4)."""
        sides = torch.tensor(scales, dtype=dtype, device="cpu")
        roots = torch.tensor(aspect_ratios, dtype=dtype, device="cpu").sqrt()
        widths, heights = (sides / roots[:, None]).flatten(), (sides * roots[:, None]).flatten()
        return torch.stack([-widths, -heights, widths, heights], 1) / 2

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """Return the anchors of each image, all levels together, (n, 4)."""
        like = feature_maps[0]
        anchors = []
        for feature_map, stride, cell in zip(feature_maps, self.strides, self.cell_anchors, strict=True):
            y, x = (
                torch.arange(side, dtype=like.dtype, device=like.device) * stride for side in feature_map.shape[-2:]
            )
            y, x = torch.meshgrid(y, x, indexing="ij")
            centers = torch.stack([x, y, x, y], -1).reshape(-1, 1, 4)
            anchors.append((centers + cell.to(like)).reshape(-1, 4))
        return [torch.cat(anchors) for _ in image_list.image_sizes]


#: The convolutions of each branch of torchvision's heads.
_CONVS = 4


class OneStageDetector(Detector, ABC):
    """A detector that classifies each cell of the maps, or its anchors, and regresses a box.

    Args:
        features: images to feature maps.
        num_classes: number of classes of objects.
        convs: convolutions before the classifier, and before the regression, with any norm and activation after each.
        score: see `Detector`.
        nms: see `Detector`.
        most: see `Detector`.
        build: the detector of torchvision.
        head: its head, whose convolutions are removed.
        anchors: the anchors of each level.
    """

    neck_options: ClassVar = {"first": 1, "extra": "convolutions"}

    def __init__(
        self,
        features: Features,
        num_classes: Classes,
        convs: LayerIndex = 4,
        score: float = 0.05,
        nms: float = 0.5,
        most: int = 100,
        *,
        build: Callable[..., Any],
        head: Any,
        anchors: Anchors,
    ) -> None:
        if not 0 <= convs <= _CONVS:
            raise ValueError(f"`convs` must be from 0 to {_CONVS}, got {convs}.")
        for part in (head.classification_head, head.regression_head):
            part.conv = part.conv[: convs * len(part.conv) // _CONVS]
        thresholds = {"score_thresh": score, "nms_thresh": nms, "detections_per_img": most}
        super().__init__(
            features, num_classes, build(features, num_classes, anchor_generator=anchors, head=head, **thresholds)
        )

    @property
    def predictions(self) -> Predictions:
        """The detector without its selection of boxes, as a module for `export`."""
        return Predictions(self.model).train(self.training)


class Predictions(nn.Module):
    """Returns the boxes and scores of all cells or anchors of a one-stage detector, before the best are selected.

    It normalizes the images. A detector then clips boxes to the image, leaves out low scores, and suppresses boxes that
    overlap with better ones of their class (NMS).

    Args:
        model: the detector of torchvision.
    """

    output_names = ("boxes", "scores")

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.strides, self.divisor = model.backbone.strides, model.backbone.divisor

    @property
    def backbone(self) -> Backbone:
        return self.model.backbone.backbone

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return boxes (B, n, 4), (x1, y1, x2, y2) in pixels, and scores (B, n, num_classes) of n cells or anchors.

        Args:
            images: (B, C, height, width) in [0, 1], with sides that are multiples of `divisor`.
        """
        batch = self.model.transform
        mean, std = (images.new_tensor(values)[:, None, None] for values in (batch.image_mean, batch.image_std))
        maps = list(self.model.backbone((images - mean) / std).values())
        outputs = self.model.head(maps)
        scores, boxes = outputs["cls_logits"].sigmoid(), outputs["bbox_regression"]
        if "bbox_ctrness" in outputs:
            scores = (scores * outputs["bbox_ctrness"].sigmoid()).sqrt()
        (anchors,) = self.model.anchor_generator(ImageList(images[:1], [(0, 0)]), maps)
        coder, anchors = self.model.box_coder, anchors.expand_as(boxes).flatten(0, 1)
        decode = coder.decode_single if hasattr(coder, "decode_single") else coder.decode
        return decode(boxes.flatten(0, 1), anchors).unflatten(0, boxes.shape[:2]), scores


@register_head("retinanet")
class RetinaNet(OneStageDetector):
    """Classifies the anchors of each cell, nine by default, with the focal loss, and refines their boxes.

    torchvision's, with mmdetection's anchors (`Anchors`). For one image the losses are mmdetection's, which adds the
    epsilon of float32 to its divisor, the number of positive anchors; for several, torchvision divides the losses of
    each image by its own number of positive anchors and takes the mean, while mmdetection divides the sum by the number
    in all images of a GPU. That is not an option, since the gradient of a step would depend on the number of GPUs. An
    anchor that is the best of one box but closer to another is assigned to the other by torchvision, to the first by
    mmdetection.

    Reference: Focal Loss for Dense Object Detection (Lin et al., 2017).

    Args:
        scale: side of the smallest square anchors, in strides of their map (mmdetection's octave_base_scale).
        octave: anchors per octave of sides (scales_per_octave).
        ratios: height / width of the anchors of a cell.
    """

    def __init__(
        self,
        features: Features,
        num_classes: Classes,
        scale: Positive = 4.0,
        octave: SmallCount = 3,
        ratios: tuple[Positive, ...] = (0.5, 1.0, 2.0),
        **others: Any,
    ) -> None:
        if not ratios:
            raise ValueError(f"`ratios` must have at least one ratio, got {ratios}.")
        anchors = Anchors(features.strides, [scale * 2 ** (step / octave) for step in range(octave)], ratios)
        head = RetinaNetHead(features.out_channels, octave * len(ratios), num_classes)
        super().__init__(features, num_classes, build=TorchvisionRetinaNet, head=head, anchors=anchors, **others)


@register_head("fcos")
class Fcos(OneStageDetector):
    """Predicts the box of each cell by its distances to the four sides, without anchors; torchvision's.

    An object is learned by the cells whose point lies in its box, so one smaller than the finest stride may never be
    learned.

    Reference: FCOS (Tian et al., 2019).
    """

    def __init__(self, features: Features, num_classes: Classes, nms: float = 0.6, **others: Any) -> None:
        head = FCOSHead(features.out_channels, 1, num_classes)
        anchors = Anchors(features.strides, (1.0,), (1.0,))
        super().__init__(features, num_classes, nms=nms, build=FCOS, head=head, anchors=anchors, **others)
