"""Conversion of transformers' ViT, DeiT, DINOv2, DINOv3, CLIP, SigLIP, I-JEPA, MAE, BEiT and Pixtral."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from graticule.backbones.deit import DistilledVisionTransformer
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.external.convert.into_transformers import pair
from graticule.external.convert.parts import Conversion, ratio_of, refuse, register_conversion
from graticule.external.convert.transformers_models import check_as_built, timm_name
from graticule.external.convert.vit import read_rates
from graticule.layers.parts import ACTIVATIONS
from graticule.registry.specs import Spec

#: Resamplers of tables at other sizes, by the type of the configuration; by default cubic without antialias.
CUBIC = "bicubic(antialias=False)"
_RESAMPLERS = {"dinov2_with_registers": "bicubic", "siglip2_vision_model": "bilinear"}
#: Classes that output a class token, without a classifier.
_OF_CLASS_TOKEN = ("Dinov2Model", "Dinov2WithRegistersModel", "DINOv3ViTModel", "CLIPVisionModel")


@register_conversion(
    *("transformers.ViTModel", "transformers.ViTForImageClassification"),
    *("transformers.ViTMSNModel", "transformers.ViTMSNForImageClassification"),
    *("transformers.DeiTModel", "transformers.DeiTForImageClassification"),
    "transformers.DeiTForImageClassificationWithTeacher",
    *("transformers.Dinov2Model", "transformers.Dinov2WithRegistersModel", "transformers.DINOv3ViTModel"),
    *("transformers.CLIPVisionModel", "transformers.CLIPVisionModelWithProjection"),
    *("transformers.SiglipVisionModel", "transformers.Siglip2VisionModel"),
    *("transformers.IJepaModel", "transformers.IJepaForImageClassification", "transformers.ViTMAEModel"),
    *("transformers.BeitModel", "transformers.BeitForImageClassification"),
    *("transformers.Data2VecVisionModel", "transformers.Data2VecVisionForImageClassification"),
    "transformers.PixtralVisionModel",
)
def read_vit(model: Any) -> Conversion:
    """Describe a plain ViT of transformers: its parts by their tensors, and numbers by its configuration."""
    check_as_built(model)
    config = model.config
    state = model.state_dict()
    names = {theirs: timm_name(theirs) for theirs, value in state.items() if value.numel()}
    names |= {theirs: () for theirs, value in state.items() if not value.numel()}
    if any(name == "blocks.0.mlp.fc1_g.weight" for name in names.values()):
        names = {theirs: _gated(name) for theirs, name in names.items()}
    if config.model_type.startswith("clip"):  # its last norm is after pooling
        names = {
            theirs: name.replace("norm.", "fc_norm.") if isinstance(name, str) and name.startswith("norm.") else name
            for theirs, name in names.items()
        }
    teacher = "head_dist.weight" in names.values()
    if teacher:
        names = {theirs: "dist_token" if name == "reg_token" else name for theirs, name in names.items()}
    tensors = {name: state[theirs] for theirs, name in names.items() if isinstance(name, str)}
    dim = config.hidden_size
    patch = pair(config.patch_size)
    image = pair(config.image_size) if hasattr(config, "image_size") else _square(config.num_patches, patch)
    pixtral = config.model_type == "pixtral"
    norm = "rmsnorm(eps=1e-05)" if pixtral else f"layernorm(eps={config.layer_norm_eps})"
    arguments: dict[str, Any] = {
        "img_size": image,
        "patch_size": patch,
        "in_chans": config.num_channels,
        "num_classes": len(tensors["head.weight"]) if "head.weight" in tensors else 0,
        "embed_dim": dim,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "class_token": "cls_token" in tensors,
        "reg_tokens": tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
        "pre_norm": "norm_pre.weight" in tensors,
        "fc_norm": "fc_norm.weight" in tensors,
        "final_norm": "norm.weight" in tensors or "fc_norm.weight" in tensors,
        "norm_layer": norm,
        "global_pool": _pool(model, tensors),
        "init_values": _layer_scale(config) if "blocks.0.ls1.gamma" in tensors else None,
        "drop_path_rate": drop_path(model),
        **_read_attention(model, tensors),
        **_read_mlp(model, tensors),
    }
    if arguments["global_pool"] == "map":
        arguments["pool_num_heads"] = config.num_attention_heads
        arguments["pool_mlp_ratio"] = ratio_of(tensors["attn_pool.mlp.fc1.weight"].shape[0], dim)
    arguments |= _read_head(model, tensors)
    if teacher:
        del arguments["global_pool"], arguments["class_token"], arguments["reg_tokens"]
    patches = math.prod(side // step for side, step in zip(image, patch, strict=True))
    prefix = arguments.get("class_token", True) + arguments.get("reg_tokens", 1)
    reshaped: dict[str, tuple[int, ...]] = {theirs: () for theirs, name in names.items() if name in _RESHAPED}
    if config.model_type == "siglip2_vision_model":  # a linear layer on patches of (height, width, channels)
        reshaped |= {theirs: (0, 2, 3, 1) for theirs, name in names.items() if name == "patch_embed.proj.weight"}
    backbone = DistilledVisionTransformer if teacher else VisionTransformer
    encoding = _read_encoding(model, tensors, patches, prefix)
    return Conversion(backbone, arguments, encoding, names=names, reshaped=reshaped, preprocessing=label_names(config))


#: Tensors that have more axes in timm.
_RESHAPED = ("cls_token", "pos_embed")


def _gated(name: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Return the name of the second layer of a gated MLP, which is the only one of others."""
    return name.replace(".mlp.fc1.", ".mlp.fc1_x.") if isinstance(name, str) else name


