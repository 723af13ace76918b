"""Conversion of transformers' models of images, which must be what their configuration builds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from timm.layers.helpers import to_2tuple
from torch import Tensor, nn

from graticule import backbones
from graticule.backbones.vision_transformer import DistilledVisionTransformer, VisionTransformer
from graticule.external.convert.parts import Conversion, ratio_of, refuse, register_conversion, sum_of
from graticule.external.convert.sizes import channels_of, sizes_of
from graticule.layers.parts import ACTIVATIONS
from graticule.registry.specs import Spec

#: Parts of a block in timm's layout -> their names in transformers, in which `attention.attention` and `attention.self`
#: are written `attention`, and `feed_forward` is written `mlp`.
_IN_BLOCKS = {
    "norm1": "layernorm_before layer_norm1 attention_norm",
    "norm2": "layernorm_after layer_norm2 ffn_norm",
    "attn": "attention self_attn",
    "attn.qkv.q_proj": "attention.query attention.q_proj self_attn.q_proj",
    "attn.qkv.k_proj": "attention.key attention.k_proj self_attn.k_proj",
    "attn.qkv.v_proj": "attention.value attention.v_proj self_attn.v_proj",
    "attn.proj": "attention.output.dense attention.o_proj attention.proj self_attn.out_proj self_attn.o_proj",
    "attn.relative_position_bias_table": "attention.relative_position_bias.relative_position_bias_table "
    "relative_position_bias.relative_position_bias_table",
    "attn.cpb_mlp": "attention.continuous_position_bias_mlp",
    "mlp.fc1": "intermediate.dense mlp.up_proj mlp.weights_in mlp.lin1 mlp.linear_fc1",
    "mlp.fc1_g": "mlp.gate_proj",
    "mlp.fc2": "output.dense mlp.down_proj mlp.weights_out mlp.lin2 mlp.linear_fc2",
    "ls1.gamma": "layer_scale1.lambda1 lambda_1",
    "ls2.gamma": "layer_scale2.lambda1 lambda_2",
}
#: The same for parts outside of blocks; mask tokens, predictors and mergers of tokens have no name.
_OUTSIDE = {
    "": "embeddings.mask_token predictor merger deepstack_merger_list",
    "cls_token": "embeddings.cls_token embeddings.class_embedding",
    "reg_token": "embeddings.register_tokens embeddings.distillation_token",
    "pos_embed": "embeddings.position_embeddings embeddings.position_embedding.weight pos_embed.weight",
    "patch_embed.proj": "embeddings.patch_embeddings.projection embeddings.patch_embeddings.proj "
    "embeddings.patch_embeddings embeddings.patch_embedding patch_embed.projection patch_conv",
    "patch_embed.norm": "embeddings.norm",
    "norm_pre": "pre_layrnorm ln_pre",
    "norm": "layernorm post_layernorm",
    "fc_norm": "pooler.layernorm",
    "head": "pooler.dense classifier cls_classifier visual_projection",
    "head_dist": "distillation_classifier",
    "rel_pos_bias": "shared_position_bias relative_position_bias",
    "attn_pool.latent": "head.probe",
    "attn_pool.proj": "head.attention.out_proj",
    "attn_pool.norm": "head.layernorm",
    "attn_pool.mlp": "head.mlp",
    **{f"neck.{2 * n + m}": f"neck.{part}{n + 1}" for n in (0, 1) for m, part in enumerate(("conv", "layer_norm"))},
}
_PARTS, _OTHERS = (
    {name: part for part, names in table.items() for name in names.split()} for table in (_IN_BLOCKS, _OUTSIDE)
)
#: Where the encoder is in a model, and a block of it, of one grid or of a stage.
_ROOT = re.compile(
    r"(?:(?:vit|deit|dinov2|dinov2_with_registers|dinov3_vit|ijepa|beit|data2vec_vision|swinv2|swin|videomae|vivit"
    r"|vision_model|vision_encoder)\.)?(?:(?:encoder|model|transformer)\.)?"
)
_BLOCK = re.compile(r"(?:layers?|blocks)\.(\d+)\.(?:blocks\.(\d+)\.)?(.+)")


def names_of(model: nn.Module, others: Mapping[str, str] = {}) -> dict[str, str | tuple[str, ...]]:
    """Map the name of each tensor of a model of transformers to its name in timm's layout.

    `others` maps parts in timm's layout to names of the family that differ.
    """
    return {name: _timm_name(name, others) if value.numel() else () for name, value in model.state_dict().items()}


def _timm_name(name: str, others: Mapping[str, str]) -> str | tuple[str, ...]:
    if pooled := re.fullmatch(r"head\.attention\.in_proj_(weight|bias)", name):
        return f"attn_pool.q.{pooled[1]}", f"attn_pool.kv.{pooled[1]}"
    name = _ROOT.sub("", name, count=1)
    if (block := _BLOCK.fullmatch(name)) is None:
        return _rename(_rename(name, _OTHERS), others) or ()
    first, second, part = block.groups()
    if part.startswith("downsample."):
        return f"layers.{int(first) + 1}.{part}"
    part = re.sub(r"^attention\.(?:attention|self)\.", "attention.", part).replace("feed_forward.", "mlp.")
    place = f"blocks.{first}" if second is None else f"layers.{first}.blocks.{second}"
    return f"{place}.{_rename(_rename(part, _PARTS), others)}"


def _rename(name: str, table: Mapping[str, str]) -> str:
    """Return a name whose longest start that is in the table is replaced; '' if that has no name."""
    start = name
    while start and start not in table:
        start = start.rpartition(".")[0]
    return name if not start else table[start] and table[start] + name[len(start) :]


def _check_config(model: Any, **values: Any) -> None:
    """Check that those entries that a configuration has are of these values."""
    for name, value in values.items():
        if (actual := getattr(model.config, name, value)) != value:
            raise refuse(model, f"config.{name}", actual, f"must be {value!r}")


#: Resamplers of tables at other sizes, by the type of the configuration; by default cubic without antialias.
CUBIC = "bicubic(antialias=False)"
_RESAMPLERS = {
    "dinov2_with_registers": "bicubic",
    "rf_detr_dinov2": "bicubic",
    "levit": "bicubic",  # as timm's tables of absolute offsets
    "siglip2_vision_model": "bilinear",
    "tipsv2_vision_model": "bilinear",
    "dpt": "bilinear(antialias=False)",
    "qwen3_vl_vision": "bilinear(antialias=False, align_corners=True)",
}
#: Classes that output a class token, without a classifier.
_OF_CLASS_TOKEN = ("Dinov2Model", "Dinov2WithRegistersModel", "DINOv3ViTModel", "CLIPVisionModel")


#: The plain ViTs.
_PLAIN = """
ViTModel ViTForImageClassification ViTMSNModel ViTMSNForImageClassification ViTMAEModel IJepaModel
IJepaForImageClassification DeiTModel DeiTForImageClassification DeiTForImageClassificationWithTeacher Dinov2Model
Dinov2WithRegistersModel DINOv3ViTModel CLIPVisionModel CLIPVisionModelWithProjection SiglipVisionModel
Siglip2VisionModel BeitModel BeitForImageClassification Data2VecVisionModel Data2VecVisionForImageClassification
PixtralVisionModel Qwen2VisionTransformerPretrainedModel Qwen3VLVisionModel VideoMAEModel VideoMAEForVideoClassification
VivitModel VivitForVideoClassification VJEPA2Model
"""


@register_conversion(*(f"transformers.{name}" for name in _PLAIN.split()))
def read_vit(model: Any) -> Conversion:
    """Describe a plain ViT of transformers: its parts by their tensors, and numbers by its configuration.

    Models of videos have a grid of three axes here. The encoders of Qwen-VL take images here, which are repeated for
    the frames of a patch, and return tokens row by row, before they are merged.
    """
    config = model.config
    state = model.state_dict()
    teacher = "cls_classifier.weight" in state
    others = {"reg_token": "dist_token"} if teacher else {}
    if config.model_type.startswith("clip"):  # its last norm is after pooling
        others["norm"] = "fc_norm"
    if any("gate_proj" in name for name in state):  # the second layer of a gated MLP, the only one of others
        others["mlp.fc1"] = "mlp.fc1_x"
    names = names_of(model, others)
    tensors = {name: state[there] for there, name in names.items() if isinstance(name, str)}
    dim = tensors["blocks.0.norm1.weight"].shape[0]
    image, patch = sizes_of(config)
    qwen, pixtral = "qwen" in config.model_type, config.model_type == "pixtral"
    scale = getattr(config, "layerscale_value", None) or getattr(config, "layer_scale_init_value", None) or 0
    norm = "rmsnorm(eps=1e-05)" if pixtral else f"layernorm(eps={1e-06 if qwen else config.layer_norm_eps})"
    arguments: dict[str, Any] = {
        "img_size": image,
        "patch_size": patch,
        **({} if qwen or len(image) > 2 else {"fit": "floor"}),
        "in_chans": getattr(config, channels_of(config)),
        "num_classes": len(tensors["head.weight"]) if "head.weight" in tensors else 0,
        "embed_dim": dim,
        "depth": len({name.split(".")[1] for name in tensors if name.startswith("blocks.")}),
        "num_heads": config.num_attention_heads,
        "class_token": "cls_token" in tensors,
        "reg_tokens": tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
        "pre_norm": "norm_pre.weight" in tensors,
        "fc_norm": f"layernorm(eps={model.fc_norm.eps})" if hasattr(model, "fc_norm") else "fc_norm.weight" in tensors,
        "final_norm": "norm.weight" in tensors or "fc_norm.weight" in tensors,
        "norm_layer": norm,
        "global_pool": _pool(model, tensors),
        "init_values": (float(scale),) * 2 if "blocks.0.ls1.gamma" in tensors else None,
        "drop_path_rate": drop_path(model),
        **({"patch_bias": False, "patch_frames": config.temporal_patch_size} if qwen else {}),
        **_read_attention(model, tensors),
        **_read_mlp(model, tensors),
    }
    if arguments["global_pool"] == "map":
        arguments["pool_num_heads"] = config.num_attention_heads
        arguments["pool_mlp_ratio"] = ratio_of(tensors["attn_pool.mlp.fc1.weight"].shape[0], dim)
    if "head.weight" in tensors and hasattr(getattr(model, "pooler", None), "dense"):
        _check_config(model, pooler_act="tanh")
        arguments["head_layer"] = "tanh"
    elif "head.weight" in tensors and "head.bias" not in tensors:
        arguments["head_layer"] = "linear_no_bias"
    if teacher:
        del arguments["global_pool"], arguments["class_token"], arguments["reg_tokens"]
    if qwen and "patch_embed.proj.bias" in tensors:
        del arguments["patch_bias"]
    patches = math.prod(side // step for side, step in zip(image, patch, strict=True))
    prefix = arguments.get("class_token", True) + arguments.get("reg_tokens", 1)
    backbone = DistilledVisionTransformer if teacher else VisionTransformer
    encoding = _read_encoding(model, tensors, patches, prefix)
    return Conversion(backbone, arguments, encoding, names=names)


def resampler_of(config: Any) -> str:
    """Return the resampler of tables of the class of a configuration."""
    return _RESAMPLERS.get(config.model_type, CUBIC)


def _pool(model: Any, tensors: dict[str, Tensor]) -> str:
    """Return the pooling whose result the model outputs; '' for all tokens."""
    kind = type(model).__name__
    if kind == "VideoMAEForVideoClassification":
        return "avg" if model.config.use_mean_pooling else "token"
    if "attn_pool.latent" in tensors:
        return "map"
    if "fc_norm.weight" in tensors:
        return "token" if "norm_pre.weight" in tensors else "avg"  # CLIP, BEiT
    if kind == "IJepaForImageClassification":
        return "avg"
    pooled = model.config.model_type == "beit" and getattr(model, "pooler", None) is not None
    return "token" if "head.weight" in tensors or pooled or kind in _OF_CLASS_TOKEN else ""


def drop_path(model: Any) -> float:
    """Return the rate of stochastic depth of the last block, to which it grows linearly from 0."""
    rates = [getattr(module, "drop_prob", 0.0) for name, module in model.named_modules() if name.endswith("drop_path")]
    expected = torch.linspace(0, rates[-1] if rates else 0, len(rates), device="cpu").tolist()
    if any(abs(rate - rule) > 1e-6 for rate, rule in zip(rates, expected, strict=True)):
        raise refuse(model, "drop_path", rates, "must grow linearly from 0")
    return rates[-1] if rates else 0.0


def _read_attention(model: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    dropout = getattr(model.config, "attention_probs_dropout_prob", getattr(model.config, "attention_dropout", 0))
    fused = "blocks.0.attn.qkv.bias" in tensors
    biases = tuple(fused or f"blocks.0.attn.qkv.{which}_proj.bias" in tensors for which in "qkv")
    if biases[0] != biases[2] or biases[1] > biases[0]:
        raise refuse(model, "key_bias", biases, "must be as for queries and values, or left out,")
    return {
        "qkv_layer": "no_key_bias" if biases[0] > biases[1] else "fused",
        "qkv_bias": biases[0],
        "attn_drop_rate": float(dropout),
    }


def _read_mlp(model: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    _check_config(model, hidden_dropout_prob=0)
    proj_bias = "blocks.0.attn.proj.bias" in tensors
    if proj_bias != ("blocks.0.mlp.fc2.bias" in tensors):
        raise refuse(model, "config.mlp_bias", not proj_bias, f"must be {proj_bias} as for attention's projection")
    hidden = tensors["blocks.0.mlp.fc2.weight"].shape[1]
    gated = "blocks.0.mlp.fc1_g.weight" in tensors
    packed = not gated and tensors["blocks.0.mlp.fc1.weight"].shape[0] == 2 * hidden
    return {
        "mlp_layer": "swiglu" if gated else "swiglu_packed" if packed else "mlp",
        "mlp_ratio": ratio_of(hidden, len(tensors["blocks.0.norm1.weight"])),
        "act_layer": "silu" if getattr(model.config, "use_swiglu_ffn", False) else act_text(model),
        "proj_bias": proj_bias,
    }


def act_text(model: Any) -> str:
    """Return timm's name of the activation of a model."""
    name = model.config.hidden_act
    known = dict.fromkeys(("gelu_pytorch_tanh", "gelu_fast", "gelu_new"), "gelu_tanh")
    known |= {activation: activation for activation in ACTIVATIONS if activation != "gelu_tanh"}
    if name not in known:
        raise refuse(model, "config.hidden_act", name, f"must be one of {', '.join(known)}")
    return known[name]


