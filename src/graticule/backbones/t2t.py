"""T2T-ViT: a ViT whose tokens come from overlapping splits with small transformers between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from timm.models import register_notrace_module
from torch import Tensor, nn

from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.layers.tokenizers import Tokenizer
from graticule.position.position import PositionBuilder
from graticule.registry.fields import Channels, Side, SmallCount
from graticule.system.symbolic import without_autocast


class T2tVisionTransformer(VisionTransformer):
    """T2T-ViT; by default with its fixed sinusoidal embedding, in which the class token has position 0.

    The published weights of the performer models were trained with logits scaled by D^(-1/2): their code loads them
    with `qk_scale=embed_dim**-0.5`.

    Reference: Tokens-to-Token ViT (Yuan et al., 2021).

    Args:
        token_dim: channels of the tokens between the splits.
        tokens_type: 'performer' or 'transformer'.
        others: as `VisionTransformer`; queries, keys and values have no bias by default.
    """

    first_conv = ()  # its soft splits are not convolutions
    default_encoding = "sinusoidal_1d"
    published_parts = (("patch_embed", "tokens_to_token"),)  # in the authors' code

    def __init__(
        self,
        position: PositionBuilder,
        img_size: Side | tuple[Side, Side] = 224,
        token_dim: Channels = 64,
        tokens_type: Literal["performer", "transformer"] = "performer",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            position,
            img_size=img_size,
            embed_layer=partial(TokensToToken, token_dim=token_dim, tokens_type=tokens_type),
            **{"qkv_bias": False, "norm_layer": nn.LayerNorm, **kwargs},
        )


class TokensToToken(Tokenizer):
    """Tokenizer of T2T-ViT: three soft splits, and a small transformer on the tokens of the first two.

    A soft split turns overlapping windows into one token each: 7 x 7 with stride 4, then twice 3 x 3 with stride 2.

    Reference: Tokens-to-Token ViT (Yuan et al., 2021), section 3.1.

    Args:
        img_size: (height, width) in pixels, multiples of 16.
        patch_size: 16 x 16, the patch of a token.
        token_dim: channels of the tokens between the splits.
        tokens_type: 'performer' or 'transformer', the kind of the two small transformers.
    """

    def __init__(
        self,
        img_size: tuple[Side, Side],
        patch_size: tuple[Side, Side],
        in_chans: SmallCount,
        embed_dim: Channels,
        token_dim: Channels = 64,
        tokens_type: Literal["performer", "transformer"] = "performer",
    ) -> None:
        super().__init__(img_size, patch_size)
        if patch_size != (16, 16):
            raise ValueError(f"`patch_size` must be 16, which the three splits make, got {patch_size}.")
        kind = TokenPerformer if tokens_type == "performer" else TokenTransformer
        self.attention1 = kind(in_chans * 7 * 7, token_dim)
        self.attention2 = kind(token_dim * 3 * 3, token_dim)
        self.project = nn.Linear(token_dim * 3 * 3, embed_dim)

    @property
    def reduction(self) -> tuple[int, int]:
        """Return (height, width) in pixels of the patch of a token."""
        return 16, 16

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, height, width) to tokens (B, N, D)."""
        sides = (x.shape[-2] // 4, x.shape[-1] // 4)
        x = self.attention1(F.unfold(x, 7, stride=4, padding=2).transpose(1, 2))
        x = self.attention2(_split(x, sides))
        return self.project(_split(x, (sides[0] // 2, sides[1] // 2)))


def _split(x: Tensor, sides: Sequence[int]) -> Tensor:
    """Turn the 3 x 3 windows, with stride 2, of tokens x: (B, N, C) into tokens (B, N / 4, 9C)."""
    maps = x.transpose(1, 2).unflatten(-1, tuple(sides))
    return F.unfold(maps, 3, stride=2, padding=1).transpose(1, 2)


class TokenTransformer(nn.Module):
    """A transformer layer of one head with narrower outputs; the values are the residual connection.

    The logits are scaled by the input channels, not by the channels of a head, as in the authors' code.

    Reference: Tokens-to-Token ViT (Yuan et al., 2021), Eq. 1.
    """

    def __init__(self, dim: int, token_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(dim, 3 * token_dim, bias=False), "proj": nn.Linear(token_dim, token_dim)}
        )
        self.norm2 = nn.LayerNorm(token_dim)
        self.mlp = Mlp(token_dim, token_dim)
        self.scale = dim**-0.5

    def forward(self, x: Tensor) -> Tensor:
        """Map x: (B, N, C) to (B, N, token_dim)."""
        q, k, v = self.attn["qkv"](self.norm1(x)).unsqueeze(1).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        x = (v + self.attn["proj"](y)).squeeze(1)
        return x + self.mlp(self.norm2(x))


@register_notrace_module  # torch.fx records the call as one node: autocast depends on the device
class TokenPerformer(nn.Module):
    r"""A `TokenTransformer` whose attention is linear in N, by positive random features.

    .. math:: \phi(x) = e^{w x - |x|^2 / 2} / \sqrt m, \quad
              y_i = \frac{\phi(q_i)^T \sum_j \phi(k_j) v_j^T}{\phi(q_i)^T \sum_j \phi(k_j) + 10^{-8}}

    The m = C / 2 features w are orthogonal, drawn once and not learned. Attention is computed in float32 or wider.

    Reference: Rethinking Attention with Performers (Choromanski et al., 2021), as used in T2T-ViT.
    """

    def __init__(self, dim: int, token_dim: int) -> None:
        super().__init__()
        self.kqv = nn.Linear(dim, 3 * token_dim)
        self.dp = nn.Dropout(0.1)
        self.proj = nn.Linear(token_dim, token_dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(token_dim)
        self.mlp = nn.Sequential(
            nn.Linear(token_dim, token_dim), nn.GELU(), nn.Linear(token_dim, token_dim), nn.Dropout(0.1)
        )
        self.features = token_dim // 2
        self.w = nn.Parameter(torch.empty(self.features, token_dim), requires_grad=False)
        nn.init.orthogonal_(self.w, math.sqrt(self.features))

    def forward(self, x: Tensor) -> Tensor:
        """Map x: (B, N, C) to (B, N, token_dim)."""
        k, q, v = self.kqv(self.norm1(x)).chunk(3, -1)
        x = v + self.dp(self.proj(self._attend(q, k, v).to(v.dtype)))
        return x + self.mlp(self.norm2(x))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with without_autocast(q):
            wide = torch.promote_types(self.w.dtype, torch.float32)
            keys, queries = self._features(k.to(wide)), self._features(q.to(wide))  # (B, N, m)
            summed = keys.transpose(1, 2) @ v.to(wide)  # (B, m, token_dim)
            total = queries @ keys.sum(1).unsqueeze(-1)  # (B, N, 1)
            return queries @ summed / (total + 1e-8)

    def _features(self, x: Tensor) -> Tensor:
        return (x @ self.w.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(self.features)


_D256 = {"embed_dim": 256, "num_heads": 4, "mlp_ratio": 2.0}
_D384 = {"embed_dim": 384, "depth": 14, "num_heads": 6, "mlp_ratio": 3.0}
_D448 = {"embed_dim": 448, "depth": 19, "num_heads": 7, "mlp_ratio": 3.0}
_D512 = {"embed_dim": 512, "depth": 24, "num_heads": 8, "mlp_ratio": 3.0}
_TRANSFORMER = {"tokens_type": "transformer"}  # instead of performers, between the splits
register_sizes(
    T2tVisionTransformer,
    {
        "t2t_vit_7": Size(4_310_222, {**_D256, "depth": 7}),
        "t2t_vit_10": Size(5_889_230, {**_D256, "depth": 10}),
        "t2t_vit_12": Size(6_941_902, _D256),
        "t2t_vit_14": Size(21_545_550, _D384),
        "t2t_vit_19": Size(39_177_422, _D448),
        "t2t_vit_24": Size(64_105_934, _D512),
        "t2t_vit_t_14": Size(21_541_070, {**_D384, **_TRANSFORMER}),
        "t2t_vit_t_19": Size(39_172_942, {**_D448, **_TRANSFORMER}),
        "t2t_vit_t_24": Size(64_101_454, {**_D512, **_TRANSFORMER}),
    },
)
register_small("T2T-ViT", "t2t_vit_7", img_size=32, embed_dim=24, depth=2, num_heads=3, token_dim=8)
