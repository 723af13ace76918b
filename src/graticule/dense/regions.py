"""Detectors of two stages: Faster R-CNN and Mask R-CNN."""

from __future__ import annotations

from typing import Any, ClassVar

from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign

from graticule.checks import checked
from graticule.dense.detector import Detector, register_head
from graticule.dense.features import Features
from graticule.dense.torchvision_parts import Anchors

_RATIOS = (0.5, 1.0, 2.0)


@register_head("faster_rcnn")
class FasterRcnn(Detector):
    """Proposes regions, then classifies what the feature maps have in them.

    torchvision's, with mmdetection's anchors (`Anchors`). It differs from mmdetection in the regions: torchvision reads
    them half a cell of the map further to the bottom right, at four points per cell of a region, and its box regression
    has rows for the background.

    Reference: Faster R-CNN (Ren et al., 2015); with a feature pyramid (Lin et al., 2017).

    Args:
        features: images to feature maps.
        num_classes: number of classes of objects.
        score: detections of a lower score are left out.
        nms: of two boxes of a class that overlap more (IoU), the one of the lower score is left out.
        most: how many detections of an image are kept.
    """

    neck_options: ClassVar = {"extra": "pool"}
    first_class = 1

    @checked
    def __init__(
        self,
        features: Features,
        num_classes: int,
        score: float = 0.05,
        nms: float = 0.5,
        most: int = 100,
    ) -> None:
        model = FasterRCNN(features, num_classes + 1, **_parts(features, score, nms, most))
        super().__init__(features, num_classes, model)


@register_head("mask_rcnn")
class MaskRcnn(Detector):
    """Faster R-CNN that also predicts a mask of 28 x 28 in each region, for each class.

    torchvision's; see `FasterRcnn` for how it differs from mmdetection.

    Reference: Mask R-CNN (He et al., 2017).

    Args:
        features: images to feature maps.
        num_classes: number of classes of objects.
        score: detections of a lower score are left out.
        nms: of two boxes of a class that overlap more (IoU), the one of the lower score is left out.
        most: how many detections of an image are kept.
    """

    neck_options: ClassVar = {"extra": "pool"}
    first_class = 1
    masks = True

    @checked
    def __init__(
        self,
        features: Features,
        num_classes: int,
        score: float = 0.05,
        nms: float = 0.5,
        most: int = 100,
    ) -> None:
        parts = _parts(features, score, nms, most)
        model = MaskRCNN(features, num_classes + 1, mask_roi_pool=_regions(features, 14), **parts)
        super().__init__(features, num_classes, model)


def _parts(features: Features, score: float, nms: float, most: int) -> dict[str, Any]:
    """Return the parts that both detectors give to torchvision."""
    return {
        "rpn_anchor_generator": Anchors(features.strides, (8.0,), _RATIOS),
        "rpn_head": RPNHead(features.out_channels, len(_RATIOS)),
        "box_roi_pool": _regions(features, 7),
        "box_score_thresh": score,
        "box_nms_thresh": nms,
        "box_detections_per_img": most,
    }


def _regions(features: Features, side: int) -> MultiScaleRoIAlign:
    """Return what reads regions from all maps but those that were added, as maps of `side` x `side`.

    Raises:
        ValueError: if a stride is no power of two, which torchvision needs.
    """
    strides = features.strides[: len(features.strides) - features.extra]
    if any(stride & (stride - 1) for stride in strides):
        raise ValueError(f"`patch_size` must be such that the strides of the maps are powers of two, got {strides}.")
    return MultiScaleRoIAlign([str(level) for level in range(len(strides))], output_size=side, sampling_ratio=2)
