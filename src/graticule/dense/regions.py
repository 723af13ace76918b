"""Two-stage detectors: Faster R-CNN and Mask R-CNN."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.rpn import RPNHead

from graticule.checks import checked
from graticule.dense.detector import Detector, Target, register_head
from graticule.dense.features import Features
from graticule.dense.region_heads import RegionHeads
from graticule.dense.region_pool import RegionPool
from graticule.dense.region_sampler import RegionSampler
from graticule.dense.torchvision_parts import Anchors

_RATIOS = (0.5, 1.0, 2.0)


class RegionDetector(Detector, ABC):
    """A two-stage detector, which learns from sampled regions.

    Args:
        features: images to feature maps.
        num_classes: number of classes of objects.
        model: the detector of torchvision, whose samplers and second stage are replaced.
    """

    neck_options: ClassVar = {"extra": "pool"}
    first_class = 1

    def __init__(self, features: Features, num_classes: int, model: Any) -> None:
        model.roi_heads = RegionHeads.of(model.roi_heads)
        super().__init__(features, num_classes, model)
        for stream, part in enumerate((model.rpn, model.roi_heads)):
            replaced = part.fg_bg_sampler
            part.fg_bg_sampler = RegionSampler(replaced.batch_size_per_image, replaced.positive_fraction, stream)

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[Target] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Return losses in training, detections otherwise.

        Targets may have a `seed`, an integer, that seeds the sampling of regions of the image.

        Raises:
            ValueError: for targets that are missing or wrong.
        """
        seeds = None
        if self.training and targets is not None and all("seed" in target for target in targets):
            seeds = [int(target["seed"]) for target in targets]
        for part in (self.model.rpn, self.model.roi_heads):
            part.fg_bg_sampler.seeds = seeds
        return super().forward(images, targets)


@register_head("faster_rcnn")
class FasterRcnn(RegionDetector):
    """Proposes regions, then classifies them from the feature maps.

    torchvision's, with mmdetection's anchors (`Anchors`) and regions (`RegionPool`), so mmdetection's weights fit. In
    training the losses of boxes are smooth near zero, as in torchvision, while mmdetection's are absolute; the second
    stage learns from up to 2,000 proposals (1,000 in mmdetection), and its losses are means over images
    (`RegionHeads`).

    Reference: Faster R-CNN (Ren et al., 2015); with a feature pyramid (Lin et al., 2017).

    Args:
        features: images to feature maps.
        num_classes: number of classes of objects.
        score: detections with a lower score are left out.
        nms: of two boxes of a class that overlap more (IoU), the one with the lower score is left out.
        most: number of detections per image that are kept.
    """

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
class MaskRcnn(RegionDetector):
    """Faster R-CNN that also predicts a mask of 28 x 28 in each region, for each class.

    torchvision's; see `FasterRcnn` for the differences from mmdetection. Masks are pasted into the image by
    torchvision's code, so they can differ by a pixel at their border.

    Reference: Mask R-CNN (He et al., 2017).

    Args:
        features: images to feature maps.
        num_classes: number of classes of objects.
        score: detections with a lower score are left out.
        nms: of two boxes of a class that overlap more (IoU), the one with the lower score is left out.
        most: number of detections per image that are kept.
    """

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
    """Return the arguments for torchvision of both detectors."""
    return {
        "rpn_anchor_generator": Anchors(features.strides, (8.0,), _RATIOS),
        "rpn_head": RPNHead(features.out_channels, len(_RATIOS)),
        "box_roi_pool": _regions(features, 7),
        "box_score_thresh": score,
        "box_nms_thresh": nms,
        "box_detections_per_img": most,
    }


def _regions(features: Features, side: int) -> RegionPool:
    """Return the pooling of regions to `side` x `side`, from all maps except the added levels."""
    return RegionPool(features.strides[: len(features.strides) - features.extra], side)
