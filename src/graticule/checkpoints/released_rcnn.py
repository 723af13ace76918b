"""The heads of Faster and Mask R-CNN in mmdetection's checkpoints, converted to torchvision's names."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

#: mmdetection's names, ours, and the change of the rows of classes: the number of zero rows that are prepended, or
#: 'last first' (see `rcnn_heads`).
_NAMES: tuple[tuple[str, str, int | str | None], ...] = (
    (r"rpn_head\.rpn_conv\.", "model.rpn.head.conv.0.0.", None),
    (r"rpn_head\.rpn_cls\.", "model.rpn.head.cls_logits.", None),
    (r"rpn_head\.rpn_reg\.", "model.rpn.head.bbox_pred.", None),
    (r"roi_head\.bbox_head\.shared_fcs\.0\.", "model.roi_heads.box_head.fc6.", None),
    (r"roi_head\.bbox_head\.shared_fcs\.1\.", "model.roi_heads.box_head.fc7.", None),
    (r"roi_head\.bbox_head\.fc_cls\.", "model.roi_heads.box_predictor.cls_score.", "last first"),
    (r"roi_head\.bbox_head\.fc_reg\.", "model.roi_heads.box_predictor.bbox_pred.", 4),
    (r"roi_head\.mask_head\.convs\.(\d+)\.conv\.", r"model.roi_heads.mask_head.\1.0.", None),
    (r"roi_head\.mask_head\.upsample\.", "model.roi_heads.mask_predictor.conv5_mask.", None),
    (r"roi_head\.mask_head\.conv_logits\.", "model.roi_heads.mask_predictor.mask_fcn_logits.", 1),
)


def rcnn_heads(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of mmdetection with its region heads under torchvision's names; others are unchanged.

    mmdetection's background is the last class, torchvision's the first. mmdetection regresses boxes and masks of
    objects only; torchvision also has rows for the background, on which no result depends. They become zeros.
    """
    state = {}
    for name, value in published.items():
        for pattern, ours, rows in _NAMES:
            if found := re.match(pattern, name):
                name = found.expand(ours) + name[found.end() :]
                if isinstance(rows, int):
                    value = torch.cat([value.new_zeros(rows, *value.shape[1:]), value])
                elif rows is not None:
                    value = torch.cat([value[-1:], value[:-1]])
                break
        state[name] = value
    return state
