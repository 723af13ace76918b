"""Compute the cases of naver's and timm's rotary models with our backbones and the released weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graticule.backbones import SwinTransformer, VisionTransformer
from graticule.factory import build_position

Tensors = dict[str, Tensor]


def rotary_of(model: Any) -> list[Tensor]:
    """Return the sines, then cosines, of the patches in every layer, (..., H * W, 2d)."""
    return [layer.rotary.table[..., layer.rotary.table.shape[-2] - model.grid.patches :, :] for layer in layers(model)]


def layers(model: Any) -> Any:
    """Return the position of every layer."""
    return model.position(model.grid)


def pairs(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each pair of neighboring channels, (..., d / 2)."""
    sines, cosines = table.chunk(2, -1)
    return cosines[..., ::2], sines[..., ::2]


def compute_rope_vit(kwargs: dict[str, Any], weights: Tensors, images: Tensor) -> Tensors:
    """Compute a case of naver's rope-vit."""
    mixed = kwargs["rope_mixed"]
    encoding = f"{'rope_mixed' if mixed else 'rope'}(preset='rope_vit', base={kwargs['rope_theta']})"
    sizes = {name: kwargs[name] for name in ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")}
    model = VisionTransformer(
        partial(build_position, encoding=encoding), num_classes=kwargs["num_classes"], init_values=1e-4, **sizes
    )
    weights = {name: value for name, value in weights.items() if not name.startswith("freqs_t_")}
    if mixed:
        weights["rope.freqs"] = weights.pop("freqs").unflatten(-1, (kwargs["num_heads"], -1))
    model.double().eval().load_state_dict(weights)
    tables = rotary_of(model)
    cosines, sines = pairs(torch.stack(tables) if mixed else tables[0])
    return {"output": model(images), "rope_cos": cosines, "rope_sin": sines}


def compute_rope_swin(kwargs: dict[str, Any], weights: Tensors, images: Tensor) -> Tensors:
    """Compute a case of naver's Swin with mixed rotary encodings and no bias."""
    names = ("img_size", "patch_size", "embed_dim", "depths", "num_heads", "window_size", "mlp_ratio", "num_classes")
    encoding = f"rope_mixed(base={kwargs['rope_theta']})"
    model = SwinTransformer(partial(build_position, encoding=encoding), **{name: kwargs[name] for name in names})
    ours: Tensors = {}
    for name, value in weights.items():
        stage, _, rest = name.removeprefix("layers.").partition(".downsample.")
        if rest:  # before the next stage
            name = f"layers.{int(stage) + 1}.downsample.{rest}"
        ours[name] = value
    for stage, depth in enumerate(kwargs["depths"]):
        blocks = [f"layers.{stage}.blocks.{block}.attn." for block in range(depth)]
        freqs = torch.stack([ours[f"{block}rope_freqs"] for block in blocks], 1)
        ours[f"position.stages.{stage}.encoding.freqs"] = freqs
    unused = ("rope_freqs", "rope_t_x", "rope_t_y", "attn_mask", "relative_position_index")
    ours = {name: value for name, value in ours.items() if not name.endswith(unused)}
    model.double().eval().load_state_dict(ours)
    found = {"output": model(images)}
    for index, layer in enumerate(layers(model)):
        cosines, sines = pairs(layer.rotary.table)
        found |= {f"rope_cos_layer_{index}": cosines, f"rope_sin_layer_{index}": sines}
    return found


def compute_eva(kwargs: dict[str, Any], weights: Tensors, images: Tensor) -> Tensors:
    """Compute a case of timm's Eva: EVA-02, or the ViTs that its class builds."""
    kind = kwargs.get("rope_type", "cat")
    if kind == "mixed":
        encoding = "rope_mixed(preset='rope_vit')"
    elif kind == "dinov3":
        encoding = "rope(preset='dinov3')"
    elif "ref_feat_shape" in kwargs:
        encoding = f"learnable + rope(preset='eva02', reference={kwargs['ref_feat_shape']})"
    else:
        encoding = "rope(preset='rope_vit')"
    names = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias", "num_classes")
    given = {name: kwargs[name] for name in (*names, "init_values") if name in kwargs}
    pool = kwargs.get("global_pool", "avg")
    model = VisionTransformer(
        partial(build_position, encoding=encoding),
        global_pool=pool,
        reg_tokens=kwargs.get("num_reg_tokens", 0),
        mlp_layer="swiglu" if kwargs.get("swiglu_mlp") else "mlp",
        scale_mlp_norm=kwargs.get("scale_mlp", False),
        qkv_layer="fused" if kwargs.get("qkv_fused", True) else "separate_no_key_bias",
        **given,
    )
    model.double().eval().load_state_dict(weights)
    tables = rotary_of(model)
    return {"output": model(images), "rope": torch.stack(tables) if kind == "mixed" else tables[0]}


#: (reference, class) -> function that computes its cases.
COMPUTE: dict[tuple[str, str], Callable[[dict[str, Any], Tensors, Tensor], Tensors]] = {
    ("naver-ai/rope-vit", "deit rope_vit_models"): compute_rope_vit,
    ("naver-ai/rope-vit", "RoPESwinTransformer"): compute_rope_swin,
    ("timm", "timm.models.Eva"): compute_eva,
}
