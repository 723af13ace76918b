"""Conversion of timm's `samvit` models, the image encoder of Segment Anything."""

from __future__ import annotations

from typing import Any

from timm.layers import ClassifierHead, LayerNorm2d, PatchEmbed
from timm.models.vision_transformer_sam import Attention, Block, VisionTransformerSAM
from torch import nn

from graticule.backbones.sam import SamVisionTransformer
from graticule.external.convert.parts import (
    Conversion,
    check_kind,
    norm_text,
    refuse,
    register_conversion,
    trunk_arguments,
)
from graticule.external.convert.vit import pre_norm, read_blocks, vit_arguments


@register_conversion(VisionTransformerSAM)
def read_sam(model: Any) -> Conversion:
    """Describe timm's encoder of Segment Anything."""
    check_kind(model, "patch_embed", PatchEmbed)
    check_kind(model, "head", ClassifierHead)
    check_kind(model, "patch_drop", nn.Identity)
    check_kind(model, "neck", nn.Sequential, LayerNorm2d)
    if model.rope_global is not None:
        raise refuse(model, "rope_global", model.rope_global, "must be None")
    norms = [module for module in model.neck.modules() if isinstance(module, LayerNorm2d)]
    if any(norm.eps != 1e-6 for norm in norms):
        raise refuse(model, "neck (eps)", norms[0].eps, "must be 1e-06")
    windows = {block.window_size for block in model.blocks} - {0}
    if len(windows) > 1:
        raise refuse(model, "blocks (window_size)", windows, "must be one number, or 0")
    relative = {block.attn.use_rel_pos for block in model.blocks}
    if len(relative) > 1:
        raise refuse(model, "blocks (use_rel_pos)", relative, "must be the same")
    patches = model.patch_embed
    pre = norm_text(model, "norm_pre")
    trunk = {
        **trunk_arguments(model, patches),
        "global_pool": model.head.global_pool.pool_type,
        "pre_norm": pre is not None,
        "norm_layer": pre,
        "drop_rate": model.head.drop.p,
        "pos_drop_rate": model.pos_drop.p,
        "window_size": next(iter(windows), 1),
        "global_layers": tuple(layer for layer, block in enumerate(model.blocks) if not block.window_size),
        "neck_dim": model.neck[0].out_channels if isinstance(model.neck, nn.Sequential) else None,
    }
    arguments = vit_arguments(model, trunk, read_blocks(model, {Block: pre_norm(Attention)}))
    encodings = ["learnable"] * (model.pos_embed is not None) + ["decomposed"] * any(relative)
    encoding = " + ".join(encodings) or "none"
    return Conversion(SamVisionTransformer, arguments, encoding, reshaped={"pos_embed": ()})
