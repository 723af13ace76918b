"""CaiT: talking-heads attention among the patches, then class attention, in which only the class token is updated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import LayerScale, Mlp
from timm.models.cait import ClassAttn
from torch import Tensor, nn

from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.layers.attention import Attention
from graticule.layers.parts import act_layer_of, norm_layer_of
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import PositionBuilder


class LateTokenTransformer(VisionTransformer):
    """A ViT whose first blocks see patches alone: prefix tokens join later and have no position."""

    def grid_at(self, image: tuple[int, ...]) -> Grid:
        """Return the grid of the patches of an image of `image` = (height, width), in pixels."""
        return self.patch_embed.grid(image)

    def position_grids(self, grid: Grid) -> list[Grid]:
        """Return the grid of the patches."""
        return [grid]

    def embed(self, x: Tensor, stage: int = 0) -> Tensor:
        """Turn images into the tokens of their patches, (B, H * W, D)."""
        return self.tokenize(x, stage).contiguous()


class Cait(LateTokenTransformer):
    """CaiT as published: blocks of talking-heads attention over the patches, then blocks of class attention.

    All blocks have LayerScale. The class token joins after the last block of patches and has no position. The blocks
    after that update only the class token: it attends to itself and to the patches, which do not change. Any encoding
    and joining applies to the blocks of patches. A bias is added to the logits of its own head, before heads are mixed.

    Intermediates are those of the patches. Stochastic depth has the same rate in all blocks of patches and is 0 after
    them, as published. The names of the parameters are timm's, except those of position and of LayerScale;
    `load_state_dict` accepts timm's.

    Reference: Going Deeper with Image Transformers (CaiT, Touvron et al., 2021); Talking-Heads Attention (Shazeer et
    al., 2020).

    Args:
        position: builds the position of the patches.
        global_pool: 'token' (class token), 'avg' or ''.
        depth_token_only: number of blocks of class attention.
        mlp_ratio_token_only: hidden channels of their MLPs, as a multiple of D.
        init_values: initial weights of LayerScale.
        repeats: how often the class token counts in its softmax: T in a model of images that became one of films of T
            frames (`graticule.resize`), in which each patch stands T times.
        others: as `VisionTransformer`, with one class token and no register tokens.
    """

    pools: ClassVar[tuple[str, ...]] = ("", "token", "avg")
    published_parts = (  # in timm
        *LateTokenTransformer.published_parts,
        (".ls1.gamma", ".gamma_1"),
        (".ls2.gamma", ".gamma_2"),
    )

    def __init__(
        self,
        position: PositionBuilder,
        global_pool: str = "token",
        depth_token_only: int = 2,
        mlp_ratio_token_only: float = 4.0,
        init_values: float = 1e-5,
        repeats: int = 1,
        embed_dim: int = 768,
        num_heads: int = 16,
        qkv_bias: bool = True,
        attn_drop_rate: float = 0.0,
        norm_layer: str | Callable[[int], nn.Module] | None = None,
        act_layer: str | type[nn.Module] | None = None,
        **kwargs: Any,
    ) -> None:
        if not kwargs.get("class_token", True) or kwargs.get("reg_tokens") or kwargs.get("fc_norm"):
            raise ValueError(
                "`class_token` must be True with class attention, and `reg_tokens` and `fc_norm` must be left out."
            )
        if init_values <= 0 or min(depth_token_only, repeats) < 1:
            raise ValueError(
                "`init_values` must be positive and `depth_token_only` and `repeats` at least 1, got "
                f"{init_values}, {depth_token_only} and {repeats}."
            )
        same = {"norm_layer": norm_layer, "act_layer": act_layer, "attn_drop_rate": attn_drop_rate}
        super().__init__(
            position,
            global_pool=global_pool,
            init_values=init_values,
            embed_dim=embed_dim,
            num_heads=num_heads,
            qkv_bias=qkv_bias,
            **{"fc_norm": False, **same, **kwargs},
        )
        self.repeats = repeats
        self.blocks_token_only = nn.ModuleList(
            ClassAttentionBlock(
                embed_dim,
                num_heads,
                mlp_ratio_token_only,
                qkv_bias,
                self.proj_drop_rate,
                attn_drop_rate,
                norm_layer_of(norm_layer),
                act_layer_of(act_layer) or nn.GELU,
                init_values,
            )
            for _ in range(depth_token_only)
        )
        for name, module in self.blocks_token_only.named_modules():
            self.init_module(name, module)

    def attention_kind(self, layer: int) -> type[Attention]:
        """Return the class of the attention of a layer."""
        return TalkingHeadsAttention

    def drop_path_rates(self) -> list[float]:
        """Return the rate of stochastic depth of each block: the same for all."""
        return [self.drop_path_rate] * self.depths[0]

    def final(self, x: Tensor, grid: Grid) -> Tensor:
        """Let the class token attend to the patches x: (B, H * W, D), prepend it to them, and normalize all tokens."""
        for token in self._prefix_tokens():
            read = token.expand(x.shape[0], -1, -1)
            for block in self.blocks_token_only:
                read = block(read, x, self.repeats)
            x = torch.cat([read, x], 1)
        features: Tensor = self.norm(x)
        return features

    def become_films(self) -> dict[str, Any]:
        """Count the class token once per frame, and divide the biases of mixed heads, which are summed over patches."""
        self.repeats = self.grid_at(self.img_size).shape[0]
        attentions = [module for module in self.modules() if isinstance(module, TalkingHeadsAttention)]
        for heads in (attention.proj_w for attention in attentions):
            heads.bias = nn.Parameter(heads.bias.detach() / self.repeats, heads.bias.requires_grad)
        return {"repeats": self.repeats}

    def normed(self, x: Tensor, grid: Grid) -> Tensor:
        """Apply the final norm to tokens between the blocks, (B, H * W, D)."""
        y: Tensor = self.norm(x)
        return y

    @property
    def map_prefix_tokens(self) -> int:
        """Return the number of prefix tokens of the intermediates: none."""
        return 0

    def remove_head(self) -> None:
        """Remove the classifier, the class token and its blocks."""
        super().remove_head()
        self.blocks_token_only = nn.ModuleList()
        self.cls_token = None
        self.prefix_names, self.num_prefix_tokens = (), 0


class TalkingHeadsAttention(Attention):
    r"""Attention whose heads are mixed by a linear map before the softmax, and by another after it.

    .. math:: W' \, softmax(W (q k^T / \sqrt d + bias)) \, v

    The bias is added to the logits of its own head, together with the product of queries and keys; where it is minus
    infinity in all heads, it is a mask of the mixed logits and weights. The arguments are those of `Attention`.

    Reference: Talking-Heads Attention (Shazeer et al., 2020); CaiT (Touvron et al., 2021), section 5.
    """

    def __init__(self, dim: int, num_heads: int = 8, *args: Any, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, *args, **kwargs)
        self.proj_l, self.proj_w = (nn.Linear(num_heads, num_heads) for _ in range(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, position: LayerPosition) -> Tensor:
        """Mix the values: (B, h, N, d)."""
        weights = _mixed_heads(self.proj_w, self._weights(q, k, bias, position))
        weights = weights if bias is None else weights.masked_fill(_masked(bias), 0)
        weights = F.dropout(weights, self.attn_drop, self.training)
        mixed = weights @ v
        return mixed if position.value_bias is None else mixed + position.value_bias(weights)

    def _weights(self, q: Tensor, k: Tensor, bias: Tensor | None, position: LayerPosition) -> Tensor:
        """Compute the attention weights before heads are mixed again, (B, h, N, N), rows summing to 1."""
        logits = q * self.scale @ k.transpose(-2, -1)
        if bias is None:
            weights = _mixed_heads(self.proj_l, logits).softmax(-1)
        else:
            masked = _masked(bias)
            logits = _mixed_heads(self.proj_l, logits + bias.masked_fill(masked, 0))
            weights = logits.masked_fill(masked, -torch.inf).softmax(-1)
        return weights if position.positional is None else position.positional.blend(weights)


def _masked(bias: Tensor) -> Tensor:
    """Return whether a bias (B, h, N, M) is minus infinity in all heads, (B, 1, N, M)."""
    return bias.isneginf().all(1, keepdim=True)


def _mixed_heads(projection: nn.Module, x: Tensor) -> Tensor:
    """Mix the heads of x: (B, h, N, M)."""
    y: Tensor = projection(x.movedim(1, -1).contiguous())
    return y.movedim(-1, 1)


class ClassAttentionBlock(nn.Module):
    """Class attention, then an MLP of the class token, each after a norm, with LayerScale and a residual connection.

    The arguments are those of `Block`. Reference: CaiT (Touvron et al., 2021), Figure 2.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        qkv_bias: bool,
        proj_drop: float,
        attn_drop: float,
        norm_layer: Callable[[int], nn.Module],
        act_layer: type[nn.Module],
        init_values: float,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm_layer(dim), norm_layer(dim)
        self.attn = ClassAttn(dim, num_heads, qkv_bias, attn_drop, proj_drop)  # Eq. 6-8
        self.ls1, self.ls2 = LayerScale(dim, init_values), LayerScale(dim, init_values)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer, drop=proj_drop)

    def forward(self, token: Tensor, x: Tensor, repeats: int = 1) -> Tensor:
        """Map the class token (B, 1, D), which attends to the patches x: (B, N, D), to (B, 1, D).

        The class token is `repeats` times among the keys, so that its weight in the softmax is that of so many tokens.
        """
        token = token + self.ls1(self.attn(self.norm1(torch.cat([token] * repeats + [x], 1))))
        out: Tensor = token + self.ls2(self.mlp(self.norm2(token)))
        return out


