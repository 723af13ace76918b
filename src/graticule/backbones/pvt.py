"""Pyramid Vision Transformer: four stages, keys on a coarser grid, one encoding per stage."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from torch import Tensor, nn

from graticule.backbones.pyramid import Pyramid
from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.backbones.window_attention import WindowAttention
from graticule.encodings.conditional import Peg
from graticule.layers.block import Block
from graticule.layers.parts import norm_layer_of
from graticule.layers.tokenizers import on_axes
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import PositionBuilder
from graticule.position.windows import Windows
from graticule.registry.checks import checked
from graticule.registry.fields import Bounded, Channels, Depth, Ratio, ShareBelowOne, Side, SmallCount


class SpatialReductionAttention(nn.Module):
    r"""Attention to the tokens of a coarser grid, which a convolution of stride R computes.

    .. math:: softmax(q k^T / \sqrt d) v, \quad k, v = W LN(conv_R(x))

    There are M = H * W / R^2 keys. With R = 1 keys and values come from all tokens, prefix tokens included. It accepts
    position information that acts on the tokens; a bias or a rotation would need the positions of the coarse keys.
    Names and the reduction's norm (eps is 1e-5, whatever the block's is) are as in PVT's code.

    Reference: Pyramid Vision Transformer (PVT, Wang et al., 2021), Eq. 2-4.

    Args:
        reduction: R.
        others: as `Attention`.
    """

    @checked
    def __init__(
        self,
        dim: Channels,
        num_heads: SmallCount = 8,
        qkv_bias: bool = True,
        attn_drop: ShareBelowOne = 0.0,
        proj_drop: ShareBelowOne = 0.0,
        reduction: int = 1,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"`embed_dim` must be a multiple of `num_heads`, got {dim} with {num_heads} heads.")
        if reduction < 1:
            raise ValueError(f"`reduction` must be at least 1, got {reduction}.")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.attn_drop = attn_drop
        self.reduction = reduction
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.kv = nn.Linear(dim, dim * 2, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        if reduction > 1:
            self.sr = nn.Conv2d(dim, dim, reduction, reduction)
            self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, position: LayerPosition, grid: Grid) -> Tensor:
        """Mix the tokens x: (B, N, D) of `grid` into (B, N, D)."""
        q, k, v = self._project(x, grid)
        dropout = self.attn_drop if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))

    def seen_grids(self, grid: Grid) -> tuple[Grid, Grid]:
        """Return the grids of queries and of keys for tokens of `grid`."""
        if self.reduction == 1:
            return grid, grid
        return grid, Grid(grid.height // self.reduction, grid.width // self.reduction)

    def weights(self, x: Tensor, position: LayerPosition, grid: Grid) -> Tensor:
        """Compute the attention weights, which `forward` never stores, (B, h, N, M), rows summing to 1."""
        q, k, _ = self._project(x, grid)
        return (q * self.head_dim**-0.5 @ k.transpose(-2, -1)).softmax(-1)

    def _project(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        heads = (self.num_heads, self.head_dim)
        q = self.q(x).unflatten(-1, heads).transpose(1, 2)  # (B, h, N, d)
        if self.reduction > 1:
            if min(grid.shape) < self.reduction:
                raise ValueError(
                    f"`img_size` must give this stage at least {self.reduction} patches per side, which its attention "
                    f"reduces to one, got {grid.height} x {grid.width}."
                )
            x = self.norm(grid.from_map(self.sr(grid.to_map(x))))  # (B, M, D)
        k, v = self.kv(x).unflatten(-1, (2, *heads)).permute(2, 0, 3, 1, 4)  # (B, h, M, d)
        return q, k, v


class PyramidVisionTransformer(Pyramid):
    """PVT as published, with one learnable embedding per stage and a class token in the last; or with PEG, GAP, both.

    PEG's place l is counted within each stage: 0 is after the first block of every stage. The models by name
    resample their tables bilinearly for another size, as PVT's code does (except for its bug that a grid of another
    shape, with as many patches as the first stage's, gets the table unchanged). The names of the parameters are
    as in Twins' code, and `load_state_dict` accepts PVT's as well.

    Reference: Pyramid Vision Transformer (Wang et al., 2021); with PEG and GAP, CPVT (Chu et al., 2023), Table 13,
    which is PCPVT of Twins (Chu et al., 2021): `pvt_small_peg_gap` is timm's `twins_pcpvt_small`, `pvt_medium_peg_gap`
    its `twins_pcpvt_base` and `pvt_large_peg_gap` its `twins_pcpvt_large`; `pretrained=True` loads their published
    weights.

    Args:
        global_pool: 'token' (class token) or 'avg' (GAP).
        embed_dims: D of each stage.
        mlp_ratios: hidden channels of each stage's MLPs, as a multiple of D.
        sr_ratios: R of each stage, the stride of the grid of keys.
        class_token: whether the last stage has one; by default, if `global_pool` is 'token'.
        norm_layer: builds a norm from D; patch embeddings and reduced keys have PyTorch's LayerNorm, as published.
        others: as `Backbone`; the sides of images are multiples of 8 patches.
    """

    takes = Pyramid.takes | {"after_norm"}
    prefix_names = ("cls_token",)
    stage_lists = ("patch_embeds", "blocks")
    first_conv = "patch_embeds.0.proj"
    encoding_options: ClassVar = {"learnable": {"resampler": "bilinear(antialias=False)"}}  # as in the authors' code

    def __init__(
        self,
        position: PositionBuilder,
        patch_size: Side = 4,
        global_pool: str = "token",
        embed_dims: Sequence[Channels] = (64, 128, 320, 512),
        depths: Sequence[Depth] = (3, 4, 6, 3),
        num_heads: Sequence[SmallCount] = (1, 2, 5, 8),
        mlp_ratios: Sequence[Ratio] = (8, 8, 4, 4),
        sr_ratios: Sequence[Bounded] = (8, 4, 2, 1),
        qkv_bias: bool = True,
        class_token: bool | None = None,
        attn_drop_rate: ShareBelowOne = 0.0,
        norm_layer: str | Callable[[int], nn.Module] | None = None,
        act_layer: type[nn.Module] | None = None,
        **kwargs: Any,
    ) -> None:
        class_token = check_class_token(global_pool, class_token)
        norm = norm_layer_of(norm_layer)
        if not len(mlp_ratios) == len(sr_ratios) == len(depths):
            raise ValueError(
                f"`mlp_ratios` and `sr_ratios` must have a value for each of the {len(depths)} stages, got "
                f"{len(mlp_ratios)} and {len(sr_ratios)}."
            )
        super().__init__(patch_size=patch_size, embed_dims=embed_dims, depths=depths, global_pool=global_pool, **kwargs)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dims[-1])) if class_token else None
        self.build_position(position, num_heads)
        self.build_head(norm)
        for at, reduction in zip(self.grid.pyramid(len(depths)), sr_ratios, strict=True):
            if reduction < 1 or min(at.shape) < reduction:
                raise ValueError(
                    f"`sr_ratios` must be at least 1 and no more than the sides of their stage's grid, got {reduction} "
                    f"for {at.height} x {at.width} patches."
                )
        self.patch_embeds = nn.ModuleList(
            PatchEmbed(None, 2 if stage else patch_size, before, dim, norm_layer=nn.LayerNorm, strict_img_size=False)
            for stage, (before, dim) in enumerate(zip((self.in_chans, *embed_dims), embed_dims, strict=False))
        )
        drop, rates = self.proj_drop_rate, iter(self.drop_path_rates())
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                Block(
                    dim,
                    heads,
                    ratio,
                    proj_drop=drop,
                    drop_path=next(rates),
                    norm_layer=norm,
                    act_layer=act_layer or nn.GELU,
                    attn=self.attention_kind(index, reduction)(dim, heads, qkv_bias, attn_drop_rate, drop),
                )
                for index in range(depth)
            )
            for dim, depth, heads, ratio, reduction in zip(
                embed_dims, depths, num_heads, mlp_ratios, sr_ratios, strict=True
            )
        )
        self.finish()

    def init_weights(self, mode: str = "") -> None:
        """Initialize the weights; with PEGs, all convolutions by their fan-out, as in Twins' code."""
        super().init_weights(mode)
        if any(isinstance(module, Peg) for module in self.position.modules()):
            for module in self.modules():
                if isinstance(module, nn.Conv2d):
                    fan_out = module.weight[:, 0].numel() // module.groups
                    nn.init.normal_(module.weight, std=(2 / fan_out) ** 0.5)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)

    def attention_kind(self, index: int, reduction: int) -> Callable[..., nn.Module]:
        """Return the constructor of the attention of block `index` of a stage whose keys are reduced by `reduction`."""
        return partial(SpatialReductionAttention, reduction=reduction)

    def tokenize(self, x: Tensor, stage: int) -> Tensor:
        """Turn patches of the images, or of the map of the previous stage, into tokens (B, H * W, D)."""
        return self.patch_embeds[stage](x)

    def own_name(self, published: str) -> str:
        """Return our name for a parameter of PVT's code."""
        name = re.sub(r"^patch_embed(\d)\.", lambda match: f"patch_embeds.{int(match[1]) - 1}.", published)
        return re.sub(r"^block(\d)\.", lambda match: f"blocks.{int(match[1]) - 1}.", name)

    def published_name(self, name: str) -> str:
        """Return the name of a parameter in PVT's code, or with PEGs in Twins' code, which is our name."""
        if any(name.startswith("pos_block.") for name in self.position.published_names()):
            return name
        name = re.sub(r"^patch_embeds\.(\d)\.", lambda match: f"patch_embed{int(match[1]) + 1}.", name)
        return re.sub(r"^blocks\.(\d)\.", lambda match: f"block{int(match[1]) + 1}.", name)


