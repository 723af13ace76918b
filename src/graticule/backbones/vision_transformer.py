"""ViT, with any encoding and any joining."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from timm.layers.helpers import to_2tuple
from torch import Tensor, nn

from graticule.backbones.base import Backbone, init_linear
from graticule.backbones.registry import Size, register_sizes
from graticule.checks import checked
from graticule.encodings import PositionBuilder
from graticule.grid import Grid
from graticule.layers import Attention, Block, Patches, Tokenizer


class VisionTransformer(Backbone):
    """Pre-norm blocks over the patches of an image, each with the `LayerPosition` that `position(grid)` has for it.

    The names of the parameters are timm's, except those of `position`; `load_state_dict` takes published names too.

    Reference: An Image Is Worth 16x16 Words (Dosovitskiy et al., 2021); DeiT (Touvron et al., 2021).

    Args:
        position: builds the position (`graticule.encodings.PositionBuilder`).
        img_size: pixels, a side or (height, width).
        patch_size: pixels, a side or (height, width).
        in_chans: channels of the image.
        num_classes: 0 for no head.
        global_pool: 'token' (class token), 'avg', 'max', 'avgmax', 'seq' (sequence pooling) or '' (none).
        embed_dim: D.
        depth: number of blocks.
        num_heads: h.
        mlp_ratio: hidden channels of the MLPs, as a multiple of D.
        qkv_bias: whether queries, keys and values have a bias.
        class_token: whether there is one; as in timm it stays, unused, with another `global_pool` unless it is False.
        reg_tokens: number of register tokens.
        fc_norm: norm after pooling instead of before; by default, where `global_pool` is a pooling of patches, as in
            timm. CPVT's models have it before in any case.
        drop_rate: dropout before the head.
        pos_drop_rate: dropout on the tokens that enter the first block.
        proj_drop_rate: dropout on the outputs of attention and MLP.
        attn_drop_rate: dropout on attention weights.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 at the first.
        norm_layer: builds a norm from D.
        act_layer: the MLPs' activation.
        embed_layer: builds what turns images into tokens from image size, patch size, channels and D.
        block_layer: builds a block.
        qk_scale: factor of the attention logits instead of d^(-1/2).
    """

    pools = ("", "token", "avg", "avgmax", "max", "seq")
    prefix_names: tuple[str, ...] = ("cls_token", "reg_token")

    patch_embed: Patches | Tokenizer

    @checked
    def __init__(
        self,
        position: PositionBuilder,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        class_token: bool = True,
        reg_tokens: int = 0,
        fc_norm: bool | None = None,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_layer: Callable[[int], nn.Module] | None = None,
        act_layer: type[nn.Module] | None = None,
        embed_layer: Callable[..., Patches | Tokenizer] = Patches,
        block_layer: Callable[..., nn.Module] = Block,
        qk_scale: float | None = None,
    ) -> None:
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            embed_dims=(embed_dim,),
            depths=(depth,),
            global_pool=global_pool,
            drop_rate=drop_rate,
            pos_drop_rate=pos_drop_rate,
        )
        norm_layer = norm_layer or partial(nn.LayerNorm, eps=1e-6)
        act_layer = act_layer or nn.GELU
        fc_norm = global_pool in ("avg", "avgmax", "max") if fc_norm is None else fc_norm
        self.embed_dim = embed_dim
        self.has_class_token = class_token

        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, reg_tokens, embed_dim)) if reg_tokens else None
        self._add_prefix_tokens()
        self.patch_embed = embed_layer(self.img_size, self.patch_size, in_chans, embed_dim)
        self.build_position(position, num_heads)
        rates = torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()  # stochastic depth decay rule
        self.blocks = nn.Sequential(
            *[
                block_layer(
                    embed_dim,
                    num_heads,
                    mlp_ratio,
                    qkv_bias,
                    attn=Attention(embed_dim, num_heads, qkv_bias, attn_drop_rate, proj_drop_rate, qk_scale),
                    proj_drop=proj_drop_rate,
                    drop_path=rate,
                    norm_layer=norm_layer,
                    act_layer=act_layer,
                )
                for rate in rates
            ]
        )
        self.norm = nn.Identity() if fc_norm else norm_layer(embed_dim)
        self.fc_norm = norm_layer(embed_dim) if fc_norm else nn.Identity()
        self.attn_pool = nn.Linear(embed_dim, 1) if global_pool == "seq" else None
        self.head = self._classifier()
        self.finish()

    def _add_prefix_tokens(self) -> None:
        """Make the prefix tokens that a subclass has beside the class and register tokens."""

    def check_pool(self, global_pool: str) -> None:
        """Check a value of `global_pool`."""
        if global_pool == "token" and not self.has_class_token:
            raise ValueError("`class_token` must be True where `global_pool` is 'token', got False.")
        super().check_pool(global_pool)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new one for `num_classes`; 0 for none."""
        super().reset_classifier(num_classes, global_pool)
        if self.global_pool == "seq" and self.attn_pool is None:
            self.attn_pool = nn.Linear(self.embed_dim, 1)
            self._like_weights(self.attn_pool)
            init_linear(self.attn_pool)
        if self.global_pool != "seq":
            self.attn_pool = None

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Make another image or patch size the one that position information is held for.

        Args:
            img_size: pixels, a side or (height, width); unchanged by default.
            patch_size: pixels, a side or (height, width); unchanged by default.
        """
        image = to_2tuple(self.img_size if img_size is None else img_size)
        patch = to_2tuple(self.patch_size if patch_size is None else patch_size)
        self.patch_embed.set_input_size(img_size=image, patch_size=patch)
        self.patch_size = patch
        super().set_input_size(image)

    @property
    def coarsest_patch(self) -> tuple[int, int]:
        """(height, width) in pixels of the patch of a token."""
        return self.patch_embed.reduction

    def grid_at(self, image: tuple[int, int]) -> Grid:
        """Return the grid of an image of `image` = (height, width), in pixels.

        Raises:
            ValueError: if a side is not a multiple of the patch, or breaks another rule of the tokenizer.
        """
        return self.patch_embed.grid(image, self.num_prefix_tokens)

    def tokenize(self, x: Tensor, stage: int = 0) -> Tensor:
        """Turn images (B, C, height, width) into tokens (B, H * W, D), row by row."""
        tokens: Tensor = self.patch_embed(x)
        return tokens

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the blocks that the intermediates of `indices` do not need; returns the kept indices."""
        if prune_head:
            self.fc_norm = nn.Identity()
        return super().prune_intermediate_layers(indices, prune_norm, prune_head)

    def pool(self, x: Tensor) -> Tensor:
        """Pool tokens (B, N, D) as `global_pool` says: (B, D)."""
        if self.attn_pool is not None:
            patches = x[:, self.num_prefix_tokens :]
            x = (self.attn_pool(patches).softmax(1).transpose(1, 2) @ patches).squeeze(1)
        else:
            x = super().pool(x)
        pooled: Tensor = self.fc_norm(x)
        return pooled


