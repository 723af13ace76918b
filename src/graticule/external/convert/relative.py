"""Conversion of BEiT and of timm's `vit_relpos` models: transformers with a relative position bias."""

from __future__ import annotations

from typing import Any

from timm.layers import RelPosBias, RelPosMlp
from timm.models.beit import Attention, Beit, Block
from timm.models.vision_transformer_relpos import (
    RelPosAttention,
    RelPosBlock,
    ResPostRelPosBlock,
    VisionTransformerRelPos,
)

from graticule.backbones.vision_transformer import VisionTransformer
from graticule.external.convert.parts import Conversion, check_kind, refuse, register_conversion
from graticule.external.convert.vit import post_norm, pre_norm, read_blocks, read_trunk, table, vit_arguments
from graticule.registry.specs import Spec

#: Resampler that timm uses for tables at other sizes: linear between knots in a geometric series.
_RESAMPLER = "geometric(mode='linear')"


@register_conversion(Beit)
def read_beit(model: Any) -> Conversion:
    """Describe timm's BEiT: a table for each layer, one for all, or both, with rows for the class token."""
    arguments = vit_arguments(model, read_trunk(model), read_blocks(model, {Block: pre_norm(Attention)}))
    encodings = [] if model.pos_embed is None else [table(model)]
    own = [block.attn.relative_position_bias_table is not None for block in model.blocks]
    if any(own) and not all(own):
        raise refuse(model, "blocks", own, "must all have a table, or none,")
    options = {"prefix_rows": True, "resampler": _RESAMPLER}
    encodings += [str(Spec("relative_bias", options))] * all(own)
    encodings += [str(Spec("shared_relative_bias", options))] * (model.rel_pos_bias is not None)
    return Conversion(VisionTransformer, arguments, " + ".join(encodings) or "none")


@register_conversion(VisionTransformerRelPos)
def read_relpos(model: Any) -> Conversion:
    """Describe timm's `vit_relpos`: a bias for each layer, or one for all, from a table or a small network.

    The network's dropout in training is omitted.
    """
    kinds = {RelPosBlock: pre_norm(RelPosAttention), ResPostRelPosBlock: post_norm(RelPosAttention)}
    arguments = vit_arguments(model, read_trunk(model), read_blocks(model, kinds))
    if model.shared_rel_pos is not None:
        check_kind(model, "shared_rel_pos", RelPosMlp, RelPosBias)
        if any(block.attn.rel_pos is not None for block in model.blocks):
            raise refuse(model, "blocks", "biases per layer", "must have none in addition to a shared bias")
        if getattr(model.shared_rel_pos, "mode", "cr") != "cr":
            raise refuse(model.shared_rel_pos, "mode", model.shared_rel_pos.mode, "must be 'cr' if shared")
        return Conversion(VisionTransformer, arguments, f"shared_{_read_bias(model.shared_rel_pos)}")
    found = []
    for index, block in enumerate(model.blocks):
        check_kind(model, f"blocks.{index}.attn.rel_pos", RelPosMlp, RelPosBias)
        found.append(_read_bias(block.attn.rel_pos))
    if len(set(found)) > 1:
        raise refuse(model, "blocks", [str(spec) for spec in found], "must have the same kind of bias")
    return Conversion(VisionTransformer, arguments, str(found[0]))


def _read_bias(bias: Any) -> Spec:
    """Return the encoding of a bias module of timm."""
    if isinstance(bias, RelPosBias):
        rows = {"prefix_rows": True} if bias.prefix_tokens else {}
        return Spec("relative_bias", {**rows, "resampler": _RESAMPLER})
    hidden = bias.mlp.fc1.out_features
    if bias.mode == "cr":
        return Spec("mlp_bias", {"hidden": hidden})
    if any(bias.pretrained_window_size):
        raise refuse(bias, "pretrained_window_size", bias.pretrained_window_size, "must be (0, 0)")
    return Spec("continuous_bias", {"hidden": hidden})
