"""Conversion of timm's CaiT."""

from __future__ import annotations

from typing import Any

from timm.layers import Mlp, PatchEmbed
from timm.models.cait import Cait, ClassAttn, LayerScaleBlock, LayerScaleBlockClassAttn, TalkingHeadAttn
from torch import nn

from graticule import backbones
from graticule.external.convert.parts import (
    Conversion,
    act_text,
    check_kind,
    drop_path,
    ratio_of,
    refuse,
    register_conversion,
    same_norm,
    trunk_arguments,
)


@register_conversion(Cait)
def read_cait(model: Any) -> Conversion:
    """Describe timm's CaiT."""
    check_kind(model, "patch_embed", PatchEmbed)
    if not model.blocks_token_only:
        raise refuse(model, "blocks_token_only", model.blocks_token_only, "must have blocks")
    for name, kind, attention in (
        ("blocks", LayerScaleBlock, TalkingHeadAttn),
        ("blocks_token_only", LayerScaleBlockClassAttn, ClassAttn),
    ):
        for index, _ in enumerate(getattr(model, name)):
            check_kind(model, f"{name}.{index}", kind)
            check_kind(model, f"{name}.{index}.attn", attention)
            check_kind(model, f"{name}.{index}.mlp", Mlp)
    rates = {drop_path(block.drop_path) for block in model.blocks}
    if len(rates) > 1 or any(drop_path(block.drop_path) for block in model.blocks_token_only):
        raise refuse(model, "blocks (drop_path)", rates, "must be the same, and 0 in blocks_token_only,")
    modules = dict(model.named_modules())
    acts = {act_text(modules[name.removesuffix(".act")], "act") for name in modules if name.endswith(".mlp.act")}
    if len(acts) > 1:
        raise refuse(model, "blocks (act)", acts, "must be the same")
    first, last = model.blocks[0], model.blocks_token_only[0]
    norms = [name for name, module in modules.items() if isinstance(module, nn.LayerNorm)]
    arguments = {
        **trunk_arguments(model, model.patch_embed),
        "global_pool": model.global_pool,
        "depth": len(model.blocks),
        "num_heads": first.attn.num_heads,
        "mlp_ratio": ratio_of(first.mlp.fc1.out_features, model.embed_dim),
        "qkv_bias": first.attn.qkv.bias is not None,
        "depth_token_only": len(model.blocks_token_only),
        "mlp_ratio_token_only": ratio_of(last.mlp.fc1.out_features, model.embed_dim),
        "norm_layer": same_norm(model, norms),
        "act_layer": acts.pop(),
        "drop_rate": model.head_drop.p,
        "pos_drop_rate": model.pos_drop.p,
        "proj_drop_rate": first.attn.proj_drop.p,
        "attn_drop_rate": first.attn.attn_drop.p,
        "drop_path_rate": rates.pop(),
    }
    return Conversion(backbones.Cait, arguments, "learnable")
