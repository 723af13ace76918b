"""Compute the cases of videos, volumes and images of several sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from released_dense import Tensors, inputs
from timm.models.naflexvit import NaFlexVit

import graticule
from graticule import Grid
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.encodings.build import build_position

Arguments = dict[str, Any]
NORM = "layernorm(eps=1e-5)"


def build(encoding: str, weights: Tensors, names: Mapping[str, str], **options: Any) -> VisionTransformer:
    """Build our ViT with weights whose names change by regular expressions, in their order."""
    sizes = {"depth": 2, "num_heads": 2, "mlp_ratio": 2.0}
    model = VisionTransformer(partial(build_position, encoding=encoding), **sizes, **options)
    renamed = {}
    for name, value in weights.items():
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    model.double().eval().load_state_dict(renamed, strict=True)
    return model


def encode(encoding: str, shape: tuple[int, ...], dim: int, heads: int = 1) -> Any:
    return build_position(Grid(*shape), dim=dim, depth=1, num_heads=heads, encoding=encoding)(Grid(*shape))[0]


def mrope(kwargs: Arguments, weights: Tensors, tensors: Tensors) -> Tensors:
    sections, base = tuple(kwargs["mrope_section"]), kwargs["temperature"]
    return {"output": encode(f"mrope(sections={sections}, base={base})", kwargs["shape"], kwargs["dim"]).rotary.table}


def axial(kwargs: Arguments, weights: Tensors, tensors: Tensors) -> Tensors:
    """Compute the axial frequencies of rotary-embedding-torch: each axis has the frequencies of `dim` channels."""
    options = f"base={kwargs.get('theta')}"
    if kwargs["freqs_for"] == "pixel":
        options = f"pixels={kwargs['max_freq']}, linear=True, coordinates='corners'"
    queries = tensors["input"]
    rotary = encode(f"rope({options})", kwargs["shape"], queries.shape[1] * queries.shape[3], queries.shape[1]).rotary
    return {"output": rotary(queries, queries)[0]}


#: vit-pytorch's names of a block -> ours.
BLOCKS = {
    r"^transformer\.layers\.(\d+)\.0\.norm": r"blocks.\1.norm1",
    r"^transformer\.layers\.(\d+)\.0\.to_qkv": r"blocks.\1.attn.qkv",
    r"^transformer\.layers\.(\d+)\.0\.to_out\.0": r"blocks.\1.attn.proj",
    r"^transformer\.layers\.(\d+)\.1\.net\.0": r"blocks.\1.norm2",
    r"^transformer\.layers\.(\d+)\.1\.net\.1": r"blocks.\1.mlp.fc1",
    r"^transformer\.layers\.(\d+)\.1\.net\.4": r"blocks.\1.mlp.fc2",
    r"^transformer\.norm": "norm",
    r"^mlp_head": "head",
    r"^to_patch_embedding\.1": "patch_embed.proj",
    r"^to_patch_embedding\.2": "patch_embed.norm",
    r"^pos_embedding": "pos_embed",
}


def vit_nd(kwargs: Arguments, weights: Tensors, tensors: Tensors) -> Tensors:
    """Compute vit-pytorch's ViTND, whose patches are linear layers of (depth, height, width, channels)."""
    video, patch, weights = tensors["input"], tuple(kwargs["patch_size"]), dict(weights)
    rotary = "rope_min_freq" in kwargs
    linear = weights["to_patch_embedding.1.weight"].unflatten(1, (*patch, video.shape[1]))
    weights["to_patch_embedding.1.weight"] = linear.movedim(-1, 1)
    for layer in range(kwargs["depth"] if rotary else 0):
        name = f"transformer.layers.{layer}.0.to_"
        weights[f"{name}qkv.weight"] = torch.cat([weights.pop(f"{name}{part}.weight") for part in ("qk", "v")])
    encoding = "learnable"
    if rotary:
        options = {"lowest": kwargs["rope_min_freq"], "highest": kwargs["rope_max_freq"]}
        options |= {"zeros": kwargs.get("rope_p_zero_freqs", 0.0), "coordinates": "patches"}
        encoding = f"rope_golden_gate({', '.join(f'{name}={value!r}' for name, value in options.items())})"
    sizes = {"img_size": tuple(video.shape[2:]), "in_chans": video.shape[1], "embed_dim": kwargs["dim"]}
    sizes |= {
        "patch_size": patch,
        "num_classes": kwargs["num_classes"],
        **dict.fromkeys(("norm_layer", "patch_norm"), NORM),
    }
    options = {"class_token": not rotary, "global_pool": "avg" if rotary else "token", "fc_norm": False}
    encoding += " + causal" if "causal_dims" in kwargs else ""
    return {"output": build(encoding, weights, BLOCKS, qkv_bias=False, **sizes, **options)(video)}


