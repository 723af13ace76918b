"""Conversion of timm's `Eva`: EVA, EVA-02, DINOv3, Perception Encoder and rope-vit."""

from __future__ import annotations

from typing import Any

from timm.layers import AttentionRope, RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm

from graticule.backbones.vision_transformer import VisionTransformer
from graticule.external.convert.parts import Conversion, refuse, register_conversion
from graticule.external.convert.vit import post_norm, pre_norm, read_blocks, read_trunk, table, vit_arguments
from graticule.registry.specs import Spec


@register_conversion(Eva)
def read_eva(model: Any) -> Conversion:
    """Describe timm's `Eva`."""
    attentions = (EvaAttention, AttentionRope)
    kinds = {EvaBlock: pre_norm(*attentions), EvaBlockPostNorm: post_norm(*attentions)}
    arguments = vit_arguments(model, read_trunk(model), read_blocks(model, kinds))
    arguments["pool_include_prefix"] = model.attn_pool is not None  # it pools all tokens
    encodings = [] if model.pos_embed is None else [table(model)]
    if model.rope is not None:
        encodings.append(str(read_rotary(model)))
    return Conversion(VisionTransformer, arguments, " + ".join(encodings) or "none")


def read_rotary(model: Any) -> Spec:
    """Return the rotary encoding of a model of timm.

    Raises:
        ValueError: if this library does not have it.
    """
    rope = model.rope
    half = bool(getattr(model.blocks[0].attn, "rotate_half", False))
    for block in model.blocks:
        if block.attn.num_prefix_tokens != model.num_prefix_tokens:
            raise refuse(
                block.attn, "num_prefix_tokens", block.attn.num_prefix_tokens, f"must be {model.num_prefix_tokens}"
            )
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
