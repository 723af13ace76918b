"""Conversion of timm's further models of one grid: BEiT, vit_relpos, EVA, Segment Anything, ConViT and MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from timm.layers import (
    AttentionRope,
    GatedMlp,
    RelPosBias,
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
)
from timm.models import beit, vision_transformer_sam
from timm.models.beit import Beit
from timm.models.convit import ConVit
from timm.models.eva import Eva, EvaBlock, EvaBlockPostNorm
from timm.models.mlp_mixer import MlpMixer, ResBlock, SpatialGatingBlock
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from timm.models.vision_transformer_relpos import RelPosBlock, ResPostRelPosBlock, VisionTransformerRelPos
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn

from graticule import backbones
from graticule.backbones.sam import SamVisionTransformer
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.external.convert import parts
from graticule.external.convert.parts import Conversion, has, refuse, sum_of
from graticule.external.convert.vit import PLAIN, read_ends, read_trunk, table, vit_arguments, with_norms
from graticule.registry.specs import Spec

#: Resampler that timm uses for tables at other sizes: linear between knots in a geometric series.
RESAMPLER = "geometric(mode='linear')"


@parts.register_conversion(Beit)
def read_beit(model: Any) -> Conversion:
    """Describe timm's BEiT: a table for each layer, one for all, or both, with rows for the class token."""
    arguments, source = vit_arguments(model, read_trunk(model), {beit.Block: with_norms("pre_norm")})
    has_table, has_shared = (
        model.blocks[0].attn.relative_position_bias_table is not None,
        model.rel_pos_bias is not None,
    )
    build_source = parts.build_of_class(
        model,
        source,
        use_abs_pos_emb=model.pos_embed is not None,
        use_rel_pos_bias=has_table,
        use_shared_rel_pos_bias=has_shared,
        use_fc_norm=arguments["fc_norm"],
        **_source_of_gates(model, arguments),
    )
    options = {"prefix_rows": True, "resampler": RESAMPLER}
    biases = {"relative_bias": has_table, "shared_relative_bias": has_shared}
    encoding = sum_of(table(model), *(Spec(name, options) for name, has_bias in biases.items() if has_bias))
    return Conversion(VisionTransformer, arguments, encoding, build_source)


