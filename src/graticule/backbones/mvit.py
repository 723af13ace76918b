"""MViTv2: stages that pool queries, keys and values within attention, with relative positions per axis."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from timm.layers import DropPath, Mlp
from timm.models import register_notrace_module
from torch import Tensor, nn

from graticule.backbones.base import Stage
from graticule.backbones.pyramid import Pyramid, padded_grid
from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.encodings.forms.pyramid import PooledPosition, PooledPyramid, Pooling
from graticule.layers.attention import Attention
from graticule.layers.parts import norm_layer_of
from graticule.position.grid import Crop, Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import PositionBuilder

#: Error message for encodings that add to tokens if MLPs double the channels.
_WIDENED = (
    "`joining` must be 'default', and `encoding` one that adds nothing to the tokens of later stages, without "
    "`expand_attn`, as those have the grid of one stage and the channels of another"
)


class MultiscaleVisionTransformer(Pyramid):
    """MViTv2 as published: attention pools its tokens, and the first block of a stage halves the grid in its queries.

    Queries, keys and values are convolved per channel of a head, with strides: keys of the first stage are
    `key_stride` times as coarse as its tokens, and half that in each later stage, down to 1. The pooled
    queries are added to the output of attention. In the first block of a stage, queries have stride 2, the channels
    double, and the residual connection is projected and max-pooled. The class token, if there is one, is not pooled.
    Without `expand_attn`, as in MViTv2-L without a class token, the MLP of the last block of a stage doubles the
    channels. Encodings and joinings that add to the tokens of each layer (LaPE, a PEG) are then refused, as the tokens
    have the grid of one stage and the channels of another.

    By default ('decomposed') each block has tables for rows and columns, as published. A bias, a rotation or a scale of
    the queries is that of the finer grid, of the queries or of the keys; the coarser one has every n-th row and column
    of it (`PooledPosition`). A bias that is computed from the keys or from the attention weights is refused. LaPE and
    PEGs add to the tokens that enter a block, so the first block of a later stage belongs to the grid before it, and a
    table reaches the next stage through the residual connection of that block.

    Images of any size are accepted; sides that strides do not divide are rounded up, with zeros around the map. For
    such sides the released code scales and rounds displacements; here they are exact. timm uses tables of one
    size for all images; here they are resampled linearly, as timm does when it loads them. The names of the
    parameters are timm's, except those of position; `load_state_dict` accepts timm's and those of the released
    checkpoints.

    Reference: MViTv2: Improved Multiscale Vision Transformers for Classification and Detection (Li et al., 2022).

    Args:
        global_pool: 'token', 'avg' or ''; by default 'token' if there is a class token, else 'avg'.
        class_token: whether there is one, in all stages.
        depths: number of blocks of each stage; at least two in the last.
        num_heads: h of the first stage; it doubles from stage to stage.
        key_stride: stride of the keys of the first stage, relative to its tokens; a power of 2.
        residual_pooling: whether pooled queries are added to the output of attention.
        expand_attn: whether attention in the first block of a stage doubles the channels; if not, the MLP before it.
        others: as `Backbone`.
    """

    takes = Pyramid.takes | {"inner", "inputs", "queries_keys", "bias", "rotary", "query_scale"}
    takes_why = "Queries and keys are pooled to different grids."
    prefix_names = ("cls_token",)
    stage_lists = ("stages",)
    published_parts = (("head.", "head.fc."),)  # in timm
    default_encoding = "decomposed"
    encoding_options: ClassVar = {"learnable": {"resampler": "bicubic"}}
    absolute_stages = 1
    merges = True
    pads = True

    def __init__(
        self,
        position: PositionBuilder,
        global_pool: str | None = None,
        class_token: bool = False,
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 3, 16, 3),
        num_heads: int = 1,
        key_stride: int = 4,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        residual_pooling: bool = True,
        expand_attn: bool = True,
        attn_drop_rate: float = 0.0,
        norm_layer: str | Callable[[int], nn.Module] | None = None,
        **kwargs: Any,
    ) -> None:
        norm = norm_layer_of(norm_layer)
        if key_stride < 1 or key_stride & (key_stride - 1):
            raise ValueError(f"`key_stride` must be a power of 2, got {key_stride}.")
        if len(depths) > 1 and depths[-1] < 2:
            raise ValueError(f"`depths` must be at least 2 in the last of several stages, got {tuple(depths)}.")
        dims = [embed_dim << stage for stage in range(len(depths))]
        global_pool = ("token" if class_token else "avg") if global_pool is None else global_pool
        super().__init__(patch_size=4, embed_dims=dims, depths=depths, global_pool=global_pool, **kwargs)
        self.key_strides = tuple(max(key_stride >> stage, 1) for stage in range(len(depths)))
        self.expand_attn = expand_attn
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if class_token else None
        self.build_position(position, num_heads)
        self.build_head(norm)
        self.patch_embed = nn.Sequential()
        self.patch_embed.add_module("proj", nn.Conv2d(self.in_chans, embed_dim, 7, 4, 3))
        rates = iter(self.drop_path_rates())
        self.stages = nn.ModuleList()
        for stage, depth in enumerate(depths):
            blocks = [
                PoolingBlock(
                    *self._widths(stage, index),
                    num_heads << stage,
                    self._pooling(stage, index),
                    mlp_ratio,
                    qkv_bias,
                    residual_pooling,
                    self.proj_drop_rate,
                    attn_drop_rate,
                    next(rates),
                    norm,
                    expand_attn,
                )
                for index in range(depth)
            ]
            self.stages.append(Stage(blocks))
        self.finish()

    def _widths(self, stage: int, index: int) -> tuple[int, int]:
        """Return D of the input and of the output of a block."""
        here, dims = self.embed_dims[stage], self.embed_dims
        if self.expand_attn:
            return (here if index else dims[max(stage - 1, 0)]), here
        last = index == self.depths[stage] - 1
        return here, dims[min(stage + 1, len(dims) - 1)] if last else here

    def _pooling(self, stage: int, index: int) -> Pooling:
        """Return the strides by which a block pools its tokens."""
        return Pooling(2 if stage and not index else 1, self.key_strides[stage])

    def build_position(self, position: PositionBuilder, num_heads: int | Sequence[int]) -> None:
        """Build the position of the blocks, for the grids of their input tokens.

        Args:
            position: builds the position of a stage.
            num_heads: h of the first stage.
        """
        assert isinstance(num_heads, int)
        self.prepare_position(num_heads)
        later = range(1, len(self.depths))
        each: list[list[tuple[int, int]]] = [[] for _ in self.depths]
        for entered, block in zip(self.entered_stages(), self._each_block(), strict=True):
            each[entered].append(block)
        self.position = PooledPyramid(
            partial(_pooled_position, position),
            self.grid,
            dims=self.embed_dims,
            depths=[len(blocks) for blocks in each],
            num_heads=[num_heads << stage for stage in range(len(self.depths))],
            prefix=self.num_prefix_tokens,
            absolute_stages=self.absolute_stages,
            merge=[partial(self.merge_table, stage) for stage in later],
            pad=True,
            more=[
                {
                    "pooling": [self._pooling(stage, index) for stage, index in blocks],
                    "dims": [self.embed_dims[stage] for stage, _ in blocks],
                    "heads": [num_heads << stage for stage, _ in blocks],
                }
                for blocks in each
            ],
        )

    @torch.no_grad()
    def check_position(self) -> None:
        """Check that the layers can use all fields that the position gives, and get all that they need.

        Without `expand_attn`, nothing may be added to tokens after the first stage, as they have the grid of one stage
        and the channels of another.
        """
        super().check_position()
        added = ("pre", "before", "inner", "inputs", "after", "queries_keys")
        for layer, given in enumerate(() if self.expand_attn else self.position(self.grid)):
            for field in added if layer >= self.depths[0] else ():
                if getattr(given, field) is not None:
                    raise ValueError(f"{_WIDENED}, got one that gives layer {layer} `{field}`.")

    def keep(self, count: int) -> None:
        """Keep only the first `count` stages; without `expand_attn`, the last MLP has doubled the channels."""
        width = self._widths(count - 1, self.depths[count - 1] - 1)[1]
        super().keep(count)
        self.num_features = self.head_hidden_size = width

    def _describe_features(self) -> list[dict[str, Any]]:
        """Describe each intermediate for timm, with the output channels of its stage."""
        found = super()._describe_features()
        for stage, one in enumerate(found):
            one["num_chs"] = self._widths(stage, self.depths[stage] - 1)[1]
        return found

    def entered_stages(self) -> list[int]:
        """Return, for each block, the stage that its input tokens belong to, by their grid and channels."""
        return [stage - 1 if stage and not index else stage for stage, index in self._each_block()]

    def _each_block(self) -> list[tuple[int, int]]:
        """Return the stage and the index in it of every block."""
        return [(stage, index) for stage, depth in enumerate(self.depths) for index in range(depth)]

    def grid_at(self, image: tuple[int, ...]) -> Grid:
        """Return the first stage's grid of an image of `image` = (height, width), in pixels."""
        return padded_grid(image, self.patch_size, self.num_prefix_tokens)

    def tokenize(self, x: Tensor, stage: int) -> Tensor:
        """Turn images into the tokens of overlapping patches, (B, H * W, D)."""
        tokens: Tensor = self.patch_embed(x).flatten(2).transpose(1, 2)
        return tokens

    def embed(self, x: Tensor, stage: int = 0) -> Tensor:
        """Turn images into tokens (B, N, D), without position information."""
        tokens = self.tokenize(x, stage)
        prefix = [token.expand(tokens.shape[0], -1, -1) for token in self._prefix_tokens()]
        return torch.cat([*prefix, tokens], 1) if prefix else tokens.contiguous()

    def merge_table(self, stage: int, table: Tensor, grid: Grid) -> Tensor:
        """Compute the table of a stage, (N, D), from the previous one, of `grid`, like the residual connection."""
        if not self.expand_attn:
            raise ValueError(f"{_WIDENED}, got one that brings a table to stage {stage}.")
        block: Any = self.block(stage, 0)
        merged: Tensor = block.residual(table[None], block.norm1(table[None]), grid)[0]
        return merged

    def each_layer(
        self, images: Tensor, crop: Crop | None = None, keep: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Grid]]:
        """Yield the tokens (B, N, D) after each block, and their grid, from images (B, C, height, width)."""
        grid = self.grid_of(images).cropped(crop)
        self.kept(images, grid, keep)
        grids, positions = self.position_grids(grid), self.position(grid)
        entered, blocks = self.entered_stages(), self._each_block()
        layers = [
            (self.block(*block), positions[layer], (grids[entered[layer]],)) for layer, block in enumerate(blocks)
        ]
        for (stage, _), tokens in zip(blocks, self.run_blocks(self.embed(images), layers), strict=True):
            yield tokens, grids[stage]

    def own_name(self, published: str) -> str:
        """Return our name for a parameter of timm or of the released code."""
        name = re.sub(r"^blocks\.(\d+)\.", self._of_stage, published)
        projection = "shortcut_proj_attn" if self.expand_attn else "shortcut_proj_mlp"
        name = re.sub(r"(^stages\.\d+\.blocks\.\d+)\.proj\.", rf"\1.{projection}.", name)
        return super().own_name(name.replace("head.projection.", "head.fc."))

    def _of_stage(self, found: re.Match[str]) -> str:
        """Return our name for a block that is numbered through all stages."""
        index, stage = int(found[1]), 0
        while stage + 1 < len(self.depths) and index >= self.depths[stage]:
            index, stage = index - self.depths[stage], stage + 1
        return f"stages.{stage}.blocks.{index}."


