"""Conversion of transformers' Swin, Swin V2 and the image encoder of Segment Anything."""

from __future__ import annotations

from typing import Any

from graticule import backbones
from graticule.external.convert.into_transformers import pair
from graticule.external.convert.parts import Conversion, layer_norm_text, ratio_of, refuse, register_conversion
from graticule.external.convert.transformers_models import check_as_built, timm_name
from graticule.external.convert.transformers_vit import CUBIC, act_text, drop_path, label_names
from graticule.registry.specs import Spec


@register_conversion(
    *("transformers.SwinModel", "transformers.SwinForImageClassification"),
    *("transformers.Swinv2Model", "transformers.Swinv2ForImageClassification"),
)
def read_swin(model: Any) -> Conversion:
    """Describe Swin or Swin V2 of transformers.

    Where windows do not tile a stage, transformers pads before it shifts, and ours, as timm's, after. In training,
    transformers' Swin has stochastic depth of attention only, ours of the MLPs, too. Swin V2 adds its mask of -100
    twice.
    """
    check_as_built(model)
    config, state = model.config, model.state_dict()
    for name, value in (("hidden_act", "gelu"), ("hidden_dropout_prob", 0.0)):
        if getattr(config, name) != value:
            raise refuse(model, f"config.{name}", getattr(config, name), f"must be {value!r}")
    names = {theirs: timm_name(theirs) for theirs in state}
    names |= {theirs: "pos_embed1" for theirs, name in names.items() if name == "pos_embed"}  # of the first stage
    arguments = {
        "img_size": pair(config.image_size),
        "patch_size": pair(config.patch_size)[0],
        "in_chans": config.num_channels,
        "num_classes": model.num_labels if hasattr(model, "classifier") else 0,
        "global_pool": "avg" if hasattr(model, "classifier") or model.pooler is not None else "",
        "embed_dim": config.embed_dim,
        "depths": tuple(config.depths),
        "num_heads": tuple(config.num_heads),
        "window_size": config.window_size,
        "shift": "microsoft",
        "mlp_ratio": float(config.mlp_ratio),
        "qkv_bias": config.qkv_bias,
        "attn_drop_rate": float(config.attention_probs_dropout_prob),
        "drop_path_rate": drop_path(model),
        "norm_layer": layer_norm_text(model),
    }
    table = [str(Spec("learnable", {"resampler": CUBIC}))] * config.use_absolute_embeddings
    second = config.model_type == "swinv2"
    if second:
        trained = tuple(config.pretrained_window_sizes)
        arguments |= {"mask": -200.0, **({"pretrained_window_sizes": trained} if any(trained) else {})}
    return Conversion(
        backbones.SwinTransformerV2 if second else backbones.SwinTransformer,
        arguments,
        " + ".join([*table, "continuous_bias" if second else "relative_bias"]),
        names=names,
        preprocessing=label_names(config),
    )


@register_conversion("transformers.SamVisionModel")
def read_sam(model: Any) -> Conversion:
    """Describe the image encoder of Segment Anything of transformers, whose output is a map here and tokens there."""
    check_as_built(model)
    config, state = model.config, model.state_dict()
    names = {theirs: timm_name(theirs) for theirs in state}
    hidden = next(len(value) for theirs, value in state.items() if names[theirs] == "blocks.0.mlp.fc1.weight")
    arguments = {
        "img_size": pair(config.image_size),
        "patch_size": pair(config.patch_size),
        "in_chans": config.num_channels,
        "num_classes": 0,
        "global_pool": "",
        "embed_dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "mlp_ratio": ratio_of(hidden, config.hidden_size),
        "qkv_bias": config.qkv_bias,
        "act_layer": act_text(model),
        "attn_drop_rate": float(config.attention_dropout),
        "norm_layer": f"layernorm(eps={config.layer_norm_eps})",
        "window_size": config.window_size or 1,
        "global_layers": tuple(
            layer
            for layer in range(config.num_hidden_layers)
            if layer in config.global_attn_indexes or not config.window_size
        ),
        "neck_dim": config.output_channels,
    }
    encoding = ["learnable"] * config.use_abs_pos + ["decomposed"] * config.use_rel_pos
    reshaped: dict[str, tuple[int, ...]] = {theirs: () for theirs, name in names.items() if name == "pos_embed"}
    return Conversion(
        backbones.SamVisionTransformer,
        arguments,
        " + ".join(encoding) or "none",
        names=names,
        reshaped=reshaped,
        preprocessing={},
    )
