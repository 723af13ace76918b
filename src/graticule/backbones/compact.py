"""ViT-Lite, CVT and CCT: small transformers for small images."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, ClassVar, Literal

from torch import nn

from graticule.backbones.registry import Size, register_sizes
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.checks import checked
from graticule.encodings import PositionBuilder
from graticule.layers import CompactBlock, ConvolutionalTokenizer, Patches

#: Our names and those of its code.
_NAMES = {
    "patch_embed.proj": "tokenizer.conv_layers.0.0",
    "patch_embed.conv_layers": "tokenizer.conv_layers",
    "cls_token": "classifier.class_emb",
    "pos_embed": "classifier.positional_emb",
    "norm": "classifier.norm",
    "attn_pool": "classifier.attention_pool",
    "head": "classifier.fc",
}
_BLOCK = {"norm1": "pre_norm", "attn": "self_attn", "norm2": "norm1", "mlp.fc1": "linear1", "mlp.fc2": "linear2"}


class CompactTransformer(VisionTransformer):
    """ViT-Lite (patches, class token), CVT (patches, sequence pooling) or CCT (convolutions, sequence pooling).

    Its blocks have their second norm on the stream (`CompactBlock`), its norms an epsilon of 1e-5 and its queries,
    keys and values no bias. Sequence pooling weighs the patches by a softmax of a learned score.

    Reference: Escaping the Big Data Paradigm with Compact Transformers (Hassani et al., 2021).

    Args:
        position: builds the position.
        tokenizer: 'patches' or 'convolutions'.
        conv_layers: number of convolutions.
        conv_stride: their stride; max(1, kernel // 2 - 1) by default, `patch_size` being the kernel.
        conv_padding: their padding; max(1, kernel // 2) by default.
        kwargs: as `VisionTransformer`; the dropout of attention weights is 0.1 by default.
    """

    encoding_options: ClassVar = {"learnable": {"std": 0.2}}  # as in its code

    @checked
    def __init__(
        self,
        position: PositionBuilder,
        img_size: int | tuple[int, int] = 32,
        patch_size: int | tuple[int, int] = 4,
        global_pool: str = "token",
        tokenizer: Literal["patches", "convolutions"] = "patches",
        conv_layers: int = 1,
        conv_stride: int | None = None,
        conv_padding: int | None = None,
        attn_drop_rate: float = 0.1,
        **kwargs: Any,
    ) -> None:
        if tokenizer not in ("patches", "convolutions"):
            raise ValueError(f"`tokenizer` must be 'patches' or 'convolutions', got {tokenizer!r}.")
        embed: Any = Patches
        if tokenizer == "convolutions":
            embed = partial(ConvolutionalTokenizer, layers=conv_layers, stride=conv_stride, padding=conv_padding)
        super().__init__(
            position,
            img_size=img_size,
            patch_size=patch_size,
            global_pool=global_pool,
            embed_layer=embed,
            block_layer=CompactBlock,
            attn_drop_rate=attn_drop_rate,
            **{
                "qkv_bias": False,
                "class_token": global_pool == "token",
                "fc_norm": False,
                "norm_layer": nn.LayerNorm,
                **kwargs,
            },
        )

    def own_name(self, published: str) -> str:
        """Return our name of a parameter of its code."""
        if found := re.match(r"classifier\.blocks\.(\d+)\.(pre_norm|self_attn|norm1|linear1|linear2)\.(.+)", published):
            own = next(own for own, theirs in _BLOCK.items() if theirs == found[2])
            return f"blocks.{found[1]}.{own}.{found[3]}"
        convolutions = isinstance(self.patch_embed, ConvolutionalTokenizer)
        for own, theirs in _NAMES.items():
            if own.startswith("patch_embed") and convolutions != own.endswith("conv_layers"):
                continue
            if published == theirs or published.startswith(theirs + "."):
                return own + published.removeprefix(theirs)
        return published

    def published_name(self, own: str) -> str:
        """Return the name of a parameter in its code."""
        if found := re.match(r"blocks\.(\d+)\.(norm1|attn|norm2|mlp\.fc1|mlp\.fc2)\.(.+)", own):
            return f"classifier.blocks.{found[1]}.{_BLOCK[found[2]]}.{found[3]}"
        for ours, theirs in _NAMES.items():
            if own == ours or own.startswith(ours + "."):
                return theirs + own.removeprefix(ours)
        return own


#: Means and deviations of CIFAR-10, which the published configurations of its code have.
_CIFAR10 = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616), "crop_pct": 1.0}
#: Those of CIFAR-100, for a model of 32 pixels and 100 classes.
_CIFAR100 = {100: {"num_classes": 100, "mean": (0.5071, 0.4867, 0.4408), "std": (0.2675, 0.2565, 0.2761)}}
_CCT = {"first_conv": "patch_embed.conv_layers.0.0"}
_CCT_CIFAR10 = {**_CIFAR10, **_CCT}
# The names are those of its code: layers, then side of a patch, or kernel x number of convolutions, then image.
register_sizes(
    CompactTransformer,
    {
        "vit_lite_2_4_32": Size(
            214_666,
            {"num_classes": 10, "embed_dim": 128, "depth": 2, "num_heads": 2, "mlp_ratio": 1.0},
            cfg=_CIFAR10,
            cfg_of_classes=_CIFAR100,
        ),
        "vit_lite_4_4_32": Size(
            413_066,
            {"num_classes": 10, "embed_dim": 128, "depth": 4, "num_heads": 2, "mlp_ratio": 1.0},
            cfg=_CIFAR10,
            cfg_of_classes=_CIFAR100,
        ),
        "vit_lite_6_4_32": Size(
            3_190_538,
            {"num_classes": 10, "embed_dim": 256, "depth": 6, "num_heads": 4, "mlp_ratio": 2.0},
            cfg=_CIFAR10,
            cfg_of_classes=_CIFAR100,
        ),
        "vit_lite_7_4_32": Size(
            3_716_874,
            {"num_classes": 10, "embed_dim": 256, "depth": 7, "num_heads": 4, "mlp_ratio": 2.0},
            cfg=_CIFAR10,
            cfg_of_classes=_CIFAR100,
        ),
        "vit_lite_7_8_32": Size(
            3_741_450,
            {"patch_size": 8, "num_classes": 10, "embed_dim": 256, "depth": 7, "num_heads": 4, "mlp_ratio": 2.0},
            cfg=_CIFAR10,
            cfg_of_classes=_CIFAR100,
        ),
        "vit_lite_7_16_32": Size(
            3_885_834,
            {"patch_size": 16, "num_classes": 10, "embed_dim": 256, "depth": 7, "num_heads": 4, "mlp_ratio": 2.0},
            cfg=_CIFAR10,
            cfg_of_classes=_CIFAR100,
        ),
        "cvt_2_4_32": Size(
            214_539,
            {"num_classes": 10, "global_pool": "seq", "embed_dim": 128, "depth": 2, "num_heads": 2, "mlp_ratio": 1.0},
            cfg=_CIFAR10,
            cfg_of_classes=_CIFAR100,
        ),
        "cvt_4_4_32": Size(
            412_939,
            {"num_classes": 10, "global_pool": "seq", "embed_dim": 128, "depth": 4, "num_heads": 2, "mlp_ratio": 1.0},
            cfg=_CIFAR10,
            cfg_of_classes=_CIFAR100,
        ),
        "cvt_6_4_32": Size(
            3_190_283,
            {"num_classes": 10, "global_pool": "seq", "embed_dim": 256, "depth": 6, "num_heads": 4, "mlp_ratio": 2.0},
            cfg=_CIFAR10,
            cfg_of_classes=_CIFAR100,
        ),
        "cvt_7_4_32": Size(
            3_716_619,
            {"num_classes": 10, "global_pool": "seq", "embed_dim": 256, "depth": 7, "num_heads": 4, "mlp_ratio": 2.0},
            cfg=_CIFAR10,
            cfg_of_classes=_CIFAR100,
        ),
        "cvt_8_4_32": Size(
            4_242_955,
            {"num_classes": 10, "global_pool": "seq", "embed_dim": 256, "depth": 8, "num_heads": 4, "mlp_ratio": 2.0},
            cfg=_CIFAR10,
            cfg_of_classes=_CIFAR100,
        ),
        "cct_2_3x2_32": Size(
            283_723,
            {
                "patch_size": 3,
                "num_classes": 10,
                "global_pool": "seq",
                "embed_dim": 128,
                "depth": 2,
                "num_heads": 2,
                "mlp_ratio": 1.0,
                "tokenizer": "convolutions",
                "conv_layers": 2,
            },
            cfg=_CCT_CIFAR10,
            cfg_of_classes=_CIFAR100,
        ),
        "cct_4_3x2_32": Size(
            482_123,
            {
                "patch_size": 3,
                "num_classes": 10,
                "global_pool": "seq",
                "embed_dim": 128,
                "depth": 4,
                "num_heads": 2,
                "mlp_ratio": 1.0,
                "tokenizer": "convolutions",
                "conv_layers": 2,
            },
            cfg=_CCT_CIFAR10,
            cfg_of_classes=_CIFAR100,
        ),
        "cct_6_3x2_32": Size(
            3_326_923,
            {
                "patch_size": 3,
                "num_classes": 10,
                "global_pool": "seq",
                "embed_dim": 256,
                "depth": 6,
                "num_heads": 4,
                "mlp_ratio": 2.0,
                "tokenizer": "convolutions",
                "conv_layers": 2,
            },
            cfg=_CCT_CIFAR10,
            cfg_of_classes=_CIFAR100,
        ),
        "cct_6_3x1_32": Size(
            3_233_803,
            {
                "patch_size": 3,
                "num_classes": 10,
                "global_pool": "seq",
                "embed_dim": 256,
                "depth": 6,
                "num_heads": 4,
                "mlp_ratio": 2.0,
                "tokenizer": "convolutions",
            },
            cfg=_CCT_CIFAR10,
            cfg_of_classes=_CIFAR100,
        ),
        "cct_7_3x1_32": Size(
            3_760_139,
            {
                "patch_size": 3,
                "num_classes": 10,
                "global_pool": "seq",
                "embed_dim": 256,
                "depth": 7,
                "num_heads": 4,
                "mlp_ratio": 2.0,
                "tokenizer": "convolutions",
            },
            cfg=_CCT_CIFAR10,
            cfg_of_classes=_CIFAR100,
        ),
        "cct_7_7x2_224": Size(
            4_804_521,
            {
                "img_size": 224,
                "patch_size": 7,
                "global_pool": "seq",
                "embed_dim": 256,
                "depth": 7,
                "num_heads": 4,
                "mlp_ratio": 2.0,
                "tokenizer": "convolutions",
                "conv_layers": 2,
            },
            cfg=_CCT,
        ),
        "cct_14_7x2_224": Size(
            22_367_273,
            {
                "img_size": 224,
                "patch_size": 7,
                "global_pool": "seq",
                "embed_dim": 384,
                "depth": 14,
                "num_heads": 6,
                "mlp_ratio": 3.0,
                "tokenizer": "convolutions",
                "conv_layers": 2,
            },
            cfg=_CCT,
        ),
        "cct_14_7x2_384": Size(
            22_513_193,
            {
                "img_size": 384,
                "patch_size": 7,
                "global_pool": "seq",
                "embed_dim": 384,
                "depth": 14,
                "num_heads": 6,
                "mlp_ratio": 3.0,
                "tokenizer": "convolutions",
                "conv_layers": 2,
            },
            cfg=_CCT,
        ),
    },
)
