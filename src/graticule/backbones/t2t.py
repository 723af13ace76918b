"""T2T-ViT: a ViT whose tokens come from overlapping splits with small transformers between them."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import nn

from graticule.backbones.registry import Size, register_sizes
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.checks import checked
from graticule.encodings import PositionBuilder
from graticule.layers import TokensToToken


class T2tVisionTransformer(VisionTransformer):
    """T2T-ViT; by default with its fixed sinusoidal embedding, which counts the class token as place 0.

    The published weights of the performer models were trained with logits scaled by D^(-1/2): their code asks
    for `qk_scale=embed_dim**-0.5` where they are loaded.

    Reference: Tokens-to-Token ViT (Yuan et al., 2021).

    Args:
        position: builds the position.
        token_dim: channels of the tokens between the splits.
        tokens_type: 'performer' or 'transformer'.
        kwargs: as `VisionTransformer`; queries, keys and values have no bias by default.
    """

    first_conv = ()  # its soft splits are no convolutions
    default_encoding = "sinusoidal_1d"

    @checked
    def __init__(
        self,
        position: PositionBuilder,
        img_size: int | tuple[int, int] = 224,
        token_dim: int = 64,
        tokens_type: Literal["performer", "transformer"] = "performer",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            position,
            img_size=img_size,
            embed_layer=partial(TokensToToken, token_dim=token_dim, tokens_type=tokens_type),
            **{"qkv_bias": False, "norm_layer": nn.LayerNorm, **kwargs},
        )

    def own_name(self, published: str) -> str:
        """Return our name of a parameter of its code."""
        return published.replace("tokens_to_token.", "patch_embed.", 1)

    def published_name(self, own: str) -> str:
        """Return the name of a parameter in its code."""
        return own.replace("patch_embed.", "tokens_to_token.", 1)


# 't' has transformers between the splits, the others performers.
register_sizes(
    T2tVisionTransformer,
    {
        "t2t_vit_7": Size(4_310_222, {"embed_dim": 256, "depth": 7, "num_heads": 4, "mlp_ratio": 2.0}),
        "t2t_vit_10": Size(5_889_230, {"embed_dim": 256, "depth": 10, "num_heads": 4, "mlp_ratio": 2.0}),
        "t2t_vit_12": Size(6_941_902, {"embed_dim": 256, "num_heads": 4, "mlp_ratio": 2.0}),
        "t2t_vit_14": Size(21_545_550, {"embed_dim": 384, "depth": 14, "num_heads": 6, "mlp_ratio": 3.0}),
        "t2t_vit_19": Size(39_177_422, {"embed_dim": 448, "depth": 19, "num_heads": 7, "mlp_ratio": 3.0}),
        "t2t_vit_24": Size(64_105_934, {"embed_dim": 512, "depth": 24, "num_heads": 8, "mlp_ratio": 3.0}),
        "t2t_vit_t_14": Size(
            21_541_070, {"embed_dim": 384, "depth": 14, "num_heads": 6, "mlp_ratio": 3.0, "tokens_type": "transformer"}
        ),
        "t2t_vit_t_19": Size(
            39_172_942, {"embed_dim": 448, "depth": 19, "num_heads": 7, "mlp_ratio": 3.0, "tokens_type": "transformer"}
        ),
        "t2t_vit_t_24": Size(
            64_101_454, {"embed_dim": 512, "depth": 24, "num_heads": 8, "mlp_ratio": 3.0, "tokens_type": "transformer"}
        ),
    },
)