class TwinsSvt(PyramidVisionTransformer):
    """Twins-SVT as published: every second block, from the first, attends within windows; the others attend as in PVT.

    Position is a PEG after the first block of every stage. Windows are not shifted; where they do not tile the grid,
    it is padded with zeros, which are attended to, as in the authors' code and in timm. The names of the parameters are
    theirs.

    Reference: Twins: Revisiting the Design of Spatial Attention in Vision Transformers (Chu et al., 2021), section 3.2.
    Twins-PCPVT is PVT with PEGs and global average pooling (`pvt_small_peg_gap`).

    Args:
        global_pool: 'avg' or '' (none); there is no class token, as it would be in no window.
        embed_dims: D of each stage.
        mlp_ratios: hidden channels of each stage's MLPs, as a multiple of D.
        others: as `PyramidVisionTransformer`.
    """

    pools = ("", "avg")
    default_encoding = "peg"

    def __init__(
        self,
        position: PositionBuilder,
        global_pool: str = "avg",
        embed_dims: Sequence[Channels] = (64, 128, 256, 512),
        depths: Sequence[Depth] = (2, 2, 10, 4),
        num_heads: Sequence[SmallCount] = (2, 4, 8, 16),
        mlp_ratios: Sequence[Ratio] = (4, 4, 4, 4),
        window_size: Side | tuple[Side, Side] = 7,
        **kwargs: Any,
    ) -> None:
        if not 2 <= max(sides := on_axes(window_size, 2)) <= 4096:
            raise ValueError(f"`window_size` must be from 2 to 4096 patches, got {window_size}.")
        self.window, self.window_size = Grid(*sides), window_size
        super().__init__(
            position,
            global_pool=global_pool,
            embed_dims=embed_dims,
            depths=depths,
            num_heads=num_heads,
            mlp_ratios=mlp_ratios,
            **kwargs,
        )

    def attention_kind(self, index: int, reduction: int) -> Callable[..., nn.Module]:
        """Return the constructor of the attention of block `index` of a stage: within windows if it is even."""
        return super().attention_kind(index, reduction) if index % 2 else WindowAttention

    def block_arguments(self, stage: int, grid: Grid) -> list[tuple[Grid | Windows]]:
        """Return, for each block of a stage, the windows if it is even, and the grid if it is odd."""
        kinds = Windows(grid, self.window), grid
        return [(kinds[index % 2],) for index in range(self.depths[stage])]