def monai_vit(kwargs: Arguments, weights: Tensors, tensors: Tensors) -> Tensors:
    names = {
        r"^patch_embedding\.patch_embeddings": "patch_embed.proj",
        r"^patch_embedding\.position_embeddings": "pos_embed",
        r"\.attn\.out_proj": ".attn.proj",
        r"\.mlp\.linear": ".mlp.fc",
        r"^classification_head\.0": "head",
    }
    used = {name: value for name, value in weights.items() if "norm_cross_attn" not in name}
    sizes = {name: tuple(kwargs[name]) for name in ("img_size", "patch_size")}
    sizes |= {
        "in_chans": kwargs["in_channels"],
        "embed_dim": kwargs["hidden_size"],
        "num_classes": kwargs["num_classes"],
    }
    options = {"qkv_bias": False, "head_layer": "tanh", "norm_layer": NORM}
    return {"output": build("learnable(prefix_rows=False)", used, names, **sizes, **options)(tensors["input"])}


def monai_sincos(kwargs: Arguments, weights: Tensors, tensors: Tensors) -> Tensors:
    """Compute MONAI's table: our waves with all sines of an axis first, and the axes in their order."""
    table = encode("sinusoidal_2d", kwargs["grid_size"], kwargs["embed_dim"]).added_to_stream
    last, second, first = table.unflatten(-1, (3, -1, 2)).transpose(-1, -2).flatten(-2).unbind(-2)
    return {"output": torch.cat([second, first, last], -1)}


def naflex(kwargs: Arguments, weights: Tensors, tensors: Tensors) -> Tensors:
    """Compute timm's NaFlexVit: a learned table by conversion, other positions by our ViT with its weights."""
    images = inputs(tensors)
    if kwargs["pos_embed"] == "learned":
        original = NaFlexVit(**kwargs).double().eval()
        original.load_state_dict(weights)
        return {"output": graticule.convert(original)(images)}
    encoding = {
        "": "factorized(resampler='bilinear(antialias=False)')",
        "axial": f"rope(base={kwargs.get('rope_temperature')})",
        "mixed": f"rope_mixed(base={kwargs.get('rope_temperature')})",
        "mrope": f"mrope(sections={tuple(kwargs.get('rope_mrope_section', ()))})",
    }[kwargs.get("rope_type", "")]
    side = kwargs["patch_size"]
    weights = dict(weights)
    linear = weights["embeds.proj.weight"].unflatten(1, (side, side, 3))
    weights["embeds.proj.weight"] = linear.movedim(-1, 1)
    if "rope.freqs" in weights:  # of y before x with 'ij', which is the default of NaFlexVit alone
        weights["rope.freqs"] = weights["rope.freqs"].flip(0)
    names = {r"^embeds\.proj": "patch_embed.proj", r"^embeds\.pos_": "position.encodings.0.pos_", r"^embeds\.": ""}
    more = ("patch_size", "embed_dim", "num_classes", "class_token", "reg_tokens", "global_pool", "fc_norm")
    size = kwargs.get("pos_embed_grid_size", (4, 4))
    options = {name: kwargs[name] for name in more}
    model = build(encoding, weights, names, img_size=tuple(side * length for length in size), **options)
    return {"output": model(images)}


def siglip2(kwargs: Arguments, weights: Tensors, tensors: Tensors) -> Tensors:
    original = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**kwargs)).double().eval()
    original.load_state_dict(weights)
    return {"output": graticule.convert(original)(inputs(tensors))}


#: (reference, class) -> function that computes the outputs of its cases from their arguments, weights and tensors.
COMPUTE: dict[tuple[str, str], Callable[[Arguments, Tensors, Tensors], Tensors]] = {
    ("timm", "RotaryEmbeddingMRope"): mrope,
    ("timm", "NaFlexVit"): naflex,
    ("rotary-embedding-torch", "get_axial_freqs"): axial,
    ("vit-pytorch", "vit_nd.ViTND"): vit_nd,
    ("vit-pytorch", "vit_nd_rotary.ViTND"): vit_nd,
    ("monai", "ViT"): monai_vit,
    ("monai", "build_sincos_position_embedding"): monai_sincos,
    ("transformers", "Siglip2VisionModel"): siglip2,
}
