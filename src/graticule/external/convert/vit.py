"""Conversion of timm's `VisionTransformer`: ViT, DeiT, DeiT III, AugReg, CLIP, SigLIP and DINOv2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from timm.layers import Attention, AttentionPoolLatent, LayerScale, Mlp, PatchEmbed
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, ParallelScalingBlock, ParallelThingsBlock, ResPostBlock
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import nn

from graticule.backbones.vision_transformer import DistilledVisionTransformer, VisionTransformer
from graticule.external.convert import parts
from graticule.external.convert.parts import Conversion, check_kind, check_values, norm_text, refuse, same_norm

#: Function that describes a block of timm as arguments of our ViT, with 'drop_path' for its rate of stochastic depth.
Describe = Callable[[Any], dict[str, Any]]


def read_blocks(model: Any, kinds: Mapping[Any, Describe]) -> dict[str, Any]:
    """Return the blocks of a model as arguments of our ViT.

    Args:
        model: the model.
        kinds: the function that describes a block, by the class of the block in timm.
    """
    blocks: list[dict[str, Any]] = []
    for index, block in enumerate(model.blocks):
        check_kind(model, f"blocks.{index}", *kinds)
        blocks.append(kinds[type(block)](block))
    rates = [arguments.pop("drop_path") for arguments in blocks]
    for index, arguments in enumerate(blocks):
        for name, value in arguments.items():
            if value != blocks[0].get(name):
                raise refuse(model, f"blocks.{index}", f"{name}={value!r}", f"must have {name}={blocks[0][name]!r}")
    return {**blocks[0], "depth": len(blocks), "drop_path_rate": read_rates(model, rates)}


def with_norms(layer: str, *attentions: type[nn.Module]) -> Describe:
    """Return the function that describes a block, 'pre_norm' or 'post_norm', whose attention is of these classes."""

    def describe(block: Any) -> dict[str, Any]:
        check_kind(block, "attn", *attentions)
        if parts.drop_path(block.drop_path2) != parts.drop_path(block.drop_path1):
            raise refuse(block, "drop_path2", parts.drop_path(block.drop_path2), "must be that of drop_path1")
        scales = parts.layer_scale(block)
        norm = same_norm(block, ["norm1", "norm2"])
        return {
            "block_layer": layer,
            "init_values": scales if any(scales) else None,
            "drop_path": parts.drop_path(block.drop_path1),
            **join_parts(block, norm, parts.read_attention(block), parts.read_mlp(block)),
        }

    return describe


def join_parts(block: nn.Module, norm: str | None, attn: dict[str, Any], mlp: dict[str, Any]) -> dict[str, Any]:
    """Combine attention and MLP, whose biases, dropout and norms must be the same."""
    for name in ("proj_bias", "proj_drop_rate"):
        if attn[name] != mlp[name]:
            raise refuse(block, f"mlp ({name})", mlp[name], f"must be {attn[name]!r} as that of attention")
    norms = {"qk_norm": attn.pop("qk"), "scale_attn_norm": attn.pop("inner"), "scale_mlp_norm": mlp.pop("norm")}
    for name, text in norms.items():
        if text not in (None, norm):
            raise refuse(block, name, text, f"must be {norm} as the other norms")
    return {**attn, **mlp, "norm_layer": norm, **{name: text is not None for name, text in norms.items()}}


def read_rates(model: nn.Module, rates: list[float]) -> float:
    """Return the rate of stochastic depth of the last block, to which it grows linearly from 0."""
    expected = torch.linspace(0, rates[-1], len(rates), device="cpu").tolist()
    if any(abs(rate - rule) > 1e-6 for rate, rule in zip(rates, expected, strict=True)):
        raise refuse(model, "drop_path", rates, "must grow linearly from 0")
    return rates[-1]


def vit_arguments(model: Any, trunk: dict[str, Any], kinds: Mapping[Any, Describe]) -> dict[str, Any]:
    """Combine the trunk and the blocks, of these kinds, whose norms and activations must be the same."""
    blocks = read_blocks(model, kinds)
    if trunk["norm_layer"] not in (None, blocks["norm_layer"]):
        raise refuse(model, "norm", trunk["norm_layer"], f"must be {blocks['norm_layer']} as those of the blocks")
    act = trunk.pop("pool_act", blocks["act_layer"])
    if act != blocks["act_layer"]:
        raise refuse(model, "attn_pool.mlp.act", act, f"must be {blocks['act_layer']} as that of the blocks")
    return {**trunk, **blocks}


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


def describe_scaling(block: Any) -> dict[str, Any]:
    """Describe a block of ViT-22B."""
    check_values(block, out_proj=None)
    if block.attn_out_proj.bias is None:
        raise refuse(block, "attn_out_proj.bias", None, "must exist")
    if block.mlp_drop.p:
        raise refuse(block, "mlp_drop.p", block.mlp_drop.p, "must be 0")
    norm = same_norm(block, ["in_norm", "q_norm", "k_norm"])
    scaled = isinstance(block.ls, LayerScale)
    return {
        "block_layer": "parallel",
        "init_values": (block.ls.init_values or 1.0,) * 2 if scaled else None,
        "drop_path": parts.drop_path(block.drop_path),
        "num_heads": block.num_heads,
        "mlp_ratio": parts.ratio_of(block.in_split[0], block.in_proj.in_features),
        "qkv_bias": block.in_proj.bias is not None,
        "act_layer": parts.act_text(block, "mlp_act"),
        "attn_drop_rate": parts.rate_of(block, "attn_drop"),
        "norm_layer": norm,
        "qk_norm": not isinstance(block.q_norm, nn.Identity),
    }


def describe_branches(block: Any) -> dict[str, Any]:
    """Describe a block of several attentions and as many MLPs."""
    check_values(block, num_parallel=2)
    branches = []
    for index, (attn, ffn) in enumerate(zip(block.attns, block.ffns, strict=True)):
        check_kind(block, f"attns.{index}.attn", Attention)
        check_kind(block, f"ffns.{index}.mlp", Mlp)
        norm = same_norm(block, [f"attns.{index}.norm", f"ffns.{index}.norm"])
        scales = tuple(parts.initial_scale(branch.ls) for branch in (attn, ffn))
        branches.append(
            {
                "block_layer": "parallel_branches",
                "init_values": scales if any(scales) else None,
                "drop_path": parts.drop_path(attn.drop_path),
                **join_parts(block, norm, parts.read_attention(attn), parts.read_mlp(ffn)),
            }
        )
    if branches[0] != branches[1]:
        raise refuse(block, "attns.1", branches[1], "must be as attns.0")
    return branches[0]


#: The blocks that several classes have.
PLAIN: Mapping[Any, Describe] = {
    Block: with_norms("pre_norm", Attention),
    ResPostBlock: with_norms("post_norm", Attention),
}


@parts.register_conversion(TimmVisionTransformer, VisionTransformerDistilled)
def read_vit(model: Any) -> Conversion:
    """Describe timm's ViT, or its distilled form."""
    kinds = {**PLAIN, ParallelScalingBlock: describe_scaling, ParallelThingsBlock: describe_branches}
    arguments = vit_arguments(model, read_trunk(model), kinds)
    names = {
        f"blocks.{layer}.{there}": tuple(f"blocks.{layer}.{name}" for name in here)
        for layer in range(arguments["depth"] if arguments["block_layer"] == "parallel" else 0)
        for there, here in SCALING_NAMES.items()
    }
    distilled = isinstance(model, VisionTransformerDistilled)
    if distilled:
        del arguments["global_pool"], arguments["class_token"]
    backbone = DistilledVisionTransformer if distilled else VisionTransformer
    return Conversion(backbone, arguments, parts.sum_of(table(model)), names=names)


