"""Conversion of timm's `VisionTransformer`: ViT, DeiT, DeiT III, AugReg, CLIP, SigLIP and DINOv2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from timm.layers import AttentionPoolLatent, LayerScale
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, ParallelScalingBlock, ParallelThingsBlock, ResPostBlock
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import nn

from graticule.backbones.vision_transformer import DistilledVisionTransformer, VisionTransformer
from graticule.external.convert import parts
from graticule.external.convert.parts import Conversion, check_kind, has, norm_text, refuse

#: Function that describes a block of timm as arguments of our ViT, and as those arguments of timm's that are others.
Describe = Callable[[Any], tuple[dict[str, Any], dict[str, Any]]]


def with_norms(layer: str) -> Describe:
    """Return the function that describes a block that is 'pre_norm' or 'post_norm'."""

    def describe(block: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        scales = parts.layer_scale(block)
        arguments = {
            "block_layer": layer,
            "init_values": scales if any(scales) else None,
            "norm_layer": norm_text(block, "norm1"),
            **parts.read_attention(block),
            **parts.read_mlp(block),
        }
        source = {
            "block_fn": type(block),
            "init_values": getattr(block, "init_values", scales[0] or None),
            "norm_layer": parts.factory_of(block.norm1),
            **parts.source_of_mlp(block.mlp),
        }
        return arguments, source

    return describe


def vit_arguments(
    model: Any, trunk: dict[str, Any], kinds: Mapping[Any, Describe]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a model as arguments of our ViT and of timm's, read from the first block, which is of these kinds."""
    check_kind(model, "blocks.0", *kinds)
    arguments, source = kinds[type(model.blocks[0])](model.blocks[0])
    rates = [part.drop_prob for part in model.blocks[-1].modules() if hasattr(part, "drop_prob")]
    act = trunk.pop("pool_act", arguments["act_layer"])
    if act != arguments["act_layer"]:
        raise refuse(model, "attn_pool.mlp.act", act, f"must be {arguments['act_layer']} as in the blocks")
    arguments |= {**trunk, "depth": len(model.blocks), "drop_path_rate": float(rates[0]) if rates else 0.0}
    return arguments, {**arguments, **_settings(model), **source}


def _settings(model: Any) -> dict[str, Any]:
    """Return the settings of a model of timm that are attributes of it, and have no effect on its own image size."""
    names = ("no_embed_class", "dynamic_img_size", "dynamic_img_pad")
    holders = (model, model.patch_embed) if hasattr(model, "patch_embed") else (model,)
    return {name: getattr(holder, name) for holder in holders for name in names if hasattr(holder, name)}


#: Names of tensors in a block of ViT-22B -> names here, where the first layer of the MLP is a separate module.
SCALING_NAMES: dict[str, tuple[str, ...]] = {
    "in_proj.weight": ("mlp.fc1.weight", "attn.qkv.weight"),
    "in_proj.bias": ("mlp.fc1.bias", "attn.qkv.bias"),
    "mlp_bias": ("mlp.fc1.bias",),
    "ls.gamma": ("ls1.gamma",),
    **{
        f"{there}.{leaf}": (f"{here}.{leaf}",)
        for there, here in (
            ("in_norm", "norm1"),
            ("q_norm", "attn.q_norm"),
            ("k_norm", "attn.k_norm"),
            ("attn_out_proj", "attn.proj"),
            ("mlp_out_proj", "mlp.fc2"),
        )
        for leaf in ("weight", "bias")
    },
}


