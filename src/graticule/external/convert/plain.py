"""Conversion of timm's further models of one grid: BEiT, vit_relpos, EVA, Segment Anything, ConViT and MLPs."""

from __future__ import annotations

from typing import Any

from timm.layers import (
    AttentionRope,
    ClassifierHead,
    GatedMlp,
    LayerNorm2d,
    Mlp,
    PatchEmbed,
    RelPosBias,
    RelPosMlp,
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
)
from timm.models import beit, vision_transformer_sam
from timm.models.beit import Beit
from timm.models.convit import GPSA, MHSA, ConVit
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.mlp_mixer import Affine, MixerBlock, MlpMixer, ResBlock, SpatialGatingBlock, SpatialGatingUnit
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer_relpos import (
    RelPosAttention,
    RelPosBlock,
    ResPostRelPosBlock,
    VisionTransformerRelPos,
)
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn

from graticule import backbones
from graticule.backbones.sam import SamVisionTransformer
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.external.convert import parts
from graticule.external.convert.parts import Conversion, check_kind, check_values, refuse, sum_of
from graticule.external.convert.vit import PLAIN, read_ends, read_trunk, table, vit_arguments, with_norms
from graticule.registry.specs import Spec

#: Resampler that timm uses for tables at other sizes: linear between knots in a geometric series.
RESAMPLER = "geometric(mode='linear')"


@parts.register_conversion(Beit)
def read_beit(model: Any) -> Conversion:
    """Describe timm's BEiT: a table for each layer, one for all, or both, with rows for the class token."""
    kinds = {beit.Block: with_norms("pre_norm", beit.Attention)}
    arguments = vit_arguments(model, read_trunk(model), kinds)
    tables = [block.attn.relative_position_bias_table is not None for block in model.blocks]
    if any(tables) and not all(tables):
        raise refuse(model, "blocks", tables, "must all have a table, or none,")
    options = {"prefix_rows": True, "resampler": RESAMPLER}
    biases = {"relative_bias": all(tables), "shared_relative_bias": model.rel_pos_bias is not None}
    encoding = sum_of(table(model), *(Spec(name, options) for name, has_bias in biases.items() if has_bias))
    return Conversion(VisionTransformer, arguments, encoding)


@parts.register_conversion(VisionTransformerRelPos)
def read_relpos(model: Any) -> Conversion:
    """Describe timm's `vit_relpos`: a bias for each layer, or one for all, from a table or a small network.

    The network's dropout in training is omitted.
    """
    kinds = {
        RelPosBlock: with_norms("pre_norm", RelPosAttention),
        ResPostRelPosBlock: with_norms("post_norm", RelPosAttention),
    }
    arguments = vit_arguments(model, read_trunk(model), kinds)
    if model.shared_rel_pos is not None:
        check_kind(model, "shared_rel_pos", RelPosMlp, RelPosBias)
        if any(block.attn.rel_pos is not None for block in model.blocks):
            raise refuse(model, "blocks", "biases per layer", "must have none in addition to a shared bias")
        if getattr(model.shared_rel_pos, "mode", "cr") != "cr":
            raise refuse(model.shared_rel_pos, "mode", model.shared_rel_pos.mode, "must be 'cr' if shared")
        return Conversion(VisionTransformer, arguments, f"shared_{_read_bias(model.shared_rel_pos)}")
    specs = []
    for index, block in enumerate(model.blocks):
        check_kind(model, f"blocks.{index}.attn.rel_pos", RelPosMlp, RelPosBias)
        specs.append(_read_bias(block.attn.rel_pos))
    if len(set(specs)) > 1:
        raise refuse(model, "blocks", [str(spec) for spec in specs], "must have the same kind of bias")
    return Conversion(VisionTransformer, arguments, str(specs[0]))


def _read_bias(bias: Any) -> Spec:
    """Return the encoding of a bias module of timm."""
    if isinstance(bias, RelPosBias):
        rows = {"prefix_rows": True} if bias.prefix_tokens else {}
        return Spec("relative_bias", {**rows, "resampler": RESAMPLER})
    hidden = bias.mlp.fc1.out_features
    if bias.mode == "cr":
        return Spec("mlp_bias", {"hidden": hidden})
    check_values(bias, pretrained_window_size=(0, 0))
    return Spec("continuous_bias", {"hidden": hidden})


