"""CeiT: a ViT with convolutions in its stem and its blocks, and attention over the class tokens of all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.backbones.token_model import init_linear
from graticule.backbones.vision_transformer import SMALL, TINY, VisionTransformer
from graticule.layers.attention import Attention
from graticule.layers.block import Block
from graticule.layers.tokenizers import Tokenizer
from graticule.position.grid import Crop, Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import PositionBuilder
from graticule.registry.checks import checked
from graticule.registry.fields import Channels, Ratio, ShareBelowOne, Side, SmallCount


class CeitTransformer(VisionTransformer):
    """CeiT: the class token of the last layer attends to the class tokens of all layers.

    `forward_features` returns only this token, (B, 1, D), after the norm.

    Reference: Incorporating Convolution Designs into Visual Transformers (CeiT, Yuan et al., 2021).

    Args:
        patch_size: on the map of the stem, whose height and width are a quarter of the image's.
        others: as `VisionTransformer`.
    """

    pools = ("token",)  # its head reads the class tokens of all layers
    published_parts = (  # in the authors' code
        ("patch_embed.proj", "i2t.proj"),
        ("patch_embed", "i2t.backbone"),
        ("blocks.*.mlp", "blocks.*.leff"),
    )
    first_conv = "patch_embed.conv"
    whole_grid = "its blocks convolve the map of all patches"
    needs_class_token = True

    def __init__(
        self,
        position: PositionBuilder,
        img_size: Side | tuple[Side, Side] = 224,
        patch_size: Side | tuple[Side, Side] = 4,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            position,
            img_size=img_size,
            patch_size=patch_size,
            embed_layer=ImageToTokens,
            block_layer=LeffBlock,
            **kwargs,
        )
        first: Any = self.blocks[0]
        self.pos_layer_embed = nn.Parameter(torch.zeros(1, len(self.blocks), self.embed_dim))
        self.lca = ClassAttentionOfLayers(
            self.embed_dim,
            first.attn.num_heads,
            kwargs.get("mlp_ratio", 4.0),
            kwargs.get("qkv_bias", True),
            self.proj_drop_rate,
            kwargs.get("attn_drop_rate", 0.0),
            kwargs.get("norm_layer") or partial(nn.LayerNorm, eps=1e-6),
        )
        self.lca.apply(init_linear)

    def forward_features(self, x: Tensor, crop: Crop | None = None, keep: Tensor | None = None) -> Tensor:
        """Turn images (B, C, height, width) into the class token of all layers, (B, 1, D)."""
        return self.features_of(list(self.each_layer(x, crop, keep)))

    def features_of(self, layers: Sequence[tuple[Tensor, Grid]]) -> Tensor:
        """Turn the tokens after each layer into the class token of all layers, (B, 1, D)."""
        tokens = torch.cat([tokens[:, :1] for tokens, _ in layers], 1)  # (B, depth, D)
        return self.norm(self.lca(tokens + self.pos_layer_embed[:, : tokens.shape[1]]))

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of chosen blocks, as `VisionTransformer` does, and the tokens of `forward_features`.

        The latter are computed in a second pass.
        """
        outputs = super().forward_intermediates(x, *args, **kwargs)
        if isinstance(outputs, list):
            return outputs
        final = self.forward_features(x, kwargs.get("crop"))
        if isinstance(outputs, tuple):
            return final, outputs[1]
        return outputs | {"image_features": final} if "image_features" in outputs else outputs