#: D and h of the sizes of DeiT below the default, with 12 blocks.
TINY = {"embed_dim": 192, "num_heads": 3}
SMALL = {"embed_dim": 384, "num_heads": 6}
_FOR_28 = {
    **{"img_size": 28, "patch_size": 4, "in_chans": 1, "num_classes": 10},
    **{"depth": 6, "num_heads": 4, "mlp_ratio": 2.0},
}
_INCEPTION = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
# Nano and micro are for small images.
register_sizes(
    VisionTransformer,
    {
        "vit_nano_patch4_28": Size(205_962, {**_FOR_28, "embed_dim": 64}),
        "vit_micro_patch4_28": Size(805_130, {**_FOR_28, "embed_dim": 128}),
        "vit_tiny_patch16_224": Size(
            5_717_416, TINY, hub="timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", cfg=_INCEPTION
        ),
        "vit_small_patch16_224": Size(
            22_050_664, SMALL, hub="timm/vit_small_patch16_224.augreg_in21k_ft_in1k", cfg=_INCEPTION
        ),
        "vit_small_patch32_224": Size(
            22_878_952,
            {"patch_size": 32, **SMALL},
            hub="timm/vit_small_patch32_224.augreg_in21k_ft_in1k",
            cfg=_INCEPTION,
        ),
        "vit_base_patch8_224": Size(
            86_576_872, {"patch_size": 8}, hub="timm/vit_base_patch8_224.augreg_in21k_ft_in1k", cfg=_INCEPTION
        ),
        "vit_base_patch16_224": Size(86_567_656, hub="timm/vit_base_patch16_224.augreg_in21k_ft_in1k", cfg=_INCEPTION),
        "vit_base_patch32_224": Size(
            88_224_232, {"patch_size": 32}, hub="timm/vit_base_patch32_224.augreg_in21k_ft_in1k", cfg=_INCEPTION
        ),
    },
)