_EVA = {
    EvaBlock: with_norms("pre_norm", EvaAttention, AttentionRope),
    EvaBlockPostNorm: with_norms("post_norm", EvaAttention, AttentionRope),
}


@parts.register_conversion(Eva)
def read_eva(model: Any) -> Conversion:
    """Describe timm's `Eva`."""
    arguments = vit_arguments(model, read_trunk(model), _EVA)
    arguments["pool_include_prefix"] = model.attn_pool is not None  # it pools all tokens
    return Conversion(VisionTransformer, arguments, sum_of(table(model), model.rope and read_rotary(model)))


@parts.register_conversion(NaFlexVit)
def read_naflex(model: Any) -> Conversion:
    """Describe timm's NaFlexVit for a batch of images: a ViT, or EVA with rotations, without rows for prefix tokens.

    Its patches are often mapped by a linear layer, whose inputs are in the order (height, width, channels).
    """
    embeds = model.embeds
    check_values(embeds, enable_patch_interpolator=False, dynamic_img_pad=False, norm_input=None)
    if embeds.pos_embed_type not in ("learned", "none"):
        raise refuse(embeds, "pos_embed_type", embeds.pos_embed_type, "must be 'learned' or 'none'")
    # timm before 1.0.31 has no `pos_embed_align_corners`, and antialiases
    check_values(embeds, pos_embed_align_corners=False, pos_embed_use_grid_sample=False)
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
    arguments = vit_arguments(model, trunk, {**PLAIN, **_EVA})
    return Conversion(VisionTransformer, arguments, encoding, names=names)


def naflex_resampler(embeds: Any) -> str:
    """Return the resampler of the table of a NaFlexVit."""
    mode, options = embeds.pos_embed_interp_mode, f"antialias={getattr(embeds, 'pos_embed_antialias', True)}"
    return f"crop(mode={mode!r}, {options})" if embeds.pos_embed_ar_preserving else f"{mode}({options})"


def read_rotary(model: Any) -> Spec:
    """Return the rotary encoding of a model of timm."""
    rope = model.rope
    half = bool(getattr(model.blocks[0].attn, "rotate_half", False))
    for block in model.blocks:
        check_values(block.attn, num_prefix_tokens=model.num_prefix_tokens)
        if bool(getattr(block.attn, "rotate_half", False)) != half:
            raise refuse(block.attn, "rotate_half", not half, "must be as in the first block")
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
    if getattr(rope, "rotate_half", half) != half:
        raise refuse(rope, "rotate_half", rope.rotate_half, f"must be {half} as in attention")
    options = _read_dinov3(rope) if type(rope) is RotaryEmbeddingDinoV3 else _read_axial(rope)
    if half:
        options["layout"] = "half"
    if rope.grid_indexing == "xy":
        options["order"] = "xy"
    if rope.grid_offset:
        options["offset"] = float(rope.grid_offset)
    return Spec("rope", {**options, **noise})


def _read_axial(rope: Any) -> dict[str, Any]:
    """Return frequencies and coordinates of timm's `RotaryEmbeddingCat`."""
    if rope.in_pixels or getattr(rope, "grid_type", "index") != "index":
        raise refuse(rope, "in_pixels", rope.in_pixels, "must be False, and the coordinates indices of patches,")
    options: dict[str, Any] = {"base": float(rope.temperature)}
    if rope.ref_feat_shape is not None:
        options |= {"scaling": "interpolation", "reference": tuple(rope.ref_feat_shape)}
    return options


def _read_dinov3(rope: Any) -> dict[str, Any]:
    """Return frequencies and coordinates of timm's `RotaryEmbeddingDinoV3`."""
    options = {"coordinates": rope.normalize_coords}
    if rope.min_period is not None and rope.max_period is not None:
        return {"periods": (float(rope.min_period), float(rope.max_period)), **options}
    return {"base": float(rope.temperature), "turns": True, **options}