def describe_scaling(block: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Describe a block of ViT-22B."""
    scale = (block.ls.init_values or 1.0) if isinstance(block.ls, LayerScale) else None
    arguments = {
        "block_layer": "parallel",
        "init_values": None if scale is None else (scale,) * 2,
        "num_heads": block.num_heads,
        "mlp_ratio": parts.ratio_of(block.in_split[0], block.in_proj.in_features),
        "qkv_bias": block.in_proj.bias is not None,
        "act_layer": parts.act_text(block, "mlp_act"),
        "attn_drop_rate": parts.rate_of(block, "attn_drop"),
        "norm_layer": norm_text(block, "in_norm"),
        "qk_norm": has(block, "q_norm"),
    }
    norm, act = parts.factory_of(block.in_norm), parts.factory_of(block.mlp_act)
    return arguments, {"block_fn": type(block), "init_values": scale, "norm_layer": norm, "act_layer": act}


def describe_branches(block: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Describe a block of two attentions and as many MLPs."""
    attn, ffn = block.attns[0], block.ffns[0]
    scales = tuple(parts.initial_scale(branch.ls) for branch in (attn, ffn))
    arguments = {
        "block_layer": "parallel_branches",
        "init_values": scales if any(scales) else None,
        "norm_layer": norm_text(attn, "norm"),
        **parts.read_attention(attn),
        **parts.read_mlp(ffn),
    }
    source = {"block_fn": type(block), "init_values": scales[0] or None, "norm_layer": parts.factory_of(attn.norm)}
    return arguments, {**source, **parts.source_of_mlp(ffn.mlp)}


#: The blocks that several classes have.
PLAIN: Mapping[Any, Describe] = {Block: with_norms("pre_norm"), ResPostBlock: with_norms("post_norm")}


@parts.register_conversion(TimmVisionTransformer, VisionTransformerDistilled)
def read_vit(model: Any) -> Conversion:
    """Describe timm's ViT, or its distilled form."""
    kinds = {**PLAIN, ParallelScalingBlock: describe_scaling, ParallelThingsBlock: describe_branches}
    arguments, source = vit_arguments(model, read_trunk(model), kinds)
    distilled = isinstance(model, VisionTransformerDistilled)
    build_source = parts.build_of_class(
        model,
        source,
        {"no_embed_class": False} if distilled else {},  # it does not read it
        signature=TimmVisionTransformer,
        embed_norm_layer=parts.factory_of(model.patch_embed.norm) if arguments["patch_norm"] else None,
        pos_embed="none" if model.pos_embed is None else "learn",
    )
    names = {
        f"blocks.{layer}.{there}": tuple(f"blocks.{layer}.{name}" for name in here)
        for layer in range(arguments["depth"] if arguments["block_layer"] == "parallel" else 0)
        for there, here in SCALING_NAMES.items()
    }
    if distilled:
        del arguments["global_pool"], arguments["class_token"]
    backbone = DistilledVisionTransformer if distilled else VisionTransformer
    return Conversion(backbone, arguments, parts.sum_of(table(model)), build_source, names)


def table(model: Any) -> str | None:
    """Return the encoding of a learned table, with or without rows for prefix tokens; None if there is none."""
    if model.pos_embed is None:
        return None
    rows = model.pos_embed.shape[1] - model.patch_embed.num_patches
    return "learnable" if rows == model.num_prefix_tokens else "learnable(prefix_rows=False)"


def read_trunk(model: Any) -> dict[str, Any]:
    """Return everything except the blocks and the position as arguments of our ViT."""
    patches = model.patch_embed
    if patches.img_size is None:
        raise refuse(patches, "img_size", None, "must be a size")
    counts = {}
    for name, setting in (("cls_token", "has_class_token"), ("reg_token", "num_reg_tokens")):
        tokens = getattr(model, name, None)
        counts[name] = 0 if tokens is None else tokens.shape[1]
        if (expected := getattr(model, setting, counts[name])) != counts[name]:
            raise refuse(model, name, tokens, f"must be as `{setting}` = {expected} says")
    if has(model, "norm_pre") and patches.proj.bias is not None:
        raise refuse(model, "norm_pre", model.norm_pre, "must be Identity after patches with a bias")
    return {
        **parts.trunk_arguments(model, patches),
        "class_token": counts["cls_token"] > 0,
        "reg_tokens": counts["reg_token"],
        **read_ends(model, patches),
    }


def read_ends(model: Any, patches: nn.Module) -> dict[str, Any]:
    """Return norms, rates and pooling before and after the blocks as arguments of our ViT."""
    if has(model, "norm") and has(model, "fc_norm"):
        raise refuse(model, "fc_norm", model.fc_norm, "must be Identity if there is a norm before pooling")
    dropouts = [owner for owner in (model, patches) if hasattr(owner, "pos_drop")]
    return {
        "pre_norm": has(model, "norm_pre"),
        "patch_norm": norm_text(patches, "norm"),
        "final_norm": has(model, "norm") or has(model, "fc_norm"),
        "fc_norm": has(model, "fc_norm"),
        "drop_rate": parts.rate_of(model, "head_drop"),
        "pos_drop_rate": parts.rate_of(dropouts[0], "pos_drop") if dropouts else 0.0,
        "patch_drop_rate": getattr(getattr(model, "patch_drop", None), "prob", 0.0),
        **_read_pool(model),
    }


def _read_pool(model: nn.Module) -> dict[str, Any]:
    include_prefix = getattr(model, "pool_include_prefix", False)
    arguments = {"global_pool": model.global_pool, "pool_include_prefix": include_prefix}
    pool = getattr(model, "attn_pool", None)
    if pool is None:
        return arguments
    check_kind(model, "attn_pool", AttentionPoolLatent)
    return {
        **arguments,
        "pool_num_heads": pool.num_heads,
        "pool_mlp_ratio": parts.ratio_of(pool.mlp.fc1.out_features, pool.mlp.fc1.in_features),
        "pool_act": parts.act_text(pool.mlp, "act"),
    }