def _read_encoding(model: Any, tensors: dict[str, Tensor], patches: int, prefix: int) -> str:
    """Return the encoding of a model, with the resampling that its class uses for other sizes."""
    config, specs = model.config, []
    if "pos_embed" in tensors:
        rows = tensors["pos_embed"].numel() // tensors["pos_embed"].shape[-1] - patches
        options: dict[str, Any] = {"resampler": resampler_of(config)}
        if rows != prefix:
            options["prefix_rows"] = "first" if rows else False
        specs.append(Spec("learnable", options))
    if config.model_type == "dinov3_vit":
        noise = {name: getattr(config, f"pos_embed_{name}") for name in ("shift", "jitter", "rescale")}
        options = {"base": float(config.rope_theta), "turns": True, "coordinates": "separate", "layout": "half"}
        specs.append(Spec("rope", options | {name: value for name, value in noise.items() if value is not None}))
    if config.model_type == "pixtral":
        theta = (getattr(config, "rope_parameters", None) or vars(config))["rope_theta"]
        specs.append(Spec("rope", {"preset": "pixtral", "base": float(theta)}))
    if "qwen" in config.model_type:
        if config.rope_parameters["rope_type"] != "axial":
            raise refuse(model, "config.rope_parameters", config.rope_parameters, "must be of 'axial' rotations")
        specs.append(Spec("rope", {"preset": "qwen2_vl", "base": float(config.rope_parameters["rope_theta"])}))
    if config.model_type == "videomae":
        specs.append(Spec("sinusoidal_1d"))
    if config.model_type == "vjepa2":
        pairs = config.hidden_size // config.num_attention_heads // 3 // 2
        specs.append(Spec("rope", {"preset": "vjepa2", "split": (pairs,) * 3}))
    options = {"prefix_rows": True, "resampler": "bilinear(antialias=False)"}
    for tensor, name in (("blocks.0.attn", "relative_bias"), ("rel_pos_bias", "shared_relative_bias")):
        if f"{tensor}.relative_position_bias_table" in tensors:
            specs.append(Spec(name, options))
    return sum_of(*specs)


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
    config = model.config
    _check_config(model, hidden_act="gelu", hidden_dropout_prob=0, layer_norm_eps=1e-5)  # as its other norms
    names = names_of(model, {"pos_embed": "pos_embed1"})  # of the first stage
    arguments = {
        "img_size": to_2tuple(config.image_size),
        "patch_size": to_2tuple(config.patch_size)[0],
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
        "norm_layer": f"layernorm(eps={config.layer_norm_eps})",
    }
    second = config.model_type == "swinv2"
    if not second and arguments["drop_path_rate"]:
        arguments["block_layer"] = "attention_drop_path"
    if second:
        trained = tuple(config.pretrained_window_sizes)
        arguments |= {"mask": -200.0, **({"pretrained_window_sizes": trained} if any(trained) else {})}
    table = config.use_absolute_embeddings and Spec("learnable", {"resampler": CUBIC})
    encoding = sum_of(table, "continuous_bias" if second else "relative_bias")
    backbone = backbones.SwinTransformerV2 if second else backbones.SwinTransformer
    return Conversion(backbone, arguments, encoding, names=names)