class ClassAttentionOfLayers(nn.Module):
    """A transformer layer whose query is the last layer's class token, and whose keys are all layers' class tokens.

    Reference: CeiT (Yuan et al., 2021), section 3.4, layer-wise class-token attention (LCA).
    """

    @checked
    def __init__(
        self,
        dim: Channels,
        num_heads: SmallCount,
        mlp_ratio: Ratio,
        qkv_bias: bool,
        proj_drop: ShareBelowOne,
        attn_drop: ShareBelowOne,
        norm_layer: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        self.norm1 = norm_layer(dim)
        self.attn = Attention(dim, num_heads, qkv_bias, attn_drop, proj_drop)
        self.norm2 = norm_layer(dim)
        self.feedforward = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """Map the class tokens of the layers, x: (B, layers, D), to one, (B, 1, D)."""
        last = x[:, -1:] + self._attend(self.norm1(x))
        return last + self.feedforward(self.norm2(last))

    def _attend(self, x: Tensor) -> Tensor:
        attn = self.attn
        q, k, v = attn.qkv(x).unflatten(-1, (3, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4)
        dropout = attn.attn_drop if self.training else 0.0
        y = F.scaled_dot_product_attention(q[:, :, -1:], k, v, dropout_p=dropout, scale=attn.scale)
        return attn.proj_drop(attn.proj(y.transpose(1, 2).flatten(2)))


class LocallyEnhancedFeedForward(nn.Module):
    """An MLP with a depth-wise 3 x 3 convolution between its layers, on patches alone; prefix tokens pass unchanged.

    Each of the three convolutions has a batch norm, and the first two an activation.

    Reference: Incorporating Convolution Designs into Visual Transformers (CeiT, Yuan et al., 2021), section 3.3.

    Args:
        dim: D.
        hidden: number of hidden channels.
        act_layer: the activation.
    """

    def __init__(self, dim: int, hidden: int, act_layer: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, hidden, 1)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.conv3 = nn.Conv2d(hidden, dim, 1)
        self.bn3 = nn.BatchNorm2d(dim)
        self.act = act_layer()

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Map tokens x: (B, N, D) to (B, N, D)."""
        maps = grid.to_map(x)  # a view, channels last
        maps = self.act(self.bn1(self.conv1(maps)))
        maps = self.act(self.bn2(self.conv2(maps)))
        patches = grid.from_map(self.bn3(self.conv3(maps)))
        return torch.cat([grid.split(x)[0], patches], 1) if grid.prefix else patches


class LeffBlock(Block):
    r"""Attention, then the locally enhanced feed-forward layer, each after a norm and with a residual connection.

    Reference: CeiT (Yuan et al., 2021), section 3.3.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        act_layer: type[nn.Module] = nn.GELU,
        mlp: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if mlp is not None:
            raise ValueError("`mlp_layer`, `scale_mlp_norm` and `proj_bias` must be left out with CeiT's feed-forward.")
        leff = LocallyEnhancedFeedForward(dim, int(dim * mlp_ratio), act_layer=act_layer)
        super().__init__(dim, num_heads, mlp_ratio, qkv_bias, mlp=leff, **kwargs)

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Grid) -> Tensor:  # noqa: B008
        """Map tokens x: (B, N, D) of the grid to (B, N, D)."""
        (grid,) = where
        x = x + self.drop_path1(self.ls1(self.attn(position.add_after_norm(self.norm1(x)), position, grid)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x), grid)))


class ImageToTokens(Tokenizer):
    """Tokenizer of CeiT: a convolution of stride 2, batch norm and max pooling, then patches of the resulting map.

    Reference: Incorporating Convolution Designs into Visual Transformers (CeiT, Yuan et al., 2021), section 3.2.

    Args:
        patch_size: on the map, whose height and width are a quarter of the image's.
    """

    def __init__(
        self, img_size: tuple[Side, Side], patch_size: tuple[Side, Side], in_chans: SmallCount, embed_dim: Channels
    ) -> None:
        super().__init__(img_size, patch_size)
        channels = 64
        self.conv = nn.Conv2d(in_chans, channels, 7, 2, 3, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.proj = nn.Conv2d(channels, embed_dim, patch_size, patch_size)

    @property
    def reduction(self) -> tuple[int, int]:
        """Return (height, width) in pixels of the patch of a token."""
        return 4 * self.patch_size[0], 4 * self.patch_size[1]

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, height, width) to tokens (B, N, D)."""
        return self.proj(self.maxpool(self.bn(self.conv(x)))).flatten(2).transpose(1, 2)


register_sizes(
    CeitTransformer,
    {
        "ceit_tiny_patch16_224": Size(6_356_904, TINY),
        "ceit_small_patch16_224": Size(24_204_840, SMALL),
        "ceit_base_patch16_224": Size(94_405_416),
        "ceit_tiny_patch16_384": Size(6_429_864, {"img_size": 384, **TINY}),
        "ceit_small_patch16_384": Size(24_350_760, {"img_size": 384, **SMALL}),
    },
)
register_small("CeiT", "ceit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=3)