@parts.register_conversion(VisionTransformerSAM)
def read_sam(model: Any) -> Conversion:
    """Describe timm's encoder of Segment Anything."""
    check_kind(model, "patch_embed", PatchEmbed)
    check_kind(model, "head", ClassifierHead)
    check_kind(model, "patch_drop", nn.Identity)
    check_kind(model, "neck", nn.Sequential, LayerNorm2d)
    check_values(model, rope_global=None)
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
    pre = parts.norm_text(model, "norm_pre")
    trunk = {
        **parts.trunk_arguments(model, patches),
        "global_pool": model.head.global_pool.pool_type,
        "pre_norm": pre is not None,
        "norm_layer": pre,
        "drop_rate": parts.rate_of(model, "head.drop"),
        "pos_drop_rate": parts.rate_of(model, "pos_drop"),
        "window_size": next(iter(windows), 1),
        "global_layers": tuple(layer for layer, block in enumerate(model.blocks) if not block.window_size),
        "neck_dim": model.neck[0].out_channels if isinstance(model.neck, nn.Sequential) else None,
    }
    kinds = {vision_transformer_sam.Block: with_norms("pre_norm", vision_transformer_sam.Attention)}
    arguments = vit_arguments(model, trunk, kinds)
    encoding = sum_of(model.pos_embed is not None and "learnable", any(relative) and "decomposed")
    return Conversion(SamVisionTransformer, arguments, encoding)


@parts.register_conversion(MlpMixer)
def read_mixer(model: Any) -> Conversion:
    """Describe timm's MLP-Mixer, ResMLP or gMLP, by the class of its blocks."""
    check_kind(model, "stem", PatchEmbed)
    parts.check_gelu(model)
    block: Any = model.blocks[0]
    family = type(block)
    kinds: dict[type[nn.Module], dict[str, type[nn.Module]]] = {
        SpatialGatingBlock: {".mlp_channels": GatedMlp, ".mlp_channels.gate": SpatialGatingUnit},
        MixerBlock: {".mlp_channels": Mlp, ".mlp_tokens": Mlp},
        ResBlock: {".mlp_channels": Mlp, ".norm1": Affine, ".norm2": Affine},
    }
    if family not in kinds:
        raise refuse(model, "blocks.0", block, "must be MixerBlock, ResBlock or SpatialGatingBlock")
    for index, _ in enumerate(model.blocks):
        for part, kind in {"": family, **kinds[family]}.items():
            check_kind(model, f"blocks.{index}{part}", kind)
    arguments: dict[str, Any] = {
        **parts.trunk_arguments(model, model.stem),
        "global_pool": model.global_pool,
        "num_blocks": len(model.blocks),
        "mlp_ratio": parts.ratio_of(block.mlp_channels.fc1.out_features, model.embed_dim),
        "groups": 1,
    }
    stem_norm = not isinstance(model.stem.norm, nn.Identity)
    if family is SpatialGatingBlock:
        gates = [f"blocks.{index}.mlp_channels.gate.norm" for index, _ in enumerate(model.blocks)]
        arguments["norm_layer"] = parts.layer_norm_text(model, gates)
        return Conversion(backbones.GMlp, {**arguments, "stem_norm": stem_norm, "gate_norm": True}, "sgu")
    if stem_norm:
        raise refuse(model, "stem.norm", model.stem.norm, "must be left out")
    if family is MixerBlock:
        arguments["norm_layer"] = parts.layer_norm_text(model)
        ratio = parts.ratio_of(block.mlp_tokens.fc1.out_features, model.embed_dim)
        return Conversion(backbones.Mixer, arguments, f"token_mlp(ratio={ratio!r})")
    check_kind(model, "norm", Affine)
    return Conversion(backbones.ResMlp, {**arguments, "layer_scale": 1.0}, "sgu")


@parts.register_conversion(ConVit)
def read_convit(model: Any) -> Conversion:
    """Describe timm's ConViT; its class token joins after the layers with gates."""
    check_kind(model, "patch_embed", PatchEmbed)
    gated = min(model.local_up_to_layer, len(model.blocks))
    for index, _ in enumerate(model.blocks):
        check_kind(model, f"blocks.{index}.attn", GPSA if index < gated else MHSA)
    parts.check_gelu(model)
    first = model.blocks[0]
    projection = first.attn.qk if gated else first.attn.qkv
    arguments = {
        **parts.trunk_arguments(model, model.patch_embed),
        "global_pool": model.global_pool,
        "depth": len(model.blocks),
        "num_heads": first.attn.num_heads,
        "mlp_ratio": parts.ratio_of(first.mlp.fc1.out_features, model.embed_dim),
        "qkv_bias": projection.bias is not None,
        "norm_layer": parts.layer_norm_text(model),
    }
    encoding = sum_of(model.use_pos_embed and "learnable", gated and f"gpsa(layers={gated}, bias=True)")
    return Conversion(backbones.ConVit, arguments, encoding)