def check_class_token(global_pool: str, class_token: bool | None) -> bool:
    """Return True if there is a class token: as given, or, if not given, if `global_pool` reads it."""
    expected = global_pool == "token"
    if class_token is not None and class_token != expected:
        raise ValueError(
            f"`class_token` must be {expected} where `global_pool` is {global_pool!r} (or left out), got {class_token}."
        )
    return expected


_TINY, _MEDIUM, _LARGE = {"depths": (2, 2, 2, 2)}, {"depths": (3, 4, 18, 3)}, {"depths": (3, 8, 27, 3)}
_GAP = {"global_pool": "avg"}
# 'peg' has a PEG after the first block of every stage instead of the tables; 'gap' has no class token. PVT + PEG + GAP
# is PCPVT of Twins (Chu et al., 2021), whose published weights have 81.2 and 82.7 % top-1: the rows of CPVT's Table 13.
# Its 'base' is PVT-Medium.
register_sizes(
    PyramidVisionTransformer,
    {
        "pvt_tiny": Size(13_229_288, _TINY),
        "pvt_tiny_peg": Size(12_850_152, _TINY, "peg"),
        "pvt_tiny_gap": Size(13_228_264, {**_GAP, **_TINY}),
        "pvt_tiny_peg_gap": Size(12_849_640, {**_GAP, **_TINY}, "peg"),
        "pvt_small": Size(24_485_864),
        "pvt_small_peg": Size(24_106_728, encoding="peg"),
        "pvt_small_gap": Size(24_484_840, _GAP),
        "pvt_small_peg_gap": Size(24_106_216, _GAP, "peg", hub="timm/twins_pcpvt_small.in1k"),
        "pvt_medium": Size(44_208_104, _MEDIUM),
        "pvt_medium_peg": Size(43_828_968, _MEDIUM, "peg"),
        "pvt_medium_gap": Size(44_207_080, {**_GAP, **_MEDIUM}),
        "pvt_medium_peg_gap": Size(43_828_456, {**_GAP, **_MEDIUM}, "peg", hub="timm/twins_pcpvt_base.in1k"),
        "pvt_large": Size(61_369_320, _LARGE),
        "pvt_large_peg_gap": Size(60_989_672, {**_GAP, **_LARGE}, "peg", hub="timm/twins_pcpvt_large.in1k"),
    },
    pool_size=(7, 7),
)
_SMALL = {
    **{"img_size": 16, "embed_dims": (8, 16), "depths": (2, 2), "num_heads": (1, 2)},
    **{"sr_ratios": (2, 1), "mlp_ratios": (2, 2)},
}
register_small("PVT", "pvt_tiny", **_SMALL)

_BASE = {"embed_dims": (96, 192, 384, 768), "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)}
_WIDE = {"embed_dims": (128, 256, 512, 1024), "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)}
register_sizes(
    TwinsSvt,
    {
        "twins_svt_small": Size(24_060_776, hub="in1k"),
        "twins_svt_base": Size(56_070_952, _BASE, hub="in1k"),
        "twins_svt_large": Size(99_271_400, _WIDE, hub="in1k"),
    },
    pool_size=(7, 7),
)
register_small("Twins-SVT", "twins_svt_small", **_SMALL, window_size=2)
