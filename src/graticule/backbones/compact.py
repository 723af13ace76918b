"""ViT-Lite, CVT and CCT: small transformers for small images."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from timm.layers.helpers import to_2tuple
from torch import Tensor, nn

from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.checkpoints.layouts import rename_start
from graticule.layers.block import Block
from graticule.layers.tokenizers import Patches, Tokenizer
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import PositionBuilder
from graticule.registry.fields import Channels, Depth, LayerIndex, ShareBelowOne, Side, SmallCount

#: The patches as the authors' code has them, one convolution of the tokenizer.
_PATCHES = "patch_embed.proj", "patch_embed.conv_layers.0.0"


class CompactTransformer(VisionTransformer):
    """ViT-Lite (patches, class token), CVT (patches, sequence pooling) or CCT (convolutions, sequence pooling).

    Its blocks apply their second norm to the residual stream (`CompactBlock`), its norms have an epsilon of 1e-5, and
    queries, keys and values have no bias. Sequence pooling weights the patches by a softmax of a learned score.

    Reference: Escaping the Big Data Paradigm with Compact Transformers (Hassani et al., 2021).

    Args:
        tokenizer: 'patches' or 'convolutions'.
        conv_layers: number of convolutions.
        conv_stride: their stride; max(1, kernel // 2 - 1) by default, where the kernel is `patch_size`.
        conv_padding: their padding; max(1, kernel // 2) by default.
        others: as `VisionTransformer`; the dropout of attention weights is 0.1 by default.
    """

    encoding_options: ClassVar = {"learnable": {"std": 0.2}}  # as in the authors' code
    published_parts = (
        ("patch_embed", "tokenizer"),
        ("cls_token", "classifier.class_emb"),
        ("pos_embed", "classifier.positional_emb"),
        ("norm", "classifier.norm"),
        ("attn_pool", "classifier.attention_pool"),
        ("head", "classifier.fc"),
        ("blocks.*.norm1", "classifier.blocks.*.pre_norm"),
        ("blocks.*.attn", "classifier.blocks.*.self_attn"),
        ("blocks.*.norm2", "classifier.blocks.*.norm1"),
        ("blocks.*.mlp.fc1", "classifier.blocks.*.linear1"),
        ("blocks.*.mlp.fc2", "classifier.blocks.*.linear2"),
    )

    def __init__(
        self,
        position: PositionBuilder,
        img_size: Side | tuple[Side, Side] = 32,
        patch_size: Side | tuple[Side, Side] = 4,
        global_pool: str = "token",
        tokenizer: Literal["patches", "convolutions"] = "patches",
        conv_layers: Depth = 1,
        conv_stride: int | None = None,
        conv_padding: int | None = None,
        attn_drop_rate: ShareBelowOne = 0.1,
        **kwargs: Any,
    ) -> None:
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

    def init_weights(self, mode: str = "") -> None:
        """Initialize the weights as in the authors' code: the class token at zero, patches by Kaiming's normal."""
        super().init_weights(mode)
        for token in self._prefix_tokens():
            nn.init.zeros_(token)
        if isinstance(self.patch_embed, Patches):
            nn.init.kaiming_normal_(self.patch_embed.proj.weight)

    def own_name(self, published: str) -> str:
        """Return our name for a parameter of the authors' code."""
        name = super().own_name(published)
        return rename_start(name, *_PATCHES[::-1]) if isinstance(self.patch_embed, Patches) else name

    def published_name(self, name: str) -> str:
        """Return the name of a parameter in the authors' code."""
        return super().published_name(rename_start(name, *_PATCHES))


class CompactBlock(Block):
    r"""Pre-norm attention with a residual connection, a norm of the sum, and an MLP with a residual connection.

    .. math:: x' = LN(x + MSA(LN(x) + p)), \quad x'' = x' + MLP(x')

    where p is `after_norm` of the layer's position. So the second norm changes the residual stream, unlike ViT's.

    Reference: Compact Transformers (Hassani et al., 2021), whose text shows ViT's block and whose code has this one.
    """

    pre_norm = False

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Grid) -> Tensor:  # noqa: B008
        """Map tokens x: (B, N, D) to (B, N, D); `where` is the grid, for an attention that needs it."""
        y = self.ls1(self.attn(position.add_after_norm(self.norm1(x)), position, *where))
        x = self.norm2(x + self.drop_path1(y))
        return x + self.drop_path2(self.ls2(self.mlp(x)))

    def carried(self, table: Tensor) -> Tensor:
        """Return a table on the residual stream, (N, D), as it is after the block."""
        return self.norm2(table)


class ConvolutionalTokenizer(Tokenizer):
    """Tokenizer of CCT: convolutions without bias, each followed by a ReLU and a max pooling.

    It accepts any image that yields at least one token; as in the authors' code, sides may be of any length.

    Reference: Escaping the Big Data Paradigm with Compact Transformers (Hassani et al., 2021), section 3.

    Args:
        patch_size: kernel of the convolutions, (side, side).
        embed_dim: D, channels of the last convolution.
        layers: number of convolutions; those before the last have 64 channels.
        stride: stride of the convolutions; max(1, kernel // 2 - 1) by default, as in the authors' code.
        padding: padding of the convolutions; max(1, kernel // 2) by default.
    """

    def __init__(
        self,
        img_size: tuple[Side, Side],
        patch_size: tuple[Side, Side],
        in_chans: SmallCount,
        embed_dim: Channels,
        layers: LayerIndex = 1,
        stride: int | None = None,
        padding: int | None = None,
    ) -> None:
        super().__init__(img_size, patch_size)
        kernel = max(patch_size)
        if patch_size[0] != patch_size[1] or layers < 1:
            raise ValueError(f"`patch_size` must be square and `layers` at least 1, got {patch_size} and {layers}.")
        self.kernel = kernel
        self.stride = max(1, kernel // 2 - 1) if stride is None else stride
        self.padding = max(1, kernel // 2) if padding is None else padding
        channels = [in_chans, *[64] * (layers - 1), embed_dim]
        self.conv_layers = nn.Sequential(
            *[
                nn.Sequential(
                    nn.Conv2d(before, after, kernel, self.stride, self.padding, bias=False),
                    nn.ReLU(),
                    nn.MaxPool2d(3, 2, 1),
                )
                for before, after in itertools.pairwise(channels)
            ]
        )
        for layer in self.conv_layers:
            assert isinstance(layer, nn.Sequential) and isinstance(layer[0], nn.Conv2d)
            nn.init.kaiming_normal_(layer[0].weight)

    @property
    def reduction(self) -> tuple[int, int]:
        """Return (height, width) in pixels of the patch of a token."""
        return to_2tuple((2 * self.stride) ** len(self.conv_layers))

    def grid(self, image: tuple[int, ...], prefix: int = 0) -> Grid:
        """Return the grid of an image of (height, width) pixels."""
        return convolved_grid(image, len(self.conv_layers), (self.kernel, self.stride, self.padding), prefix)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, height, width) to tokens (B, N, D)."""
        return self.conv_layers(x).flatten(2).transpose(1, 2)


def convolved_grid(image: tuple[int, ...], layers: int, convolution: tuple[int, int, int], prefix: int = 0) -> Grid:
    """Return the grid of an image after convolutions of (kernel, stride, padding), each with a max pooling."""
    sides = list(image)
    for kernel, stride, padding in [convolution, (3, 2, 1)] * layers:
        sides = [(side + 2 * padding - kernel) // stride + 1 for side in sides]
    if min(sides) < 1:
        raise ValueError(f"`img_size` must be large enough for one token, got {image[0]} x {image[1]}.")
    return Grid(sides[0], sides[1], prefix=prefix)


torch.fx.wrap("convolved_grid")  # it compares sizes, so torch.fx records the call as one node


_SMALL = {"embed_dim": 128, "num_heads": 2, "mlp_ratio": 1.0}
_MEDIUM = {"embed_dim": 256, "num_heads": 4, "mlp_ratio": 2.0}
_LARGE = {"embed_dim": 384, "num_heads": 6, "mlp_ratio": 3.0}
_POOLED = {"global_pool": "seq"}
_ONE = {**_POOLED, "tokenizer": "convolutions"}
_TWO = {**_ONE, "conv_layers": 2}
_CONVOLUTION = {"first_conv": "patch_embed.conv_layers.0.0"}
#: Means and standard deviations of CIFAR-10, as in the published configurations of the authors' code.
_CIFAR10 = {"num_classes": 10, "mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616), "crop_pct": 1.0}
#: Statistics of CIFAR-100, for a model of 32 pixels and 100 classes.
_CIFAR100 = {100: {"num_classes": 100, "mean": (0.5071, 0.4867, 0.4408), "std": (0.2675, 0.2565, 0.2761)}}
_CIFAR: dict[str, Any] = {"cfg": _CIFAR10, "cfg_of_classes": _CIFAR100}
_CCT_CIFAR: dict[str, Any] = {"cfg": {**_CIFAR10, **_CONVOLUTION}, "cfg_of_classes": _CIFAR100}
# The names are from the authors' code: layers, side of a patch or kernel x number of convolutions, image.
register_sizes(
    CompactTransformer,
    {
        "vit_lite_2_4_32": Size(214_666, {**_SMALL, "depth": 2}, **_CIFAR),
        "vit_lite_4_4_32": Size(413_066, {**_SMALL, "depth": 4}, **_CIFAR),
        "vit_lite_6_4_32": Size(3_190_538, {**_MEDIUM, "depth": 6}, **_CIFAR),
        "vit_lite_7_4_32": Size(3_716_874, {**_MEDIUM, "depth": 7}, **_CIFAR),
        "vit_lite_7_8_32": Size(3_741_450, {**_MEDIUM, "depth": 7, "patch_size": 8}, **_CIFAR),
        "vit_lite_7_16_32": Size(3_885_834, {**_MEDIUM, "depth": 7, "patch_size": 16}, **_CIFAR),
        "cvt_2_4_32": Size(214_539, {**_SMALL, "depth": 2, **_POOLED}, **_CIFAR),
        "cvt_4_4_32": Size(412_939, {**_SMALL, "depth": 4, **_POOLED}, **_CIFAR),
        "cvt_6_4_32": Size(3_190_283, {**_MEDIUM, "depth": 6, **_POOLED}, **_CIFAR),
        "cvt_7_4_32": Size(3_716_619, {**_MEDIUM, "depth": 7, **_POOLED}, **_CIFAR),
        "cvt_8_4_32": Size(4_242_955, {**_MEDIUM, "depth": 8, **_POOLED}, **_CIFAR),
        "cct_2_3x2_32": Size(283_723, {**_SMALL, "depth": 2, **_TWO, "patch_size": 3}, **_CCT_CIFAR),
        "cct_4_3x2_32": Size(482_123, {**_SMALL, "depth": 4, **_TWO, "patch_size": 3}, **_CCT_CIFAR),
        "cct_6_3x2_32": Size(3_326_923, {**_MEDIUM, "depth": 6, **_TWO, "patch_size": 3}, **_CCT_CIFAR),
        "cct_6_3x1_32": Size(3_233_803, {**_MEDIUM, "depth": 6, **_ONE, "patch_size": 3}, **_CCT_CIFAR),
        "cct_7_3x1_32": Size(3_760_139, {**_MEDIUM, "depth": 7, **_ONE, "patch_size": 3}, **_CCT_CIFAR),
        "cct_7_7x2_224": Size(
            4_804_521, {**_MEDIUM, "depth": 7, **_TWO, "img_size": 224, "patch_size": 7}, cfg=_CONVOLUTION
        ),
        "cct_14_7x2_224": Size(
            22_367_273, {**_LARGE, "depth": 14, **_TWO, "img_size": 224, "patch_size": 7}, cfg=_CONVOLUTION
        ),
        "cct_14_7x2_384": Size(
            22_513_193, {**_LARGE, "depth": 14, **_TWO, "img_size": 384, "patch_size": 7}, cfg=_CONVOLUTION
        ),
    },
)
register_small("ViT-Lite", "vit_lite_2_4_32", img_size=8, embed_dim=24, num_heads=3)
register_small("CVT", "cvt_2_4_32", img_size=8, embed_dim=24, num_heads=3)
register_small("CCT", "cct_2_3x2_32", img_size=8, embed_dim=24, num_heads=3)