def table(model: Any) -> str | None:
    """Return the encoding of a learned table, with or without rows for prefix tokens; None if there is none."""
    if model.pos_embed is None:
        return None
    rows = model.pos_embed.shape[1] - model.patch_embed.num_patches
    return "learnable" if rows == model.num_prefix_tokens else "learnable(prefix_rows=False)"


def read_trunk(model: Any) -> dict[str, Any]:
    """Return everything except the blocks and the position as arguments of our ViT."""
    check_kind(model, "patch_embed", PatchEmbed)
    patches = model.patch_embed
    check_values(patches, dynamic_img_pad=False)
    if patches.img_size is None:
        raise refuse(patches, "img_size", None, "must be a size")
    registers = getattr(model, "reg_token", None)
    return {
        **parts.trunk_arguments(model, patches),
        "class_token": model.cls_token is not None,
        "reg_tokens": 0 if registers is None else registers.shape[1],
        **read_ends(model, patches),
    }


def read_ends(model: Any, patches: nn.Module) -> dict[str, Any]:
    """Return norms, rates and pooling before and after the blocks as arguments of our ViT."""
    norms = {name: norm_text(model, name) for name in ("norm_pre", "norm", "fc_norm") if hasattr(model, name)}
    if norms["norm"] and norms["fc_norm"]:
        raise refuse(model, "fc_norm", model.fc_norm, "must be Identity if there is a norm before pooling")
    dropouts = [owner for owner in (model, patches) if hasattr(owner, "pos_drop")]
    return {
        "pre_norm": norms.get("norm_pre") is not None,
        "patch_norm": norm_text(patches, "norm"),
        "final_norm": (norms["norm"] or norms["fc_norm"]) is not None,
        "fc_norm": norms["fc_norm"] is not None,
        "norm_layer": same_norm(model, norms),
        "drop_rate": parts.rate_of(model, "head_drop"),
        "pos_drop_rate": parts.rate_of(dropouts[0], "pos_drop") if dropouts else 0.0,
        "patch_drop_rate": getattr(getattr(model, "patch_drop", None), "prob", 0.0),
        **_read_pool(model),
    }


def _read_pool(model: nn.Module) -> dict[str, Any]:
    """Return the arguments for the pooling of tokens."""
    include_prefix = getattr(model, "pool_include_prefix", False)
    arguments = {"global_pool": model.global_pool, "pool_include_prefix": include_prefix}
    pool = getattr(model, "attn_pool", None)
    if pool is None:
        return arguments
    check_kind(model, "attn_pool", AttentionPoolLatent)
    if pool.mlp is None or pool.pos_embed is not None or pool.latent_len != 1 or pool.pool != "token":
        raise refuse(model, "attn_pool", pool, "must be one query with an MLP and no position")
    if any(norm_text(pool, name) is not None for name in ("q_norm", "k_norm")):
        raise refuse(pool, "q_norm", pool.q_norm, "must be Identity")
    same_norm(model, ["norm", "norm_pre", "attn_pool.norm"])
    return {
        **arguments,
        "pool_num_heads": pool.num_heads,
        "pool_mlp_ratio": parts.ratio_of(pool.mlp.fc1.out_features, pool.mlp.fc1.in_features),
        "pool_act": parts.act_text(pool.mlp, "act"),
    }
