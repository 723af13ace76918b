"""Conversion of timm's pyramids: Swin V1 and V2, and Twins."""

from __future__ import annotations

from typing import Any

from timm.layers import PatchEmbed
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.twins import GlobalSubSampleAttn, LocallyGroupedAttn, Twins

from graticule import backbones
from graticule.external.convert import parts
from graticule.external.convert.parts import Conversion, check_kind, ratio_of, refuse
from graticule.external.convert.plain import RESAMPLER
from graticule.registry.specs import Spec


@parts.register_conversion(SwinTransformer, SwinTransformerV2)
def read_swin(model: Any) -> Conversion:
    """Describe timm's Swin, or Swin V2.

    Windows are the present ones of the model, so a model that `set_input_size` changed is converted as it is.
    """
    second = isinstance(model, SwinTransformerV2)
    check_kind(model, "patch_embed", PatchEmbed)
    stages = list(model.layers)
    first = [stage.blocks[0] for stage in stages]
    height, width = model.patch_embed.patch_size
    if height != width:
        raise refuse(model, "patch_embed.patch_size", (height, width), "must be a square")
    dim = model.patch_embed.proj.out_channels
    for index, block in enumerate(first):
        if block.dim != dim << index:
            raise refuse(model, f"layers.{index}.blocks.0.dim", block.dim, f"must be {dim << index}")
        if block.attn.qkv.out_features != 3 * block.dim:
            width = block.attn.qkv.out_features // 3
            raise refuse(
                model, f"layers.{index}.blocks.0.attn.qkv", width, f"must have {block.dim} channels of queries"
            )
        _check_shifts(model, index)
    parts.check_gelu(model)
    attentions = [block.attn for block in first]
    arguments = {
        "img_size": tuple(model.patch_embed.img_size),
        "patch_size": height,
        "in_chans": model.patch_embed.proj.in_channels,
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "embed_dim": dim,
        "depths": tuple(len(stage.blocks) for stage in stages),
        "num_heads": tuple(attn.num_heads for attn in attentions),
        "window_size": tuple(tuple(block.window_size) for block in first),
        "mlp_ratio": ratio_of(first[0].mlp.fc1.out_features, dim),
        "qkv_bias": (attentions[0].q_bias if second else attentions[0].qkv.bias) is not None,
        "norm_layer": parts.layer_norm_text(model),
    }
    if not second:
        return Conversion(backbones.SwinTransformer, arguments, str(Spec("relative_bias", {"resampler": RESAMPLER})))
    arguments["pretrained_window_sizes"] = tuple(
        tuple(attn.pretrained_window_size if any(attn.pretrained_window_size) else attn.window_size)
        for attn in attentions
    )
    return Conversion(backbones.SwinTransformerV2, arguments, "continuous_bias")


def _check_shifts(model: Any, stage: int) -> None:
    """Check that every second block shifts its windows by half, along axes of several windows."""
    for index, block in enumerate(model.layers[stage].blocks):
        expected = tuple(
            step // 2 if index % 2 and side > step else 0
            for side, step in zip(block.input_resolution, block.window_size, strict=True)
        )
        if tuple(block.shift_size) != expected:
            name = f"layers.{stage}.blocks.{index}.shift_size"
            raise refuse(model, name, tuple(block.shift_size), f"must be {expected}")


@parts.register_conversion(Twins)
def read_twins(model: Any) -> Conversion:
    """Describe timm's Twins: PCPVT is PVT with PEGs and global average pooling."""
    stages = list(model.blocks)
    windows = {block.attn.ws for blocks in stages for block in blocks if isinstance(block.attn, LocallyGroupedAttn)}
    for stage, blocks in enumerate(stages):
        for index, _ in enumerate(blocks):
            local = bool(windows) and not index % 2
            check_kind(model, f"blocks.{stage}.{index}.attn", LocallyGroupedAttn if local else GlobalSubSampleAttn)
    if len(windows) > 1:
        raise refuse(model, "blocks.0.0.attn.ws", tuple(sorted(windows)), "must be the same in all stages")
    parts.check_gelu(model)
    fixed = [
        name for name, _ in model.named_modules() if name.endswith(".attn.norm") or name.startswith("patch_embeds.")
    ]
    arguments = {
        "img_size": tuple(model.patch_embeds[0].img_size),
        "patch_size": model.patch_embeds[0].patch_size[0],
        "in_chans": model.patch_embeds[0].proj.in_channels,
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "embed_dims": tuple(model.embed_dims),
        "depths": tuple(model.depths),
        "num_heads": tuple(blocks[0].attn.num_heads for blocks in stages),
        "mlp_ratios": tuple(
            ratio_of(blocks[0].mlp.fc1.out_features, dim) for blocks, dim in zip(stages, model.embed_dims, strict=True)
        ),
        "sr_ratios": tuple(  # 1 if no block reduces its keys
            next((block.attn.sr_ratio for block in blocks if isinstance(block.attn, GlobalSubSampleAttn)), 1)
            for blocks in stages
        ),
        "norm_layer": parts.layer_norm_text(model, fixed),
    }
    if not windows:
        return Conversion(backbones.PyramidVisionTransformer, arguments, "peg")
    return Conversion(backbones.TwinsSvt, {**arguments, "window_size": windows.pop()}, "peg")
