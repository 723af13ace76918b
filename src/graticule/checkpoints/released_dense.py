"""Weights of dense models in the form of public code: mmdetection, mmsegmentation, ViT-Adapter, Segmenter."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from graticule.checkpoints.layouts import renamed
from graticule.checkpoints.load import load_all, rename_published
from graticule.checkpoints.read import read_state
from graticule.registry.checks import checked

#: Starts of published names -> ours, tried in this order; {features} is the name prefix of the feature maps in the
#: model. The family of a backbone then renames the parameters of the backbone itself; None marks those never used.
_NAMES = {
    r"(?:backbone|encoder)\.(?:head|head_dist|fc_norm)\.": None,
    r"backbone\.(?=(?:level_embed|spm|interactions|up)\b)": "{features}reader.",
    r"(?:backbone|encoder)\.": "{features}backbone.",
    r"neck\.lateral_convs\.(\d+)\.conv\.": r"{features}necks.0.fpn.inner_blocks.\1.0.",
    r"neck\.lateral_convs\.(\d+)\.bn\.": r"{features}necks.0.fpn.inner_blocks.\1.1.",
    r"neck\.fpn_convs\.(\d+)\.conv\.": r"{features}necks.0.fpn.layer_blocks.\1.0.",
    r"neck\.fpn_convs\.(\d+)\.bn\.": r"{features}necks.0.fpn.layer_blocks.\1.1.",
    r"bbox_head\.cls_convs\.(\d+)\.conv\.": r"model.head.classification_head.conv.\1.0.",
    r"bbox_head\.reg_convs\.(\d+)\.conv\.": r"model.head.regression_head.conv.\1.0.",
    r"bbox_head\.retina_cls\.": "model.head.classification_head.cls_logits.",
    r"bbox_head\.retina_reg\.": "model.head.regression_head.bbox_reg.",
    r"rpn_head\.rpn_conv\.": "model.rpn.head.conv.0.0.",
    r"rpn_head\.rpn_cls\.": "model.rpn.head.cls_logits.",
    r"rpn_head\.rpn_reg\.": "model.rpn.head.bbox_pred.",
    r"roi_head\.bbox_head\.shared_fcs\.0\.": "model.roi_heads.box_head.fc6.",
    r"roi_head\.bbox_head\.shared_fcs\.1\.": "model.roi_heads.box_head.fc7.",
    r"roi_head\.bbox_head\.fc_cls\.": "model.roi_heads.box_predictor.cls_score.",
    r"roi_head\.bbox_head\.fc_reg\.": "model.roi_heads.box_predictor.bbox_pred.",
    r"roi_head\.mask_head\.convs\.(\d+)\.conv\.": r"model.roi_heads.mask_head.\1.0.",
    r"roi_head\.mask_head\.upsample\.": "model.roi_heads.mask_predictor.conv5_mask.",
    r"roi_head\.mask_head\.conv_logits\.": "model.roi_heads.mask_predictor.mask_fcn_logits.",
    r"decode_head\.": "decoder.",
    r"auxiliary_head\.": "auxiliary.",
}
#: mmdetection's background is the last class, torchvision's the first. mmdetection regresses boxes and masks of objects
#: only; torchvision also has rows for the background, on which no result depends. This many become zeros.
_BACKGROUND_LAST = "roi_head.bbox_head.fc_cls."
_BACKGROUND_ROWS = {"roi_head.bbox_head.fc_reg.": 4, "roi_head.mask_head.conv_logits.": 1}
_TABLE = re.compile(r"backbone\.pos_embed\d?$")


@checked
def load_published(model: nn.Module, source: str | Path | Mapping[str, Tensor]) -> nn.Module:
    """Load the weights of public code for dense prediction into `model`, completely or not at all, and return it.

    Accepts RetinaNet, Faster and Mask R-CNN from mmdetection (with PVT, Twins' PCPVT, ViT-Adapter and other
    backbones of this library), of ViT-Adapter, UperNet and Semantic FPN in mmsegmentation, and of Segmenter. Position
    tables are resampled as for a backbone alone; the row of a class token that the model lacks is omitted; a layer
    scale that the model lacks is multiplied into the layer before it. Twins' option of a norm after every stage
    (`norm_list`), which its configurations with PCPVT (CPVT's PVT) do not have, is refused.

    Args:
        model: a model of `create_detector` or `create_segmenter`.
        source: the path or the contents of a checkpoint.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it cannot be read or does not fit. The model is then unchanged.
    """
    features, backbone = getattr(model, "features", None), getattr(model, "backbone", None)
    if not isinstance(features, nn.Module) or not isinstance(backbone, nn.Module):
        raise ValueError(f"`model` must be of create_detector or create_segmenter, got {type(model).__name__}.")
    where = next(f"{name}." for name, module in model.named_modules() if module is features)
    state = rename_state(read_state(source), where, model.state_dict())
    rename_published(backbone, state, f"{where}backbone.", {})
    return load_all(model, state, source if isinstance(source, str | Path) else "`source`")


def rename_state(published: Mapping[str, Tensor], features: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a published state dict under the names in `state`, a model's, in which feature maps start with `features`.

    The backbone keeps its published names, which its family renames.
    """
    values = dict(published)
    for name in [name for name in values if re.search(r"\.gamma[12]$", name)]:
        scale, block = values.pop(name), name.rpartition(".")[0]
        if f"{features}backbone.blocks.0.ls1.gamma" in state:
            values[f"{block}.ls{name[-1]}.gamma"] = scale
            continue
        layer = f"{block}.attn.proj" if name.endswith("1") else f"{block}.mlp.fc2"
        values[f"{layer}.weight"] = values[f"{layer}.weight"] * scale[:, None]
        values[f"{layer}.bias"] = values[f"{layer}.bias"] * scale
    adapter = f"{features}reader.level_embed" in state
    blocks = f"{features}necks.0.fpn.inner_blocks"
    levels = sum(name.startswith(blocks) and name.endswith(".0.weight") for name in state)
    names = {name: _own_name(name, adapter, levels, features) for name in values}
    used = {n: target for n, target in names.items() if target and (target in state or not _unused(target, features))}
    renamed_state = {}
    for target, name in renamed({name: name for name in used}, used.__getitem__).items():
        value = values[name]
        if _TABLE.search(target) and f"{features}backbone.cls_token" not in state and value.ndim == 3:
            rows = value.shape[1]
            if math.isqrt(rows) ** 2 < rows == math.isqrt(rows - 1) ** 2 + 1:
                value = value[:, 1:]  # without the row of a class token
        renamed_state[target] = _with_background(name, value)
    return renamed_state


def _own_name(name: str, adapter: bool, levels: int, features: str) -> str | None:
    """Return our name for a published parameter; None for one that is never used."""
    if adapter and (match := re.match(r"backbone\.norm([1-4])\.", name)):
        return f"{features}reader.norms.{int(match[1]) - 1}.{name[match.end() :]}"
    if (match := re.match(r"neck\.fpn_convs\.(\d+)\.conv\.", name)) and int(match[1]) >= levels:
        return f"{features}necks.0.more.convs.{int(match[1]) - levels}.{name[match.end() :]}"
    for pattern, start in _NAMES.items():
        if match := re.match(pattern, name):
            return start and match.expand(start.replace("{features}", features)) + name[match.end() :]
    return name


def _unused(name: str, features: str) -> bool:
    """Return True if a model may lack this parameter.

    These are the final norm, class tokens, the finest level of an adapter and the auxiliary decoder.
    """
    parts = r"backbone\.(?:norm|cls_token|dist_token)|reader\.(?:spm\.fc1|up|norms\.0)"
    return name.startswith("auxiliary.") or re.match(rf"{re.escape(features)}(?:{parts})\b", name) is not None


def _with_background(name: str, value: Tensor) -> Tensor:
    """Return a tensor of mmdetection with the rows of the background as torchvision has them."""
    if name.startswith(_BACKGROUND_LAST):
        return torch.cat([value[-1:], value[:-1]])
    rows = next((rows for start, rows in _BACKGROUND_ROWS.items() if name.startswith(start)), 0)
    return torch.cat([value.new_zeros(rows, *value.shape[1:]), value]) if rows else value