def _pooled_position(
    build: PositionBuilder,
    grid: Grid,
    *,
    dim: int,
    depth: int,
    num_heads: int,
    pooling: Sequence[Pooling],
    dims: Sequence[int],
    heads: Sequence[int],
    **within: Any,
) -> PooledPosition:
    """Build the position of the blocks whose input tokens are of `grid`; `heads` has the number of heads of each."""
    return PooledPosition(build, grid, dim=dim, pooling=pooling, dims=dims, num_heads=heads, within=within)


torch.fx.wrap("padded_grid")  # it compares sizes, so torch.fx records the call as one node


@register_notrace_module  # torch.fx records the call as one node: the computation depends on the position
class PoolingBlock(nn.Module):
    """Attention with pooling, then an MLP, each after a norm and with a residual connection.

    Where the channels change, the residual connection is a projection of the normalized tokens, not of the tokens, as
    in the released code; where queries have a stride, it is max-pooled.

    Reference: MViTv2 (Li et al., 2022), Figure 2.

    Args:
        dim: D of the input tokens.
        dim_out: D of the output tokens.
        pooling: the strides of queries and of keys.
        residual_pooling: whether pooled queries are added to the output of attention.
        expand_attn: if True, attention changes the channels to `dim_out`; otherwise, the MLP does.
        others: as `Block`.
    """

    pre_norm = True

    def __init__(
        self,
        dim: int,
        dim_out: int,
        num_heads: int,
        pooling: Pooling,
        mlp_ratio: float,
        qkv_bias: bool,
        residual_pooling: bool,
        proj_drop: float,
        attn_drop: float,
        drop_path: float,
        norm_layer: Callable[[int], nn.Module],
        expand_attn: bool = True,
    ) -> None:
        super().__init__()
        inner = dim_out if expand_attn else dim
        self.norm1 = norm_layer(dim)
        self.shortcut_proj_attn = nn.Linear(dim, inner) if dim != inner else None
        stride = pooling.queries
        self.shortcut_pool_attn = nn.MaxPool2d(stride + 1, stride, stride // 2) if stride > 1 else None
        self.attn = PoolingAttention(
            dim, inner, num_heads, pooling, qkv_bias, residual_pooling, attn_drop, proj_drop, norm_layer
        )
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = norm_layer(inner)
        self.shortcut_proj_mlp = nn.Linear(inner, dim_out) if inner != dim_out else None
        self.mlp = Mlp(inner, int(inner * mlp_ratio), dim_out, drop=proj_drop)
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, position: LayerPosition, grid: Grid) -> Tensor:
        """Map tokens x: (B, N, D) of `grid` to (B, N', D'), on a grid of half the sides if queries have a stride."""
        y = self.norm1(x)
        short = self.residual(x, y, grid)
        x = short + self.drop_path1(self.attn(position.inside(y), position, grid))
        y = self.norm2(x)
        out: Tensor = (x if self.shortcut_proj_mlp is None else self.shortcut_proj_mlp(y)) + self.drop_path2(
            self.mlp(y)
        )
        return out

    def residual(self, x: Tensor, normalized: Tensor, grid: Grid) -> Tensor:
        """Apply the residual connection to tokens (B, N, D) of `grid`: (B, N', D')."""
        x = x if self.shortcut_proj_attn is None else self.shortcut_proj_attn(normalized)
        if self.shortcut_pool_attn is None:
            return x
        pooled = grid.from_map(self.shortcut_pool_attn(grid.to_map(x)))
        return torch.cat([grid.split(x)[0], pooled], 1) if grid.prefix else pooled.contiguous()


