"""CPVT: a ViT whose position embedding is computed from its tokens, by a PEG."""

from __future__ import annotations

from typing import Any

from graticule.backbones.pvt import check_class_token
from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.backbones.vision_transformer import SMALL, TINY, VisionTransformer
from graticule.position.position import PositionBuilder


class ConditionalVisionTransformer(VisionTransformer):
    """CPVT, with one PEG after the first block, or with five: `encoding="peg(places=[0, 1, 2, 3, 4])"`.

    With global average pooling the final norm is before it, as in the code of the same authors (Twins); in a ViT or
    DeiT it is after it by default, as in timm. So for CPVT's Table 3, which compares the class token with global
    average pooling in both, give `fc_norm=False` to DeiT (or `fc_norm=True` to CPVT), and only the pooling differs.

    Table 4 prints 88 M parameters for CPVT-B with five PEGs; it has 86.5 M (see `graticule.encodings.Peg`).

    Reference: Conditional Positional Encodings for Vision Transformers (CPVT, Chu et al., 2023).

    Args:
        global_pool: 'token' (class token) or 'avg' (GAP).
        class_token: whether there is one; by default, if `global_pool` is 'token'.
        fc_norm: norm after pooling instead of before.
        others: as `VisionTransformer`.
    """

    default_encoding = "peg"

    def __init__(
        self,
        position: PositionBuilder,
        global_pool: str = "token",
        class_token: bool | None = None,
        fc_norm: bool = False,
        **kwargs: Any,
    ) -> None:
        class_token = check_class_token(global_pool, class_token)
        super().__init__(position, global_pool=global_pool, class_token=class_token, fc_norm=fc_norm, **kwargs)


# Table 9: each has the channels, heads and layers of the DeiT of its size. 'gap' has no class token.
register_sizes(
    ConditionalVisionTransformer,
    {
        "cpvt_tiny_patch16_224": Size(5_681_512, TINY),
        "cpvt_tiny_gap_patch16_224": Size(5_681_320, {"global_pool": "avg", **TINY}),
        "cpvt_small_patch16_224": Size(21_978_856, SMALL),
        "cpvt_small_gap_patch16_224": Size(21_978_472, {"global_pool": "avg", **SMALL}),
        "cpvt_base_patch16_224": Size(86_424_040),
        "cpvt_base_gap_patch16_224": Size(86_423_272, {"global_pool": "avg"}),
    },
    crop_pct=0.875,
)
register_small("CPVT, GAP", "cpvt_tiny_gap_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=3)
