"""Conversion of timm's pyramids: Swin V1 and V2, and Twins."""

from __future__ import annotations

from typing import Any

from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.twins import GlobalSubSampleAttn, LocallyGroupedAttn, Twins

from graticule import backbones
from graticule.external.convert import parts
from graticule.external.convert.parts import Conversion, ratio_of, refuse
from graticule.external.convert.plain import RESAMPLER
from graticule.registry.specs import Spec


@parts.register_conversion(SwinTransformer, SwinTransformerV2)
def read_swin(model: Any) -> Conversion:
    """Describe timm's Swin, or Swin V2.

    Windows are the present ones of the model, so a model that `set_input_size` changed is converted as it is.
    """
    second = isinstance(model, SwinTransformerV2)
    first = [stage.blocks[0] for stage in model.layers]
    attentions = [block.attn for block in first]
    height, width = model.patch_embed.patch_size
    if height != width:
        raise refuse(model, "patch_embed.patch_size", (height, width), "must be a square")
    arguments = {
        "img_size": tuple(model.patch_embed.img_size),
        "patch_size": height,
        "in_chans": model.patch_embed.proj.in_channels,
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
        "depths": tuple(len(stage.blocks) for stage in model.layers),
        "num_heads": tuple(attn.num_heads for attn in attentions),
        "window_size": tuple(tuple(block.window_size) for block in first),
        "mlp_ratio": ratio_of(first[0].mlp.fc1.out_features, first[0].dim),
        "qkv_bias": (attentions[0].q_bias if second else attentions[0].qkv.bias) is not None,
        "drop_rate": parts.rate_of(model, "head.drop"),
        "proj_drop_rate": parts.rate_of(attentions[0], "proj_drop"),
        "attn_drop_rate": parts.rate_of(attentions[0], "attn_drop"),
        "drop_path_rate": parts.drop_path(model.layers[-1].blocks[-1].drop_path1),
        "norm_layer": parts.norm_text(model, "norm"),
    }
    source = {
        "norm_layer": parts.factory_of(model.norm),
        # timm before 1.0.31 has one window for all stages, and makes it smaller in small ones
        "window_size": arguments["window_size"] if hasattr(model, "_ref_window_sizes") else first[0].window_size,
        "strict_img_size": model.patch_embed.strict_img_size,
    }
    if not second:
        encoding = str(Spec("relative_bias", {"resampler": RESAMPLER}))
        return Conversion(
            backbones.SwinTransformer, arguments, encoding, parts.build_of_class(model, arguments, source)
        )
    source["pretrained_window_sizes"] = tuple(attn.pretrained_window_size for attn in attentions)
    build_source = parts.build_of_class(model, arguments, source)
    arguments["pretrained_window_sizes"] = tuple(
        tuple(attn.pretrained_window_size if any(attn.pretrained_window_size) else attn.window_size)
        for attn in attentions
    )
    return Conversion(backbones.SwinTransformerV2, arguments, "continuous_bias", build_source)


@parts.register_conversion(Twins)
def read_twins(model: Any) -> Conversion:
    """Describe timm's Twins: PCPVT is PVT with PEGs and global average pooling."""
    stages = list(model.blocks)
    windows = {block.attn.ws for blocks in stages for block in blocks if isinstance(block.attn, LocallyGroupedAttn)}
    if len(windows) > 1:
        raise refuse(model, "blocks.0.0.attn.ws", tuple(sorted(windows)), "must be the same in all stages")
    first = stages[0][0]
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
        "drop_rate": parts.rate_of(model, "head_drop"),
        "pos_drop_rate": parts.rate_of(model, "pos_drops.0"),
        "proj_drop_rate": parts.rate_of(first.attn, "proj_drop"),
        "attn_drop_rate": parts.rate_of(first.attn, "attn_drop"),
        "drop_path_rate": parts.drop_path(stages[-1][-1].drop_path1),
        "norm_layer": parts.norm_text(model, "norm"),
    }
    build_source = parts.build_of_class(
        model,
        arguments,
        norm_layer=parts.factory_of(model.norm),
        wss=tuple(windows) * len(stages) or None,
        **{name: getattr(model, name) for name in ("embed_dims", "depths")},  # which it keeps
    )
    if not windows:
        return Conversion(backbones.PyramidVisionTransformer, arguments, "peg", build_source)
    return Conversion(backbones.TwinsSvt, {**arguments, "window_size": windows.pop()}, "peg", build_source)
