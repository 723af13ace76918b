"""Two-stage detectors: Faster R-CNN and Mask R-CNN."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_loss
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign, roi_align

from graticule.dense.detector import Anchors, Detector, Target, register_head
from graticule.dense.features import Features
from graticule.registry.fields import Classes, LayerIndex, Positive, SmallCount


class RegionHeads(RoIHeads):
    """Classifies regions, refines their boxes and predicts their masks, as in torchvision.

    Its losses are means over the regions of an image, and then over images; torchvision's are means over all regions of
    the batch, which weight an image by its number of regions and depend on the number of processes.

    Args:
        heads: those that it replaces, whose parts and options it keeps.
    """

    def __init__(self, heads: RoIHeads) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(heads.__dict__)

    def forward(self, features: Any, proposals: Any, image_shapes: Any, targets: Any = None) -> Any:
        """Return detections and no losses in evaluation, no detections and losses in training."""
        if not self.training:
            return super().forward(features, proposals, image_shapes, targets)
        regions, matched, labels, moves = self.select_training_samples(proposals, targets)
        read = self.box_head(self.box_roi_pool(features, regions, image_shapes))
        counts = [len(boxes) for boxes in regions]
        scores, moved = (prediction.split(counts) for prediction in self.box_predictor(read))
        losses_by_name: dict[str, list[Tensor]] = {"loss_classifier": [], "loss_box_reg": []}
        for image in zip(scores, moved, labels, moves, strict=True):
            losses = fastrcnn_loss(image[0], image[1], [image[2]], [image[3]])
            for name, loss in zip(losses_by_name, losses, strict=True):
                losses_by_name[name].append(loss)
        if self.has_mask():
            objects = [torch.where(region > 0)[0] for region in labels]
            boxes = [region[chosen] for region, chosen in zip(regions, objects, strict=True)]
            logits = self.mask_predictor(self.mask_head(self.mask_roi_pool(features, boxes, image_shapes)))
            parts = logits.split([len(region) for region in boxes])
            losses_by_name["loss_mask"] = [
                maskrcnn_loss(part, [box], [target["masks"]], [target["labels"]], [match[chosen]])
                for part, box, target, match, chosen in zip(parts, boxes, targets, matched, objects, strict=True)
            ]
        return [], {name: torch.stack(losses).mean() for name, losses in losses_by_name.items()}


#: Largest side of a region that is read from the finest map, in its cells.
_CELLS = 14


class RegionPool(MultiScaleRoIAlign):
    r"""Reads each region as side x side bins, means of bilinear samples whose number grows with the bin.

    A region of width w and height h pixels is read from map

    .. math:: l = \lfloor \log_2 (\sqrt{w h} / 14 s_0) \rfloor, \quad s_0: \text{stride of the finest map},

    or from the nearest existing one; for a stride of 4 this is 224 pixels at stride 16, as in the paper. Cell j of a
    map is at (j + 1/2) s pixels. Both are as in mmdetection and Detectron2; torchvision's parent class, which its
    detectors require, reads half a cell further to the bottom right, with four samples per bin, and assumes strides
    that are powers of two.

    Reference: Mask R-CNN (He et al., 2017); Feature Pyramid Networks (Lin et al., 2017), Eq. 1.

    Args:
        strides: pixels per cell of the maps, which are named '0', '1', ... from the finest.
        side: bins per side of a region.
    """

    def __init__(self, strides: Sequence[int], side: int) -> None:
        super().__init__([str(level) for level in range(len(strides))], side, sampling_ratio=0)
        self.strides = tuple(strides)

    def forward(self, x: Mapping[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]) -> Tensor:
        """Return (regions, C, side, side), the concatenated regions of all images.

        Args:
            x: maps (B, C, H, W) by name.
            boxes: per image (n, 4), left, top, right and bottom in pixels.
            image_shapes: unused, since the strides are known.
        """
        maps = [x[name] for name in self.featmap_names]
        levels = self.levels(torch.cat(boxes))
        numbers = torch.cat([torch.full_like(image_boxes[:, :1], number) for number, image_boxes in enumerate(boxes)])
        regions = torch.cat([numbers, torch.cat(boxes)], 1)
        out = maps[0].new_zeros(len(regions), maps[0].shape[1], *self.output_size)
        for level, (feature_map, stride) in enumerate(zip(maps, self.strides, strict=True)):
            here = torch.where(levels == level)[0]
            read = roi_align(feature_map, regions[here], self.output_size, 1 / stride, sampling_ratio=0, aligned=True)
            out[here] = read.to(out.dtype)
        return out

    def levels(self, boxes: Tensor) -> Tensor:
        """Return the index of the map that each of boxes (n, 4) is read from, (n,)."""
        side = (boxes[:, 2:] - boxes[:, :2]).prod(1).sqrt()
        fitting = torch.log2(side / (_CELLS * self.strides[0]) + 1e-6).floor()
        return fitting.clamp(0, len(self.strides) - 1)


class RegionSampler:
    """Draws `count` regions per image, at most a share of them objects, and the rest background.

    torchvision's sampler uses the global generator, so the draws of an image depend on the previous images of the
    batch. Here each image has its own seed: the same regions are drawn for any split of the batch across processes.

    Args:
        count: regions per image.
        share: largest share of these that are objects.
        stream: separates the draws from another sampler with the same seeds.
    """

    #: The seed of each image of the batch; None for the global generator.
    seeds: Sequence[int] | None = None

    def __init__(self, count: int, share: float, stream: int) -> None:
        self.count = count
        self.share = share
        self.stream = stream

    def __call__(self, matched: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the drawn regions of each image as masks (regions,): of objects, and of background.

        Args:
            matched: per image (regions,): at least 1 for an object, 0 for background, -1 for neither.
        """
        samples = [self._draw(number, matched_regions) for number, matched_regions in enumerate(matched)]
        return [objects for objects, _ in samples], [background for _, background in samples]

    def _draw(self, number: int, matched: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.default_generator
        if self.seeds is not None:
            generator = torch.Generator().manual_seed(2 * self.seeds[number] + self.stream)
        objects, background = torch.where(matched >= 1)[0], torch.where(matched == 0)[0]
        most = min(len(objects), int(self.count * self.share))
        masks = []
        for candidates, count in ((objects, most), (background, self.count - most)):
            order = torch.randperm(len(candidates), generator=generator)  # the same on every device
            mask = torch.zeros_like(matched, dtype=torch.uint8)
            mask[candidates[order[:count].to(candidates.device)]] = 1
            masks.append(mask)
        return masks[0], masks[1]


class RegionDetector(Detector, ABC):
    """A two-stage detector, which learns from sampled regions.

    Args:
        features: images to feature maps.
        num_classes: number of classes of objects.
        regions: proposals per image that the second stage learns from.
        proposals: proposals per image that are kept for training and classification.
        hidden: channels of its two linear layers.
        scale: side of the square anchors, in strides of their map.
        ratios: height / width of the anchors of a cell.
        score: see `Detector`.
        nms: see `Detector`.
        most: see `Detector`.
        build: the detector of torchvision, whose samplers and second stage are replaced.
        parts: returns further arguments of it.
    """

    neck_options: ClassVar = {"extra": "pool"}
    first_class = 1

    def __init__(
        self,
        features: Features,
        num_classes: Classes,
        regions: SmallCount = 512,
        proposals: SmallCount = 1000,
        hidden: SmallCount = 1024,
        scale: Positive = 8.0,
        ratios: tuple[Positive, ...] = (0.5, 1.0, 2.0),
        score: float = 0.05,
        nms: float = 0.5,
        most: int = 100,
        *,
        build: Callable[..., Any] = FasterRCNN,
        parts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        if hidden < 1 or not ratios:
            raise ValueError(f"`hidden` must be at least 1 and `ratios` not empty, got {hidden} and {ratios}.")
        model = build(
            features,
            rpn_anchor_generator=Anchors(features.strides, (scale,), ratios),
            rpn_head=RPNHead(features.out_channels, len(ratios)),
            rpn_pre_nms_top_n_train=2 * proposals,  # per level, as in mmdetection
            rpn_pre_nms_top_n_test=proposals,
            rpn_post_nms_top_n_train=proposals,
            rpn_post_nms_top_n_test=proposals,
            box_roi_pool=_pool(features, 7),
            box_head=TwoMLPHead(features.out_channels * 7**2, hidden),
            box_predictor=FastRCNNPredictor(hidden, num_classes + 1),
            box_batch_size_per_image=regions,
            box_score_thresh=score,
            box_nms_thresh=nms,
            box_detections_per_img=most,
            **parts(),
        )
        model.roi_heads = RegionHeads(model.roi_heads)
        super().__init__(features, num_classes, model)
        for stream, part in enumerate((model.rpn, model.roi_heads)):
            replaced = part.fg_bg_sampler
            part.fg_bg_sampler = RegionSampler(replaced.batch_size_per_image, replaced.positive_fraction, stream)

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[Target] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Return losses in training, detections otherwise.

        Targets may have a `seed`, an integer, that seeds the sampling of regions of the image.
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
    training the losses of boxes are smooth near zero, as in torchvision, while mmdetection's are absolute, and the
    losses of the second stage are means over images (`RegionHeads`).

    Reference: Faster R-CNN (Ren et al., 2015); with a feature pyramid (Lin et al., 2017).
    """


@register_head("mask_rcnn")
class MaskRcnn(RegionDetector):
    """Faster R-CNN that also predicts a mask of 28 x 28 in each region, for each class.

    torchvision's; see `FasterRcnn` for the differences from mmdetection. Masks are pasted into the image by
    torchvision's code, so they can differ by a pixel at their border.

    Reference: Mask R-CNN (He et al., 2017).

    Args:
        channels: channels of the convolutions of masks.
        convs: number of these, on 14 x 14 samples of a region, before the one that doubles them.
        others: as `RegionDetector`; at most a quarter of the regions are objects, with masks.
    """

    masks = True

    def __init__(
        self, features: Features, num_classes: Classes, channels: SmallCount = 256, convs: LayerIndex = 4, **others: Any
    ) -> None:
        if channels < 1 or convs < 1:
            raise ValueError(f"`channels` and `convs` must be at least 1, got {channels} and {convs}.")

        def parts() -> dict[str, Any]:
            return {
                "mask_roi_pool": _pool(features, 14),
                "mask_head": MaskRCNNHeads(features.out_channels, (channels,) * convs, 1),
                "mask_predictor": MaskRCNNPredictor(channels, channels, num_classes + 1),
            }

        super().__init__(features, num_classes, build=MaskRCNN, parts=parts, **others)


def _pool(features: Features, side: int) -> RegionPool:
    """Return the pooling of regions to `side` x `side`, from all maps except the added levels."""
    return RegionPool(features.strides[: len(features.strides) - features.extra], side)
