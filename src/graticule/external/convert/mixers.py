"""Conversion of timm's MLP-Mixer, ResMLP and gMLP, which are one class."""

from __future__ import annotations

from typing import Any

from timm.layers import GatedMlp, Mlp, PatchEmbed
from timm.models.mlp_mixer import Affine, MixerBlock, MlpMixer, ResBlock, SpatialGatingBlock, SpatialGatingUnit
from torch import nn

from graticule import backbones
from graticule.external.convert.parts import (
    Conversion,
    check_gelu,
    check_kind,
    layer_norm_text,
    ratio_of,
    refuse,
    register_conversion,
    trunk_arguments,
)


@register_conversion(MlpMixer)
def read_mixer(model: Any) -> Conversion:
    """Describe timm's MLP-Mixer, ResMLP or gMLP, by the class of its blocks."""
    check_kind(model, "stem", PatchEmbed)
    check_gelu(model)
    block: Any = model.blocks[0]
    for index, _ in enumerate(model.blocks):
        check_kind(model, f"blocks.{index}", type(block))
        check_kind(model, f"blocks.{index}.mlp_channels", GatedMlp if type(block) is SpatialGatingBlock else Mlp)
    arguments: dict[str, Any] = {
        **trunk_arguments(model, model.stem),
        "global_pool": model.global_pool,
        "num_blocks": len(model.blocks),
        "mlp_ratio": ratio_of(block.mlp_channels.fc1.out_features, model.embed_dim),
        "groups": 1,
    }
    stem_norm = not isinstance(model.stem.norm, nn.Identity)
    if type(block) is SpatialGatingBlock:
        for index, _ in enumerate(model.blocks):
            check_kind(model, f"blocks.{index}.mlp_channels.gate", SpatialGatingUnit)
        gates = [f"blocks.{index}.mlp_channels.gate.norm" for index, _ in enumerate(model.blocks)]
        arguments["norm_layer"] = layer_norm_text(model, gates)
        return Conversion(backbones.GMlp, {**arguments, "stem_norm": stem_norm, "gate_norm": True}, "sgu")
    if stem_norm:
        raise refuse(model, "stem.norm", model.stem.norm, "must be left out")
    if type(block) is MixerBlock:
        for index, _ in enumerate(model.blocks):
            check_kind(model, f"blocks.{index}.mlp_tokens", Mlp)
        arguments["norm_layer"] = layer_norm_text(model)
        tokens: Any = block.mlp_tokens
        ratio = ratio_of(tokens.fc1.out_features, model.embed_dim)
        return Conversion(backbones.Mixer, arguments, f"token_mlp(ratio={ratio!r})")
    if type(block) is ResBlock:
        for name in ("norm", *(f"blocks.{i}.norm{n}" for i, _ in enumerate(model.blocks) for n in (1, 2))):
            check_kind(model, name, Affine)
        return Conversion(backbones.ResMlp, {**arguments, "layer_scale": 1.0}, "sgu")
    raise refuse(model, "blocks.0", block, "must be MixerBlock, ResBlock or SpatialGatingBlock")
