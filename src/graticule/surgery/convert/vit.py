"""Conversion of timm's `VisionTransformer`: ViT, DeiT, DeiT III, AugReg, CLIP, SigLIP and DINOv2."""

from __future__ import annotations

from typing import Any

from timm.layers import Attention, AttentionPoolLatent, PatchEmbed
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, ParallelScalingBlock, ParallelThingsBlock, ResPostBlock
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import nn

from graticule.backbones import DistilledVisionTransformer, VisionTransformer
from graticule.surgery.convert.blocks import post_norm, pre_norm, prefixed, read_blocks, vit_arguments
from graticule.surgery.convert.conversion import Conversion, check_kind, refuse, register_conversion
from graticule.surgery.convert.parallel import SCALING_NAMES, describe_branches, describe_scaling
from graticule.surgery.convert.parts import act_text, norm_text, ratio_of, same_norm, trunk_arguments


@register_conversion(TimmVisionTransformer, VisionTransformerDistilled)
def read_vit(model: Any) -> Conversion:
    """Describe timm's ViT, or its distilled form."""
    kinds = {
        Block: pre_norm(Attention),
        ResPostBlock: post_norm(Attention),
        ParallelScalingBlock: describe_scaling,
        ParallelThingsBlock: describe_branches,
    }
    arguments = vit_arguments(model, read_trunk(model), read_blocks(model, kinds))
    names = prefixed(range(arguments["depth"]), SCALING_NAMES) if arguments["block_layer"] == "parallel" else {}
    encoding = "none" if model.pos_embed is None else table(model)
    distilled = isinstance(model, VisionTransformerDistilled)
    if distilled:
        del arguments["global_pool"], arguments["class_token"]
    backbone = DistilledVisionTransformer if distilled else VisionTransformer
    return Conversion(backbone, arguments, encoding, names=names)


def table(model: Any) -> str:
    """Return the encoding of a learned table, with or without rows for prefix tokens."""
    rows = model.pos_embed.shape[1] - model.patch_embed.num_patches
    return "learnable" if rows == model.num_prefix_tokens else "learnable(prefix_rows=False)"


def read_trunk(model: Any) -> dict[str, Any]:
    """Return everything except the blocks and the position as arguments of our ViT.

    Raises:
        ValueError: for a part that our ViT lacks.
    """
    check_kind(model, "patch_embed", PatchEmbed)
    patches = model.patch_embed
    if patches.dynamic_img_pad:
        raise refuse(patches, "dynamic_img_pad", True, "must be False")
    if patches.img_size is None:
        raise refuse(patches, "img_size", None, "must be a size")
    if not isinstance(getattr(model, "patch_drop", None) or nn.Identity(), nn.Identity):
        raise refuse(model, "patch_drop", model.patch_drop, "must be left out")
    norms = [name for name in ("norm_pre", "norm", "fc_norm") if hasattr(model, name)]
    ends = [norm_text(model, name) is not None for name in ("norm", "fc_norm")]
    if all(ends):
        raise refuse(model, "fc_norm", model.fc_norm, "must be Identity if there is a norm before pooling")
    registers = getattr(model, "reg_token", None)
    return {
        **trunk_arguments(model, patches),
        "class_token": model.cls_token is not None,
        "reg_tokens": 0 if registers is None else registers.shape[1],
        "pre_norm": "norm_pre" in norms and norm_text(model, "norm_pre") is not None,
        "patch_norm": norm_text(patches, "norm"),
        "final_norm": any(ends),
        "fc_norm": ends[1],
        "norm_layer": same_norm(model, norms),
        "drop_rate": model.head_drop.p,
        "pos_drop_rate": model.pos_drop.p if hasattr(model, "pos_drop") else 0.0,
        **_read_pool(model),
    }


def _read_pool(model: nn.Module) -> dict[str, Any]:
    """Return the arguments for the pooling of tokens."""
    found = {"global_pool": model.global_pool, "pool_include_prefix": getattr(model, "pool_include_prefix", False)}
    pool = getattr(model, "attn_pool", None)
    if pool is None:
        return found
    check_kind(model, "attn_pool", AttentionPoolLatent)
    if pool.mlp is None or pool.pos_embed is not None or pool.latent_len != 1 or pool.pool != "token":
        raise refuse(model, "attn_pool", pool, "must be one query with an MLP and no position")
    if any(norm_text(pool, name) is not None for name in ("q_norm", "k_norm")):
        raise refuse(pool, "q_norm", pool.q_norm, "must be Identity")
    same_norm(model, ["norm", "norm_pre", "attn_pool.norm"])
    return {
        **found,
        "pool_num_heads": pool.num_heads,
        "pool_mlp_ratio": ratio_of(pool.mlp.fc1.out_features, pool.mlp.fc1.in_features),
        "pool_act": act_text(pool.mlp, "act"),
    }
