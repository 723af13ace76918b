"""Conversion of the parallel blocks of timm's ViT: attention parallel to an MLP (ViT-22B), and several of each."""

from __future__ import annotations

from typing import Any

from timm.layers import Attention, LayerScale, Mlp
from torch import nn

from graticule.surgery.convert.blocks import join_parts
from graticule.surgery.convert.conversion import check_kind, refuse
from graticule.surgery.convert.parts import (
    act_text,
    drop_path,
    ratio_of,
    read_attention,
    read_mlp,
    same_norm,
)

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
    """Describe a block of ViT-22B.

    Raises:
        ValueError: if its output projections are fused, without biases, or followed by dropout.
    """
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
        "attn_drop_rate": block.attn_drop.p,
        "norm_layer": norm,
        "qk_norm": not isinstance(block.q_norm, nn.Identity),
    }


def describe_branches(block: Any) -> dict[str, Any]:
    """Describe a block of several attentions and as many MLPs.

    Raises:
        ValueError: if there are not two of each, or they differ.
    """
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
