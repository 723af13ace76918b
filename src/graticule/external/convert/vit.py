"""Conversion of timm's `VisionTransformer`: ViT, DeiT, DeiT III, AugReg, CLIP, SigLIP and DINOv2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from timm.layers import Attention, AttentionPoolLatent, LayerScale, Mlp, PatchEmbed
from timm.models.deit import VisionTransformerDistilled
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import Block, ParallelScalingBlock, ParallelThingsBlock, ResPostBlock
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import nn

from graticule.backbones.vision_transformer import DistilledVisionTransformer, VisionTransformer
from graticule.external.convert.parts import (
    Conversion,
    act_text,
    check_kind,
    drop_path,
    layer_scale,
    norm_text,
    rate_of,
    ratio_of,
    read_attention,
    read_mlp,
    refuse,
    register_conversion,
    same_norm,
    trunk_arguments,
)
from graticule.registry.specs import Spec

#: Function that describes a block of timm as arguments of our ViT, with 'drop_path' for its rate of stochastic depth.
Describe = Callable[[Any], dict[str, Any]]


def read_blocks(model: Any, kinds: Mapping[type[nn.Module], Describe]) -> dict[str, Any]:
    """Return the blocks of a model as arguments of our ViT.

    Args:
        model: the model.
        kinds: the function that describes a block, by the class of the block in timm.
    """
    described: list[dict[str, Any]] = []
    for index, block in enumerate(model.blocks):
        check_kind(model, f"blocks.{index}", *kinds)
        described.append(kinds[type(block)](block))
    rates = [found.pop("drop_path") for found in described]
    for index, other in enumerate(described):
        for name, value in other.items():
            if value != described[0].get(name):
                raise refuse(model, f"blocks.{index}", f"{name}={value!r}", f"must have {name}={described[0][name]!r}")
    return {**described[0], "depth": len(described), "drop_path_rate": read_rates(model, rates)}


def pre_norm(*attentions: type[nn.Module]) -> Describe:
    """Return the function that describes a pre-norm block whose attention is of one of these classes."""
    return lambda block: _describe(block, "pre_norm", attentions)


def post_norm(*attentions: type[nn.Module]) -> Describe:
    """Return the function that describes a block with norms after its branches and attention of these classes."""
    return lambda block: _describe(block, "post_norm", attentions)


def _describe(block: Any, kind: str, attentions: tuple[type[nn.Module], ...]) -> dict[str, Any]:
    check_kind(block, "attn", *attentions)
    if drop_path(block.drop_path2) != drop_path(block.drop_path1):
        raise refuse(block, "drop_path2", drop_path(block.drop_path2), "must be that of drop_path1")
    scales = layer_scale(block)
    return {
        "block_layer": kind,
        "init_values": scales if any(scales) else None,
        "drop_path": drop_path(block.drop_path1),
        **join_parts(block, same_norm(block, ["norm1", "norm2"]), read_attention(block), read_mlp(block)),
    }


def join_parts(block: nn.Module, norm: str | None, attn: dict[str, Any], mlp: dict[str, Any]) -> dict[str, Any]:
    """Combine attention and MLP, whose biases, dropout and norms must be the same."""
    for name in ("proj_bias", "proj_drop_rate"):
        if attn[name] != mlp[name]:
            raise refuse(block, f"mlp ({name})", mlp[name], f"must be {attn[name]!r} as that of attention")
    inner = {"qk_norm": attn.pop("qk"), "scale_attn_norm": attn.pop("inner"), "scale_mlp_norm": mlp.pop("norm")}
    for name, own in inner.items():
        if own not in (None, norm):
            raise refuse(block, name, own, f"must be {norm} as the other norms")
    return {**attn, **mlp, "norm_layer": norm, **{name: own is not None for name, own in inner.items()}}


def read_rates(model: nn.Module, rates: list[float]) -> float:
    """Return the rate of stochastic depth of the last block, to which it grows linearly from 0."""
    expected = torch.linspace(0, rates[-1], len(rates), device="cpu").tolist()
    if any(abs(own - rule) > 1e-6 for own, rule in zip(rates, expected, strict=True)):
        raise refuse(model, "drop_path", rates, "must grow linearly from 0")
    return rates[-1]


def vit_arguments(model: nn.Module, trunk: dict[str, Any], blocks: dict[str, Any]) -> dict[str, Any]:
    """Combine the trunk and the blocks, whose norms and activations must be the same."""
    if trunk["norm_layer"] not in (None, blocks["norm_layer"]):
        raise refuse(model, "norm", trunk["norm_layer"], f"must be {blocks['norm_layer']} as those of the blocks")
    act = trunk.pop("pool_act", blocks["act_layer"])
    if act != blocks["act_layer"]:
        raise refuse(model, "attn_pool.mlp.act", act, f"must be {blocks['act_layer']} as that of the blocks")
    return {**trunk, **blocks}


def prefixed(layers: Iterable[int], names: Mapping[str, str | tuple[str, ...]]) -> dict[str, str | tuple[str, ...]]:
    """Extend names of the tensors of a block to the same tensors of all blocks."""
    found: dict[str, str | tuple[str, ...]] = {}
    for layer in layers:
        for theirs, own in names.items():
            at = f"blocks.{layer}."
            found[at + theirs] = at + own if isinstance(own, str) else tuple(at + one for one in own)
    return found


#: Names of tensors in a block of ViT-22B -> names here, where the first layer of the MLP is a separate module.
SCALING_NAMES: dict[str, str | tuple[str, ...]] = {
    "in_proj.weight": ("mlp.fc1.weight", "attn.qkv.weight"),
    "in_proj.bias": ("mlp.fc1.bias", "attn.qkv.bias"),
    "mlp_bias": "mlp.fc1.bias",
    "ls.gamma": "ls1.gamma",
    **{
        f"{theirs}.{leaf}": f"{own}.{leaf}"
        for theirs, own in (
            ("in_norm", "norm1"),
            ("q_norm", "attn.q_norm"),
            ("k_norm", "attn.k_norm"),
            ("attn_out_proj", "attn.proj"),
            ("mlp_out_proj", "mlp.fc2"),
        )
        for leaf in ("weight", "bias")
    },
}


def describe_scaling(block: nn.Module) -> dict[str, Any]:
    """Describe a block of ViT-22B."""
    if block.out_proj is not None:
        raise refuse(block, "out_proj", block.out_proj, "must be None (one output projection of each branch)")
    if block.attn_out_proj.bias is None:
        raise refuse(block, "attn_out_proj.bias", None, "must exist")
    if block.mlp_drop.p:
        raise refuse(block, "mlp_drop.p", block.mlp_drop.p, "must be 0")
    norm = same_norm(block, ["in_norm", "q_norm", "k_norm"])
    scaled = isinstance(block.ls, LayerScale)
    dim = block.in_proj.in_features
    return {
        "block_layer": "parallel",
        "init_values": (block.ls.init_values or 1.0,) * 2 if scaled else None,
        "drop_path": drop_path(block.drop_path),
        "num_heads": block.num_heads,
        "mlp_ratio": ratio_of(block.in_split[0], dim),
        "qkv_bias": block.in_proj.bias is not None,
        "act_layer": act_text(block, "mlp_act"),
        "attn_drop_rate": rate_of(block, "attn_drop"),
        "norm_layer": norm,
        "qk_norm": not isinstance(block.q_norm, nn.Identity),
    }


def describe_branches(block: Any) -> dict[str, Any]:
    """Describe a block of several attentions and as many MLPs."""
    if block.num_parallel != 2:
        raise refuse(block, "num_parallel", block.num_parallel, "must be 2")
    found = []
    for index, (attn, ffn) in enumerate(zip(block.attns, block.ffns, strict=True)):
        check_kind(block, f"attns.{index}.attn", Attention)
        check_kind(block, f"ffns.{index}.mlp", Mlp)
        norm = same_norm(block, [f"attns.{index}.norm", f"ffns.{index}.norm"])
        scales = tuple(
            float(one.ls.init_values) or 1.0 if isinstance(one.ls, LayerScale) else 0.0 for one in (attn, ffn)
        )
        found.append(
            {
                "block_layer": "parallel_branches",
                "init_values": scales if any(scales) else None,
                "drop_path": drop_path(attn.drop_path),
                **join_parts(block, norm, read_attention(attn), read_mlp(ffn)),
            }
        )
    if found[0] != found[1]:
        raise refuse(block, "attns.1", found[1], "must be as attns.0")
    return found[0]


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


@register_conversion(NaFlexVit)
def read_naflex(model: Any) -> Conversion:
    """Describe timm's NaFlexVit for a batch of images: a ViT whose table has no rows for prefix tokens.

    Its patches are often mapped by a linear layer, whose inputs are in the order (height, width, channels).
    """
    embeds = model.embeds
    for name, expected in (("enable_patch_interpolator", False), ("dynamic_img_pad", False), ("norm_input", None)):
        if getattr(embeds, name) != expected:
            raise refuse(embeds, name, getattr(embeds, name), f"must be {expected}")
    if model.rope is not None:
        raise refuse(model, "rope", model.rope, "must be None")
    if embeds.pos_embed_type not in ("learned", "none"):
        raise refuse(embeds, "pos_embed_type", embeds.pos_embed_type, "must be 'learned' or 'none'")
    for name in ("pos_embed_align_corners", "pos_embed_use_grid_sample"):
        if getattr(embeds, name, False):  # timm before 1.0.31 has no `pos_embed_align_corners`, and antialiases
            raise refuse(embeds, name, True, "must be False")
    patch, prefix = tuple(embeds.patch_size), model.has_class_token
    grid = embeds.pos_embed_grid_size or (16, 16)
    if embeds.pos_embed_ar_preserving and len(set(grid)) > 1:
        raise refuse(embeds, "pos_embed_ar_preserving", True, "must be False with a table that is not square")
    norms = ("norm_pre", "norm", "fc_norm")
    of_norms = {name: norm_text(model, name) is not None for name in norms}
    if of_norms["norm"] and of_norms["fc_norm"]:
        raise refuse(model, "fc_norm", model.fc_norm, "must be Identity if there is a norm before pooling")
    kinds = {Block: pre_norm(Attention), ResPostBlock: post_norm(Attention)}
    trunk = {
        "img_size": tuple(side * step for side, step in zip(grid, patch, strict=True)),
        "patch_size": patch,
        "in_chans": embeds.in_chans,
        "num_classes": model.num_classes,
        "embed_dim": model.embed_dim,
        "class_token": prefix,
        "reg_tokens": model.num_reg_tokens,
        "pre_norm": of_norms["norm_pre"],
        "patch_bias": embeds.proj.bias is not None,
        "patch_norm": norm_text(embeds, "norm"),
        "final_norm": of_norms["norm"] or of_norms["fc_norm"],
        "fc_norm": of_norms["fc_norm"],
        "norm_layer": same_norm(model, norms),
        "drop_rate": rate_of(model, "head_drop"),
        "pos_drop_rate": rate_of(embeds, "pos_drop"),
        "patch_drop_rate": getattr(model.patch_drop, "prob", 0.0),
        **_read_pool(model),
    }
    names = {name: name.removeprefix("embeds.") for name in model.state_dict() if name.startswith("embeds.")}
    names |= {name: f"patch_embed.{own}" for name, own in names.items() if own.startswith(("proj.", "norm."))}
    reshaped: dict[str, tuple[int, ...]] = {"embeds.pos_embed": ()}
    if embeds.is_linear:
        reshaped["embeds.proj.weight"] = (0, 2, 3, 1)
    mode, antialias = embeds.pos_embed_interp_mode, getattr(embeds, "pos_embed_antialias", True)
    cropped = f"crop(mode={mode!r}, antialias={antialias})"
    resampler = cropped if embeds.pos_embed_ar_preserving else f"{mode}(antialias={antialias})"
    options = {"prefix_rows": False, "resampler": resampler} if model.num_prefix_tokens else {"resampler": resampler}
    encoding = "none" if embeds.pos_embed_type == "none" else str(Spec("learnable", options))
    arguments = vit_arguments(model, trunk, read_blocks(model, kinds))
    return Conversion(VisionTransformer, arguments, encoding, names=names, reshaped=reshaped)


def table(model: Any) -> str:
    """Return the encoding of a learned table, with or without rows for prefix tokens."""
    rows = model.pos_embed.shape[1] - model.patch_embed.num_patches
    return "learnable" if rows == model.num_prefix_tokens else "learnable(prefix_rows=False)"


def read_trunk(model: Any) -> dict[str, Any]:
    """Return everything except the blocks and the position as arguments of our ViT."""
    check_kind(model, "patch_embed", PatchEmbed)
    patches = model.patch_embed
    if patches.dynamic_img_pad:
        raise refuse(patches, "dynamic_img_pad", True, "must be False")
    if patches.img_size is None:
        raise refuse(patches, "img_size", None, "must be a size")
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
        "drop_rate": rate_of(model, "head_drop"),
        "pos_drop_rate": rate_of(model, "pos_drop") if hasattr(model, "pos_drop") else 0.0,
        "patch_drop_rate": getattr(getattr(model, "patch_drop", None), "prob", 0.0),
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
