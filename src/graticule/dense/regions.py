"""Two-stage detectors: Faster R-CNN and Mask R-CNN."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead

from graticule.checks import checked
from graticule.dense.detector import Detector, Target, register_head
from graticule.dense.features import Features
from graticule.dense.region_heads import RegionHeads
from graticule.dense.region_pool import RegionPool
from graticule.dense.region_sampler import RegionSampler
from graticule.dense.torchvision_parts import Anchors


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
    training the losses of boxes are smooth near zero, as in torchvision, while mmdetection's are absolute, and those of
    the second stage are means over images (`RegionHeads`).

    Reference: Faster R-CNN (Ren et al., 2015); with a feature pyramid (Lin et al., 2017).

    Args:
        features: images to feature maps.
        num_classes: number of classes of objects.
        regions: proposals per image that the second stage learns from.
        proposals: proposals per image that are kept, of which it learns and which it classifies.
        hidden: channels of its two linear layers.
        scale: side of the square anchors, in strides of their map.
        ratios: height / width of the anchors of a cell.
        score: detections with a lower score are left out.
        nms: of two boxes of a class that overlap more (IoU), the one with the lower score is left out.
        most: number of detections per image that are kept.
    """

    @checked
    def __init__(
        self,
        features: Features,
        num_classes: int,
        regions: int = 512,
        proposals: int = 1000,
        hidden: int = 1024,
        scale: float = 8.0,
        ratios: tuple[float, ...] = (0.5, 1.0, 2.0),
        score: float = 0.05,
        nms: float = 0.5,
        most: int = 100,
    ) -> None:
        parts = _parts(features, num_classes, regions, proposals, hidden, scale, ratios)
        model = FasterRCNN(features, box_score_thresh=score, box_nms_thresh=nms, box_detections_per_img=most, **parts)
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
        regions: proposals per image that the second stage learns from; at most a quarter are objects, with masks.
        proposals: proposals per image that are kept, of which it learns and which it classifies.
        hidden: channels of its two linear layers.
        channels: channels of the convolutions of masks.
        convs: number of these, on 14 x 14 samples of a region, before the one that doubles them.
        scale: side of the square anchors, in strides of their map.
        ratios: height / width of the anchors of a cell.
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
        regions: int = 512,
        proposals: int = 1000,
        hidden: int = 1024,
        channels: int = 256,
        convs: int = 4,
        scale: float = 8.0,
        ratios: tuple[float, ...] = (0.5, 1.0, 2.0),
        score: float = 0.05,
        nms: float = 0.5,
        most: int = 100,
    ) -> None:
        if channels < 1 or convs < 1:
            raise ValueError(f"`channels` and `convs` must be at least 1, got {channels} and {convs}.")
        parts = _parts(features, num_classes, regions, proposals, hidden, scale, ratios)
        model = MaskRCNN(
            features,
            mask_roi_pool=_pool(features, 14),
            mask_head=MaskRCNNHeads(features.out_channels, (channels,) * convs, 1),
            mask_predictor=MaskRCNNPredictor(channels, channels, num_classes + 1),
            box_score_thresh=score,
            box_nms_thresh=nms,
            box_detections_per_img=most,
            **parts,
        )
        super().__init__(features, num_classes, model)


def _parts(
    features: Features,
    num_classes: int,
    regions: int,
    proposals: int,
    hidden: int,
    scale: float,
    ratios: Sequence[float],
) -> dict[str, Any]:
    """Return the arguments for torchvision of both detectors."""
    if hidden < 1 or not ratios:
        raise ValueError(f"`hidden` must be at least 1 and `ratios` not empty, got {hidden} and {ratios}.")
    return {
        "rpn_anchor_generator": Anchors(features.strides, (scale,), ratios),
        "rpn_head": RPNHead(features.out_channels, len(ratios)),
        "rpn_pre_nms_top_n_train": 2 * proposals,  # per level, as in mmdetection
        "rpn_pre_nms_top_n_test": proposals,
        "rpn_post_nms_top_n_train": proposals,
        "rpn_post_nms_top_n_test": proposals,
        "box_roi_pool": _pool(features, 7),
        "box_head": TwoMLPHead(features.out_channels * 7**2, hidden),
        "box_predictor": FastRCNNPredictor(hidden, num_classes + 1),
        "box_batch_size_per_image": regions,
    }


def _pool(features: Features, side: int) -> RegionPool:
    """Return the pooling of regions to `side` x `side`, from all maps except the added levels."""
    return RegionPool(features.strides[: len(features.strides) - features.extra], side)
