"""The second stage of Faster and Mask R-CNN; the losses of an image do not depend on the rest of its batch."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_loss


class RegionHeads(RoIHeads):
    """Classifies regions, refines their boxes and predicts their masks, as in torchvision.

    Its losses are means over the regions of an image, and then over images; torchvision's are means over all regions of
    the batch, which weight an image by its number of regions and depend on the number of processes.
    """

    @classmethod
    def of(cls, heads: Any) -> Self:
        """Return region heads with the parts of `heads`, torchvision's for Faster or Mask R-CNN."""
        matcher, sampler = heads.proposal_matcher, heads.fg_bg_sampler
        return cls(
            heads.box_roi_pool,
            heads.box_head,
            heads.box_predictor,
            matcher.high_threshold,
            matcher.low_threshold,
            sampler.batch_size_per_image,
            sampler.positive_fraction,
            heads.box_coder.weights,
            heads.score_thresh,
            heads.nms_thresh,
            heads.detections_per_img,
            heads.mask_roi_pool,
            heads.mask_head,
            heads.mask_predictor,
        )

    def forward(self, features: Any, proposals: Any, image_shapes: Any, targets: Any = None) -> Any:
        """Return detections and no losses in evaluation, no detections and losses in training."""
        if not self.training:
            return super().forward(features, proposals, image_shapes, targets)
        regions, matched, labels, moves = self.select_training_samples(proposals, targets)
        read = self.box_head(self.box_roi_pool(features, regions, image_shapes))
        counts = [len(one) for one in regions]
        scores, moved = (found.split(counts) for found in self.box_predictor(read))
        each: dict[str, list[Tensor]] = {"loss_classifier": [], "loss_box_reg": []}
        for one in zip(scores, moved, labels, moves, strict=True):
            for name, loss in zip(each, fastrcnn_loss(one[0], one[1], [one[2]], [one[3]]), strict=True):
                each[name].append(loss)
        if self.has_mask():
            objects = [torch.where(one > 0)[0] for one in labels]
            boxes = [one[chosen] for one, chosen in zip(regions, objects, strict=True)]
            logits = self.mask_predictor(self.mask_head(self.mask_roi_pool(features, boxes, image_shapes)))
            parts = logits.split([len(one) for one in boxes])
            each["loss_mask"] = [
                maskrcnn_loss(part, [box], [target["masks"]], [target["labels"]], [match[chosen]])
                for part, box, target, match, chosen in zip(parts, boxes, targets, matched, objects, strict=True)
            ]
        return [], {name: torch.stack(losses).mean() for name, losses in each.items()}