class PoolingAttention(Attention):
    r"""Attention among tokens pooled by a depth-wise convolution, with separate strides for queries and keys.

    .. math:: softmax(q k^T / \sqrt d + bias) v + q, \quad q, k, v = LN(conv(W x))

    Prefix tokens are not convolved. The bias is (h, N', M), between pooled tokens. A scale or a rotation of the queries
    changes only the logits: the queries that are added to the output have neither.

    Reference: MViTv2 (Li et al., 2022), Eq. 1-5.

    Args:
        dim: D of the input tokens.
        dim_out: D of the output tokens, a multiple of `num_heads`.
        pooling: the strides of queries and of keys.
        residual_pooling: whether the pooled queries are added to the output.
        norm_layer: builds a norm from the channels of a head.
        others: as `Attention`.
    """

    def __init__(
        self,
        dim: int,
        dim_out: int,
        num_heads: int,
        pooling: Pooling,
        qkv_bias: bool,
        residual_pooling: bool,
        attn_drop: float,
        proj_drop: float,
        norm_layer: Callable[[int], nn.Module],
    ) -> None:
        qkv = nn.Linear(dim, 3 * dim_out, bias=qkv_bias)
        super().__init__(dim_out, num_heads, attn_drop=attn_drop, proj_drop=proj_drop, qkv=qkv)
        self.residual_pooling = residual_pooling
        strides: Mapping[str, int] = {"q": pooling.queries, "k": pooling.keys, "v": pooling.keys}
        for name, stride in strides.items():
            d = self.head_dim
            setattr(self, f"pool_{name}", nn.Conv2d(d, d, 3, stride, 1, groups=d, bias=False))
            setattr(self, f"norm_{name}", norm_layer(d))
        self.pooling = pooling

    def seen_grids(self, grid: Grid) -> tuple[Grid, Grid]:
        """Return the grids of queries and of keys for tokens of `grid`."""
        return grid.pooled(self.pooling.queries), grid.pooled(self.pooling.keys)

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Grid) -> Tensor:  # noqa: B008
        """Mix the tokens x: (B, N, D) of the grid `where` into (B, N', D')."""
        q, k, v = self._pooled(x, position, *where)
        mixed = self._attend(*self._positioned(q, k, v, position), position)
        return self._output(mixed + q if self.residual_pooling else mixed)

    def weights(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Grid) -> Tensor:  # noqa: B008
        """Compute the attention weights, which `forward` never stores, (B, h, N', M), rows summing to 1."""
        q, k, _, bias = self._positioned(*self._pooled(x, position, *where), position)
        return self._weights(q, k, bias, position)

    def _pooled(self, x: Tensor, position: LayerPosition, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """Return pooled queries (B, h, N', d), keys and values (B, h, M, d)."""
        q, k, v = self._projected(x, position)
        return self._pool("q", q, grid), self._pool("k", k, grid), self._pool("v", v, grid)

    def _pool(self, name: str, x: Tensor, grid: Grid) -> Tensor:
        """Convolve and normalize x: (B, h, N, d) of `grid`, to (B, h, N', d)."""
        convolution, norm = getattr(self, f"pool_{name}"), getattr(self, f"norm_{name}")
        prefix, patches = grid.split(x)
        features = convolution(patches.flatten(0, 1).transpose(1, 2).unflatten(-1, grid.shape))  # (B * h, d, H', W')
        patches = features.flatten(2).transpose(1, 2).unflatten(0, x.shape[:2])
        y: Tensor = norm(torch.cat([prefix, patches], 2) if grid.prefix else patches)
        return y


_TINY: dict[str, Any] = {"depths": (1, 2, 5, 2)}
_SMALL: dict[str, Any] = {"depths": (1, 2, 11, 2)}
_LARGE: dict[str, Any] = {"depths": (2, 6, 36, 4), "embed_dim": 144, "num_heads": 2}
_HUGE: dict[str, Any] = {"depths": (4, 8, 60, 8), "embed_dim": 192, "num_heads": 3}
_CLS, _21K = {"class_token": True}, {"num_classes": 19_168}
register_sizes(
    MultiscaleVisionTransformer,
    {
        "mvitv2_tiny": Size(24_173_320, _TINY, hub="fb_in1k"),
        "mvitv2_small": Size(34_870_216, _SMALL, hub="fb_in1k"),
        "mvitv2_base": Size(51_472_744, hub="fb_in1k"),
        "mvitv2_large": Size(217_992_952, {**_LARGE, "expand_attn": False}, hub="fb_in1k"),
        "mvitv2_small_cls": Size(34_870_312, {**_SMALL, **_CLS}),
        "mvitv2_base_cls": Size(65_444_032, _CLS, hub="fb_inw21k", cfg=_21K),
        "mvitv2_large_cls": Size(234_583_216, {**_LARGE, **_CLS}, hub="fb_inw21k", cfg=_21K),
        "mvitv2_huge_cls": Size(694_804_128, {**_HUGE, **_CLS}, hub="fb_inw21k", cfg=_21K),
    },
    pool_size=(7, 7),
)
register_small("MViTv2", "mvitv2_tiny", img_size=32, embed_dim=8, depths=(2, 3), class_token=True)