def _source_of_gates(model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of EVA and BEiT for their MLPs."""
    return {
        "swiglu_mlp": arguments["mlp_layer"] != "mlp",
        "swiglu_align_to": int(arguments["mlp_layer"] == "swiglu"),  # 0 would pack the gate
        "scale_mlp": arguments["scale_mlp_norm"],
        "mlp_ratio": arguments["mlp_ratio"],
    }


@parts.register_conversion(VisionTransformerRelPos)
def read_relpos(model: Any) -> Conversion:
    """Describe timm's `vit_relpos`: a bias for each layer, or one for all, from a table or a small network."""
    kinds = {RelPosBlock: with_norms("pre_norm"), ResPostRelPosBlock: with_norms("post_norm")}
    arguments, source = vit_arguments(model, read_trunk(model), kinds)
    shared = model.shared_rel_pos is not None
    bias = model.shared_rel_pos if shared else model.blocks[0].attn.rel_pos
    spec = _read_bias(bias)
    kind = {"relative_bias": "bias", "mlp_bias": "mlp", "continuous_bias": "mlp-swin"}[spec.name]
    if shared and kind == "mlp-swin":
        raise refuse(model.shared_rel_pos, "mode", bias.mode, "must be 'cr' if shared")
    hidden = spec.options.get("hidden")
    build_source = parts.build_of_class(model, source, rel_pos_type=kind, rel_pos_dim=hidden, shared_rel_pos=shared)
    return Conversion(VisionTransformer, arguments, f"shared_{spec}" if shared else str(spec), build_source)


def _read_bias(bias: Any) -> Spec:
    if isinstance(bias, RelPosBias):
        rows = {"prefix_rows": True} if bias.prefix_tokens else {}
        return Spec("relative_bias", {**rows, "resampler": RESAMPLER})
    options = {"hidden": bias.mlp.fc1.out_features, "drop_rate": bias.mlp.drop1.p}
    return Spec("mlp_bias" if bias.mode == "cr" else "continuous_bias", options)


_EVA = {EvaBlock: with_norms("pre_norm"), EvaBlockPostNorm: with_norms("post_norm")}


@parts.register_conversion(Eva)
def read_eva(model: Any) -> Conversion:
    """Describe timm's `Eva`."""
    arguments, source = vit_arguments(model, read_trunk(model), _EVA)
    build_source = parts.build_of_class(
        model,
        source,
        num_reg_tokens=arguments["reg_tokens"],
        use_abs_pos_emb=model.pos_embed is not None,
        use_rot_pos_emb=model.rope is not None,
        ref_feat_shape=getattr(model.rope, "ref_feat_shape", None),
        use_post_norm=arguments["block_layer"] == "post_norm",
        use_pre_transformer_norm=arguments["pre_norm"],
        use_post_transformer_norm=has(model, "norm"),
        use_fc_norm=arguments["fc_norm"],
        **_source_of_eva(model, arguments),
    )
    arguments["pool_include_prefix"] = model.attn_pool is not None  # it pools all tokens
    encoding = sum_of(table(model), model.rope and read_rotary(model))
    return Conversion(VisionTransformer, arguments, encoding, build_source)


def _source_of_eva(model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of EVA, and of NaFlexVit with its blocks, for attention, MLPs, pooling and rotations."""
    attn, rope = model.blocks[0].attn, model.rope
    kinds = {RotaryEmbeddingMixed: "mixed", RotaryEmbeddingDinoV3: "dinov3"}
    cat = "axial" if isinstance(model, NaFlexVit) else "cat"
    names = ("grid_offset", "grid_indexing", "temperature", "shift_coords", "jitter_coords", "rescale_coords")
    return {
        **_source_of_gates(model, arguments),
        "attn_type": "rope" if isinstance(attn, AttentionRope) else "eva",
        "qkv_fused": attn.qkv is not None,
        "scale_attn_inner": arguments["scale_attn_norm"],
        "attn_only_layer_scale": arguments["init_values"] is not None and not arguments["init_values"][1],
        "attn_pool_num_heads": arguments.get("pool_num_heads"),
        "attn_pool_mlp_ratio": arguments.get("pool_mlp_ratio"),
        "rope_rotate_half": bool(getattr(attn, "rotate_half", False)),
        **({} if rope is None else {"rope_type": kinds.get(type(rope), cat)}),
        **{f"rope_{name}": getattr(rope, name) for name in names if hasattr(rope, name)},
    }


@parts.register_conversion(NaFlexVit)
def read_naflex(model: Any) -> Conversion:
    """Describe timm's NaFlexVit for a batch of images: a ViT, or EVA with rotations, without rows for prefix tokens.

    Its patches are often mapped by a linear layer, whose inputs are in the order (height, width, channels).
    """
    embeds = model.embeds
    if embeds.pos_embed_type not in ("learned", "none"):
        raise refuse(embeds, "pos_embed_type", embeds.pos_embed_type, "must be 'learned' or 'none'")
    patch, grid = tuple(embeds.patch_size), embeds.pos_embed_grid_size or (16, 16)
    if embeds.pos_embed_ar_preserving and len(set(grid)) > 1:
        raise refuse(embeds, "pos_embed_ar_preserving", True, "must be False with a table that is not square")
    size = tuple(side * step for side, step in zip(grid, patch, strict=True))
    trunk = {
        **{"img_size": size, "patch_size": patch, "in_chans": embeds.in_chans},
        **{"num_classes": model.num_classes, "embed_dim": model.embed_dim},
        **{"class_token": model.has_class_token, "reg_tokens": model.num_reg_tokens},
        "patch_bias": embeds.proj.bias is not None,
        **read_ends(model, embeds),
    }
    names = {name: name.removeprefix("embeds.") for name in model.state_dict() if name.startswith("embeds.")}
    names |= {there: f"patch_embed.{name}" for there, name in names.items() if name.startswith(("proj.", "norm."))}
    prefix = {"prefix_rows": False} if model.num_prefix_tokens else {}
    options = {**prefix, "resampler": naflex_resampler(embeds)}
    tables = embeds.pos_embed_type == "learned" and Spec("learnable", options)
    encoding = sum_of(tables, model.rope and read_rotary(model))
    arguments, source = vit_arguments(model, trunk, {**PLAIN, **_EVA})
    is_eva = isinstance(model.blocks[0], EvaBlock)
    others = {
        **_source_of_eva(model, arguments),
        "scale_attn_inner_norm": arguments["scale_attn_norm"],
        "rope_ref_feat_shape": getattr(model.rope, "ref_feat_shape", None),
    }
    build: Any = parts.build_of_class(
        model,
        source,
        {"block_fn": None, **others} if is_eva else {},
        {name: getattr(embeds, name) for name in _NAFLEX if hasattr(embeds, name)},
        signature=NaFlexVitCfg,
        pos_embed=embeds.pos_embed_type,
        embed_proj_type="linear" if isinstance(embeds.proj, nn.Linear) else "conv",
        embed_norm_layer=parts.factory_of(embeds.norm) if has(embeds, "norm") else None,
        attn_pool_num_heads=arguments.get("pool_num_heads"),
        attn_pool_mlp_ratio=arguments.get("pool_mlp_ratio"),
    )
    build_source = partial(build, in_chans=embeds.in_chans, num_classes=model.num_classes)
    return Conversion(VisionTransformer, arguments, encoding, build_source, names)


#: Settings of the embedding of a NaFlexVit that are read.
_NAFLEX = ("pos_embed_grid_size", "pos_embed_interp_mode", "pos_embed_ar_preserving", "pos_embed_antialias")


def naflex_resampler(embeds: Any) -> str:
    """Return the resampler of the table of a NaFlexVit."""
    mode, options = embeds.pos_embed_interp_mode, f"antialias={getattr(embeds, 'pos_embed_antialias', True)}"
    return f"crop(mode={mode!r}, {options})" if embeds.pos_embed_ar_preserving else f"{mode}({options})"


def read_rotary(model: Any) -> Spec:
    """Return the rotary encoding of a model of timm."""
    rope = model.rope
    half = bool(getattr(model.blocks[0].attn, "rotate_half", False))
    noise = {
        name: getattr(rope, f"{name}_coords")
        for name in ("shift", "jitter", "rescale")
        if getattr(rope, f"{name}_coords", None) is not None
    }
    if type(rope) is RotaryEmbeddingMixed:
        if half or rope.grid_indexing != "xy":
            raise refuse(rope, "grid_indexing", rope.grid_indexing, "must be 'xy', with neighboring channels as pairs,")
        return Spec("rope_mixed", {"base": float(rope.temperature), **noise})
    if type(rope) not in (RotaryEmbeddingCat, RotaryEmbeddingDinoV3):
        raise refuse(model, "rope", rope, "must be RotaryEmbeddingCat, RotaryEmbeddingMixed or RotaryEmbeddingDinoV3")
    if rope.grid_indexing not in ("ij", "xy"):
        raise refuse(rope, "grid_indexing", rope.grid_indexing, "must be 'ij' or 'xy'")
    options: dict[str, Any] = {"base": float(rope.temperature)}
    if type(rope) is RotaryEmbeddingDinoV3:
        options |= {"turns": True, "coordinates": rope.normalize_coords}
    elif rope.ref_feat_shape is not None:
        options |= {"scaling": "interpolation", "reference": tuple(rope.ref_feat_shape)}
    if half:
        options["layout"] = "half"
    if rope.grid_indexing == "xy":
        options["order"] = "xy"
    if rope.grid_offset:
        options["offset"] = float(rope.grid_offset)
    return Spec("rope", {**options, **noise})


@parts.register_conversion(VisionTransformerSAM)
def read_sam(model: Any) -> Conversion:
    """Describe timm's encoder of Segment Anything."""
    windows = {block.window_size for block in model.blocks} - {0}
    patches = model.patch_embed
    trunk = {
        **parts.trunk_arguments(model, patches),
        "global_pool": model.head.global_pool.pool_type,
        "pre_norm": has(model, "norm_pre"),
        "drop_rate": parts.rate_of(model, "head.drop"),
        "pos_drop_rate": parts.rate_of(model, "pos_drop"),
        "window_size": next(iter(windows), 1),
        "global_layers": tuple(layer for layer, block in enumerate(model.blocks) if not block.window_size),
        "neck_dim": model.neck[0].out_channels if isinstance(model.neck, nn.Sequential) else None,
    }
    arguments, source = vit_arguments(model, trunk, {vision_transformer_sam.Block: with_norms("pre_norm")})
    relative = model.blocks[0].attn.use_rel_pos
    build_source = parts.build_of_class(
        model,
        source,
        use_abs_pos=model.pos_embed is not None,
        use_rel_pos=relative,
        global_attn_indexes=arguments["global_layers"],
        neck_chans=arguments["neck_dim"],
    )
    encoding = sum_of(model.pos_embed is not None and "learnable", relative and "decomposed")
    return Conversion(SamVisionTransformer, arguments, encoding, build_source)


@parts.register_conversion(MlpMixer)
def read_mixer(model: Any) -> Conversion:
    """Describe timm's MLP-Mixer, ResMLP or gMLP, by the class of its blocks.

    Dropout within the mixing of tokens has no counterpart, so only gMLP may have a `proj_drop_rate`.
    """
    block = model.blocks[0]
    arguments: dict[str, Any] = {
        **parts.trunk_arguments(model, model.stem),
        "global_pool": model.global_pool,
        "num_blocks": len(model.blocks),
        "mlp_ratio": parts.ratio_of(block.mlp_channels.fc1.out_features, model.embed_dim),
        "groups": 1,
        "drop_rate": parts.rate_of(model, "head_drop"),
        "drop_path_rate": parts.drop_path(block.drop_path),
        "norm_layer": None if isinstance(block, ResBlock) else parts.norm_text(model, "norm"),
    }
    source = {"block_layer": type(block), "norm_layer": parts.factory_of(model.norm)}
    if isinstance(block, SpatialGatingBlock):
        arguments |= {"stem_norm": has(model.stem, "norm"), "gate_norm": True}
        arguments["proj_drop_rate"] = parts.rate_of(block.mlp_channels, "drop1")
        build_source = parts.build_of_class(model, arguments, source, mlp_layer=GatedMlp)
        return Conversion(backbones.GMlp, arguments, "sgu", build_source)
    if isinstance(block, ResBlock):
        build_source = parts.build_of_class(model, arguments, source)
        return Conversion(backbones.ResMlp, {**arguments, "layer_scale": 1.0}, "sgu", build_source)
    ratio = parts.ratio_of(block.mlp_tokens.fc1.out_features, model.embed_dim)
    build_source = parts.build_of_class(model, arguments, source, {"mlp_ratio": (ratio, arguments["mlp_ratio"])})
    return Conversion(backbones.Mixer, arguments, f"token_mlp(ratio={ratio!r})", build_source)


@parts.register_conversion(ConVit)
def read_convit(model: Any) -> Conversion:
    """Describe timm's ConViT; its class token joins after the layers with gates."""
    gated = min(model.local_up_to_layer, len(model.blocks))
    first = model.blocks[0]
    projection = first.attn.qk if gated else first.attn.qkv
    arguments = {
        **parts.trunk_arguments(model, model.patch_embed),
        "global_pool": model.global_pool,
        "depth": len(model.blocks),
        "num_heads": first.attn.num_heads,
        "mlp_ratio": parts.ratio_of(first.mlp.fc1.out_features, model.embed_dim),
        "qkv_bias": projection.bias is not None,
        "drop_rate": parts.rate_of(model, "head_drop"),
        "pos_drop_rate": parts.rate_of(model, "pos_drop"),
        "proj_drop_rate": parts.rate_of(first.attn, "proj_drop"),
        "attn_drop_rate": parts.rate_of(first.attn, "attn_drop"),
        "drop_path_rate": parts.drop_path(model.blocks[-1].drop_path),
        "norm_layer": parts.norm_text(model, "norm"),
    }
    names = ("local_up_to_layer", "locality_strength", "use_pos_embed")
    build = parts.build_of_class(
        model,
        arguments,
        embed_dim=model.embed_dim // first.attn.num_heads,
        norm_layer=parts.factory_of(model.norm),
        **{name: getattr(model, name) for name in names},
    )

    def build_source() -> Any:
        built: Any = build()
        for block, other in zip(model.blocks[:gated], built.blocks, strict=False):
            if block.attn.rel_indices.shape != other.attn.rel_indices.shape:  # computed in the first pass
                other.attn.rel_indices = other.attn.get_rel_indices(model.num_patches)
        return built

    encoding = sum_of(model.use_pos_embed and "learnable", gated and f"gpsa(layers={gated}, bias=True)")
    return Conversion(backbones.ConVit, arguments, encoding, build_source)