def _square(patches: int, patch: tuple[int, int]) -> tuple[int, int]:
    """Return the image size of a square table."""
    side = math.isqrt(patches)
    return side * patch[0], side * patch[1]


def _pool(model: Any, tensors: dict[str, Tensor]) -> str:
    """Return the pooling whose result the model outputs; '' for all tokens."""
    kind = type(model).__name__
    if "attn_pool.latent" in tensors:
        return "map"
    if "fc_norm.weight" in tensors:
        return "token" if "norm_pre.weight" in tensors else "avg"  # CLIP, BEiT
    if kind == "IJepaForImageClassification":
        return "avg"
    beit = model.config.model_type == "beit" and getattr(model, "pooler", None) is not None
    return "token" if "head.weight" in tensors or beit or kind in _OF_CLASS_TOKEN else ""


def _layer_scale(config: Any) -> tuple[float, float]:
    value = getattr(config, "layerscale_value", None) or config.layer_scale_init_value
    return float(value), float(value)


def drop_path(model: Any) -> float:
    """Return the rate of stochastic depth of the last block."""
    rates = [getattr(module, "drop_prob", 0.0) for name, module in model.named_modules() if name.endswith("drop_path")]
    return read_rates(model, rates) if any(rates) else 0.0


def _read_attention(model: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return attention as arguments of our ViT."""
    config = model.config
    biases = tuple(f"blocks.0.attn.qkv.{which}_proj.bias" in tensors for which in "qkv")
    if biases[0] != biases[2] or biases[1] > biases[0]:
        raise refuse(model, "key_bias", biases, "must be as those of queries and values, or left out,")
    return {
        "qkv_layer": "no_key_bias" if biases[0] > biases[1] else "fused",
        "qkv_bias": biases[0],
        "attn_drop_rate": float(
            getattr(config, "attention_probs_dropout_prob", getattr(config, "attention_dropout", 0))
        ),
    }


def _read_mlp(model: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the MLPs as arguments of our ViT."""
    config = model.config
    if dropout := getattr(config, "hidden_dropout_prob", 0.0):
        raise refuse(model, "config.hidden_dropout_prob", dropout, "must be 0")
    proj_bias = "blocks.0.attn.proj.bias" in tensors
    if proj_bias != ("blocks.0.mlp.fc2.bias" in tensors):
        raise refuse(model, "config.mlp_bias", not proj_bias, f"must be {proj_bias} as that of attention's projection")
    hidden = tensors["blocks.0.mlp.fc2.weight"].shape[1]
    gated = "blocks.0.mlp.fc1_g.weight" in tensors
    packed = not gated and tensors["blocks.0.mlp.fc1.weight"].shape[0] == 2 * hidden
    act = "silu" if getattr(config, "use_swiglu_ffn", False) else act_text(model)
    return {
        "mlp_layer": "swiglu" if gated else "swiglu_packed" if packed else "mlp",
        "mlp_ratio": ratio_of(hidden, config.hidden_size),
        "act_layer": act,
        "proj_bias": proj_bias,
    }


def act_text(model: Any) -> str:
    """Return timm's name of the activation of a model.

    Raises:
        ValueError: if it is another one.
    """
    name = model.config.hidden_act
    known = {"gelu_pytorch_tanh": "gelu_tanh", **{one: one for one in ACTIVATIONS if one != "gelu_tanh"}}
    if name not in known:
        raise refuse(model, "config.hidden_act", name, f"must be one of {', '.join(known)}")
    return known[name]


def _read_head(model: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the kind of a classifier or pooler as an argument of our ViT."""
    if "head.weight" not in tensors:
        return {}
    if getattr(model, "pooler", None) is not None and hasattr(model.pooler, "dense"):
        if model.config.pooler_act != "tanh":
            raise refuse(model, "config.pooler_act", model.config.pooler_act, "must be 'tanh'")
        return {"head_layer": "tanh"}
    return {} if "head.bias" in tensors else {"head_layer": "linear_no_bias"}


def _read_encoding(model: Any, tensors: dict[str, Tensor], patches: int, prefix: int) -> str:
    """Return the encoding of a model, with the resampling that its class uses for other sizes."""
    config, specs = model.config, []
    if "pos_embed" in tensors:
        rows = tensors["pos_embed"].numel() // config.hidden_size - patches
        options: dict[str, Any] = {"resampler": _RESAMPLERS.get(config.model_type, CUBIC)}
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
    options = {"prefix_rows": True, "resampler": "bilinear(antialias=False)"}
    for tensor, name in (("blocks.0.attn", "relative_bias"), ("rel_pos_bias", "shared_relative_bias")):
        if f"{tensor}.relative_position_bias_table" in tensors:
            specs.append(Spec(name, options))
    return " + ".join(map(str, specs)) or "none"


def label_names(config: Any) -> dict[str, Any]:
    """Return the names of the classes, if the configuration states them, as timm's configuration does."""
    labels = [str(label) for _, label in sorted((config.id2label or {}).items())]
    return {"label_names": labels} if any(label != f"LABEL_{index}" for index, label in enumerate(labels)) else {}
