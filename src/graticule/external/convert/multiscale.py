"""Conversion of timm's MViTv2."""

from __future__ import annotations

from typing import Any

from timm.models.mvitv2 import MultiScaleAttention, MultiScaleVit
from torch import nn

from graticule import backbones
from graticule.external.convert.parts import (
    Conversion,
    check_gelu,
    check_kind,
    drop_path,
    layer_norm_text,
    ratio_of,
    refuse,
    register_conversion,
)
from graticule.external.convert.vit import read_rates


@register_conversion(MultiScaleVit)
def read_multiscale(model: Any) -> Conversion:
    """Describe timm's MViTv2, whose image size is that of its tables."""
    stages = [list(stage.blocks) for stage in model.stages]
    blocks = {f"stages.{s}.blocks.{i}": block for s, stage in enumerate(stages) for i, block in enumerate(stage)}
    first = stages[0][0]
    dim, heads = first.dim, first.attn.num_heads
    stride = (1, 1) if first.attn.pool_k is None else first.attn.pool_k.stride
    relative = first.attn.rel_pos_type == "spatial"
    widens = not model.expand_attn
    for name, block in blocks.items():
        stage, index = (int(part) for part in name.split(".")[1::2])
        check_kind(model, f"{name}.attn", MultiScaleAttention)
        _check_pooling(model, f"{name}.attn", 2 if stage and not index else 1, max(stride[0] >> stage, 1))
        expected = {
            "dim_out": dim << (stage + (widens and index + 1 == len(stages[stage]) and stage + 1 < len(stages))),
            "attn.num_heads": heads << stage,
            "attn.residual_pooling": first.attn.residual_pooling,
            "attn.rel_pos_type": first.attn.rel_pos_type if relative else block.attn.rel_pos_type,
        }
        for attribute, value in expected.items():
            owner, _, leaf = attribute.rpartition(".")
            found = getattr(block.get_submodule(owner), leaf)
            if found != value:
                raise refuse(model, f"{name}.{attribute}", found, f"must be {value!r}")
    patches = model.patch_embed.proj
    if (patches.kernel_size, patches.stride, patches.padding) != ((7, 7), (4, 4), (3, 3)):
        raise refuse(model, "patch_embed.proj.stride", patches.stride, "must be 4 with a kernel of 7 and padding of 3")
    check_gelu(model)
    arguments = {
        "img_size": _image_size(model),
        "in_chans": model.in_chans,
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "class_token": model.cls_token is not None,
        "embed_dim": dim,
        "depths": tuple(map(len, stages)),
        "num_heads": heads,
        "key_stride": stride[0],
        "mlp_ratio": ratio_of(first.mlp.fc1.out_features, dim),
        "qkv_bias": first.attn.qkv.bias is not None,
        "residual_pooling": first.attn.residual_pooling,
        "expand_attn": model.expand_attn,
        "drop_rate": model.drop_rate,
        "drop_path_rate": read_rates(model, [drop_path(block.drop_path1) for block in blocks.values()]),
        "norm_layer": layer_norm_text(model),
    }
    parts = ["learnable"] * (model.pos_embed is not None) + ["decomposed"] * relative
    return Conversion(backbones.MultiscaleVisionTransformer, arguments, " + ".join(parts) or "none")


def _check_pooling(model: nn.Module, name: str, queries: int, keys: int) -> None:
    """Check that an attention pools by convolutions of 3 x 3 with these strides."""
    attention = model.get_submodule(name)
    for part, stride in (("pool_q", queries), ("pool_k", keys), ("pool_v", keys)):
        found = getattr(attention, part)
        if not isinstance(found, nn.Conv2d) or attention.unshared:
            raise refuse(model, f"{name}.{part}", found, "must be a convolution per channel of a head")
        if (found.kernel_size, found.stride) != ((3, 3), (stride, stride)):
            raise refuse(model, f"{name}.{part}.stride", found.stride, f"must be {stride} with a kernel of 3")


def _image_size(model: Any) -> tuple[int, int]:
    """Return the image size of the tables, in pixels.

    Raises:
        ValueError: if the tables do not determine it.
    """
    block = model.stages[0].blocks[0]
    if block.attn.rel_pos_type == "spatial":
        return 2 * (len(block.attn.rel_pos_h) + 1), 2 * (len(block.attn.rel_pos_w) + 1)
    if model.pos_embed is not None:
        side = int((model.pos_embed.shape[1] - model.num_prefix_tokens) ** 0.5)
        if side * side == model.pos_embed.shape[1] - model.num_prefix_tokens:
            return 4 * side, 4 * side
    if model.pos_embed is None:
        return 224, 224
    raise refuse(model, "pos_embed", tuple(model.pos_embed.shape), "must be for a square image")
