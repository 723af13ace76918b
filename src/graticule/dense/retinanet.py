"""One-stage detectors: RetinaNet and FCOS."""

from __future__ import annotations

from typing import Any, ClassVar

from torchvision.models.detection import FCOS
from torchvision.models.detection import RetinaNet as TorchvisionRetinaNet
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.retinanet import RetinaNetHead

from graticule.dense.detector import Anchors, Detector, register_head
from graticule.dense.features import Features

#: The convolutions of each branch of torchvision's heads.
_CONVS = 4


@register_head("retinanet")
class RetinaNet(Detector):
    """Classifies the anchors of each cell, nine by default, with the focal loss, and refines their boxes.

    torchvision's, with mmdetection's anchors (`Anchors`). For one image the losses are mmdetection's, which adds the
    epsilon of float32 to its divisor, the number of positive anchors; for several, torchvision divides the losses of
    each image by its own number of positive anchors and takes the mean, while mmdetection divides the sum by the number
    in all images of a GPU. That is not an option, since the gradient of a step would depend on the number of GPUs. An
    anchor that is the best of one box but closer to another is assigned to the other by torchvision, to the first by
    mmdetection.

    Reference: Focal Loss for Dense Object Detection (Lin et al., 2017).

    Args:
        features: images to feature maps.
        num_classes: number of classes of objects.
        convs: convolutions before the classifier, and before the regression.
        scale: side of the smallest square anchors, in strides of their map (mmdetection's octave_base_scale).
        octave: anchors per octave of sides (scales_per_octave).
        ratios: height / width of the anchors of a cell.
        score: detections with a lower score are left out.
        nms: of two boxes of a class that overlap more (IoU), the one with the lower score is left out.
        most: number of detections per image that are kept.
    """

    neck_options: ClassVar = {"first": 1, "extra": "convolutions"}

    def __init__(
        self,
        features: Features,
        num_classes: int,
        convs: int = 4,
        scale: float = 4.0,
        octave: int = 3,
        ratios: tuple[float, ...] = (0.5, 1.0, 2.0),
        score: float = 0.05,
        nms: float = 0.5,
        most: int = 100,
    ) -> None:
        if not ratios:
            raise ValueError(f"`ratios` must have at least one ratio, got {ratios}.")
        anchors = Anchors(features.strides, [scale * 2 ** (step / octave) for step in range(octave)], ratios)
        head = RetinaNetHead(features.out_channels, octave * len(ratios), num_classes)
        _keep(head, convs)
        model = TorchvisionRetinaNet(
            features,
            num_classes,
            anchor_generator=anchors,
            head=head,
            score_thresh=score,
            nms_thresh=nms,
            detections_per_img=most,
        )
        super().__init__(features, num_classes, model)


@register_head("fcos")
class Fcos(Detector):
    """Predicts the box of each cell by its distances to the four sides, without anchors; torchvision's.

    An object is learned by the cells whose point lies in its box, so one smaller than the finest stride may never be
    learned.

    Reference: FCOS (Tian et al., 2019).

    Args:
        features: images to feature maps.
        num_classes: number of classes of objects.
        convs: convolutions before the classifier, and before the regression.
        score: detections with a lower score are left out.
        nms: of two boxes of a class that overlap more (IoU), the one with the lower score is left out.
        most: number of detections per image that are kept.
    """

    neck_options: ClassVar = {"first": 1, "extra": "convolutions"}

    def __init__(
        self,
        features: Features,
        num_classes: int,
        convs: int = 4,
        score: float = 0.05,
        nms: float = 0.6,
        most: int = 100,
    ) -> None:
        head = FCOSHead(features.out_channels, 1, num_classes)
        _keep(head, convs)
        model = FCOS(
            features,
            num_classes,
            anchor_generator=Anchors(features.strides, (1.0,), (1.0,)),
            head=head,
            score_thresh=score,
            nms_thresh=nms,
            detections_per_img=most,
        )
        super().__init__(features, num_classes, model)


def _keep(head: Any, count: int) -> None:
    """Keep the first `count` of the four convolutions, with any norm and activation after each, in both branches."""
    if not 0 <= count <= _CONVS:
        raise ValueError(f"`convs` must be from 0 to {_CONVS}, got {count}.")
    for part in (head.classification_head, head.regression_head):
        part.conv = part.conv[: count * len(part.conv) // _CONVS]