_XXS: dict[str, Any] = {"embed_dim": 192, "num_heads": 4}
_XS: dict[str, Any] = {"embed_dim": 288, "num_heads": 6}
_S: dict[str, Any] = {"embed_dim": 384, "num_heads": 8}
_36 = {"depth": 36, "init_values": 1e-6}
register_sizes(
    Cait,
    {
        "cait_xxs24_224": Size(11_956_264, {**_XXS, "depth": 24, "img_size": 224}, hub="fb_dist_in1k"),
        "cait_xxs24_384": Size(12_029_224, {**_XXS, "depth": 24, "img_size": 384}, hub="fb_dist_in1k"),
        "cait_xxs36_224": Size(17_299_720, {**_XXS, "depth": 36, "img_size": 224}, hub="fb_dist_in1k"),
        "cait_xxs36_384": Size(17_372_680, {**_XXS, "depth": 36, "img_size": 384}, hub="fb_dist_in1k"),
        "cait_xs24_384": Size(26_670_088, {**_XS, "depth": 24, "img_size": 384}, hub="fb_dist_in1k"),
        "cait_s24_224": Size(46_916_200, {**_S, "depth": 24, "img_size": 224}, hub="fb_dist_in1k"),
        "cait_s24_384": Size(47_062_120, {**_S, "depth": 24, "img_size": 384}, hub="fb_dist_in1k"),
        "cait_s36_384": Size(68_366_632, {**_S, **_36, "img_size": 384}, hub="fb_dist_in1k"),
        "cait_m36_384": Size(271_221_352, {**_36, "img_size": 384}, hub="fb_dist_in1k"),
        "cait_m48_448": Size(356_460_520, {**_36, "depth": 48, "img_size": 448}, hub="fb_dist_in1k"),
    },
    crop_pct=1.0,
)
register_small("CaiT", "cait_xxs24_224", img_size=32, embed_dim=24, depth=2, num_heads=3)