@register_conversion("transformers.SamVisionModel")
def read_sam(model: Any) -> Conversion:
    """Describe the image encoder of Segment Anything of transformers, whose output is a map here and tokens there."""
    config, names = model.config, names_of(model)
    layers = range(config.num_hidden_layers)
    arguments = {
        "img_size": to_2tuple(config.image_size),
        "patch_size": to_2tuple(config.patch_size),
        "in_chans": config.num_channels,
        "num_classes": 0,
        "global_pool": "",
        "embed_dim": config.hidden_size,
        "depth": len(layers),
        "num_heads": config.num_attention_heads,
        "mlp_ratio": ratio_of(model.vision_encoder.layers[0].mlp.lin1.out_features, config.hidden_size),
        "qkv_bias": config.qkv_bias,
        "act_layer": act_text(model),
        "attn_drop_rate": float(config.attention_dropout),
        "norm_layer": f"layernorm(eps={config.layer_norm_eps})",
        "window_size": config.window_size or 1,
        "global_layers": tuple(
            layer for layer in layers if layer in config.global_attn_indexes or not config.window_size
        ),
        "neck_dim": config.output_channels,
    }
    encoding = sum_of(config.use_abs_pos and "learnable", config.use_rel_pos and "decomposed")
    return Conversion(backbones.SamVisionTransformer, arguments, encoding, names=names)
