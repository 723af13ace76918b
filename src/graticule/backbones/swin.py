"""Swin Transformer: attention within shifted windows, with any encoding and joining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from timm.models.swin_transformer import PatchMerging
from torch import nn

from graticule.backbones.pyramid import MergingPyramid
from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.backbones.window_attention import WindowAttention
from graticule.layers.block import Block, block_layer_of
from graticule.layers.parts import norm_layer_of
from graticule.layers.tokenizers import on_axes
from graticule.position.grid import Grid
from graticule.position.position import PositionBuilder
from graticule.position.windows import Windows
from graticule.registry.checks import checked
from graticule.registry.fields import Channels, Depth, Ratio, ShareBelowOne, Side, SmallCount

#: Rule for the axes along which windows are shifted.
Shift = Literal["timm", "microsoft"]
#: Size of windows in patches: the side or (rows, columns) for all stages, or (rows, columns) for each.
WindowSize = Side | tuple[Side, Side] | tuple[tuple[Side, Side], ...]


class SwinTransformer(MergingPyramid):
    """Swin: shifted windows; by default ('relative_bias') every block has a bias table for its window, as published.

    An absolute encoding in addition to it or instead of it is added before the first stage; with a joining that adds
    it in every layer, a later stage gets it through its patch merging (`PyramidPosition`). The names of the parameters
    are timm's, except in position encodings; `load_state_dict` accepts timm's.

    With a PEG after the first block of every stage and global average pooling it is Swin + PEG + GAP of CPVT's Table
    15, whose text is ambiguous: section 4.6 says of PVT and Swin "we remove its learnable PE and apply our PEG in
    position 0 of each stage", which in Swin would be its bias tables; but it says that its results (81.1 to 82.25)
    show that PEG "can boost Swin". 29 M parameters fit both (the tables have 23,322). `swin_tiny_peg_...` keeps the
    tables ('relative_bias+peg'), and with `encoding="peg"` it has none.

    Images of any size are accepted: patches, windows and merged patches that the grid does not fill are padded with
    zeros. A window is never larger than the grid of its stage, and a stage of one window does not shift it. Both follow
    from the grid of the image, so the forward pass at a size is that after `set_input_size`, as timm's after its own;
    timm's models that accept any size keep the windows and shifts that they were built with. Where one window covers
    only one axis of a stage, timm shifts the windows along the other one and Microsoft's code along neither (`shift`).
    Weights of Microsoft's code load under their names. Bias tables are resampled for other windows as in that code,
    bicubically; models that are converted from timm have its way, "geometric(mode='linear')".

    Reference: Swin Transformer (Liu et al., 2021); with PEG, CPVT (Chu et al., 2023), appendix B.5.

    Args:
        window_size: in patches, one side, or (rows, columns) for every stage.
        shift: 'timm', every second block shifts its windows along each axis of more than one window; 'microsoft', along
            both axes or, if one window covers either axis, along neither, and one side that is larger than a grid means
            square windows of the grid's shorter side.
        patch_norm: whether the patch embedding ends with a norm.
        block_layer: builds a block, or its name, as in `VisionTransformer`.
        attn_layer: builds the attention of a block.
        merging_layer: builds the patch merging before a stage from the channels before and after it, and `norm_layer`.
        others: as `Backbone`; `global_pool` is 'avg' or '' (none).
    """

    takes = frozenset(
        {
            "added_to_stream",
            "map_before",
            "after_norm",
            "map_after",
            "bias",
            "key_bias",
            "value_bias",
            "rotary",
            "query_scale",
        }
    )
    published_parts: ClassVar[tuple[tuple[str, str], ...]] = (("head", "head.fc"),)  # in timm
    default_encoding = "relative_bias"
    encoding_options: ClassVar = {"relative_bias": {"resampler": "bicubic(antialias=False)"}}  # as in Microsoft's code

    def __init__(
        self,
        position: PositionBuilder,
        patch_size: Side | tuple[Side, Side] = 4,
        embed_dim: Channels = 96,
        depths: Sequence[Depth] = (2, 2, 6, 2),
        num_heads: Sequence[SmallCount] = (3, 6, 12, 24),
        window_size: WindowSize = 7,
        shift: Shift = "timm",
        mlp_ratio: Ratio = 4.0,
        qkv_bias: bool = True,
        attn_drop_rate: ShareBelowOne = 0.0,
        patch_norm: bool = True,
        norm_layer: str | Callable[[int], nn.Module] | None = None,
        block_layer: str | Callable[..., nn.Module] = Block,
        attn_layer: Callable[..., nn.Module] | None = None,
        merging_layer: Callable[..., nn.Module] = PatchMerging,
        **kwargs: Any,
    ) -> None:
        norm = nn.LayerNorm if norm_layer is None else norm_layer_of(norm_layer)
        build_attention, build_block = attn_layer or WindowAttention, block_layer_of(block_layer)
        dims = [embed_dim << stage for stage in range(len(depths))]
        super().__init__(patch_size=patch_size, embed_dims=dims, depths=depths, **kwargs)
        self.shift = shift
        self.window_size = window_size
        self.build_position(position, num_heads)
        self.build_head(norm)

        def block(stage: int, index: int, drop_path: float) -> nn.Module:
            dim, heads = dims[stage], num_heads[stage]
            drop = self.proj_drop_rate
            attn = build_attention(dim, heads, qkv_bias=qkv_bias, attn_drop=attn_drop_rate, proj_drop=drop)
            return build_block(dim, heads, mlp_ratio, qkv_bias, drop, drop_path=drop_path, norm_layer=norm, attn=attn)

        self.build_stages(block, norm, merging_layer, patch_norm)
        self.finish()

    @property
    def windows(self) -> tuple[tuple[int, ...], ...]:
        """The windows of each stage at the size that the model is built for, (rows, columns)."""
        return self.grid.windows

    @checked
    def set_input_size(
        self, img_size: Side | tuple[Side, ...] | None = None, window_size: WindowSize | None = None
    ) -> None:
        """Change the image size, or the windows, that position information is stored for.

        Args:
            window_size: in patches, as in the constructor; unchanged by default.
        """
        size = on_axes(self.img_size if img_size is None else img_size, 2)
        windows = self.window_size if window_size is None else window_size
        _with_windows(super().grid_at(size), windows, len(self.depths), self.shift)  # refuses others before any change
        self.window_size = windows
        super().set_input_size(size)

    def grid_at(self, image: tuple[int, ...]) -> Grid:
        """Return the first stage's grid, with the windows, of an image of `image` = (height, width), in pixels."""
        return _with_windows(super().grid_at(image), self.window_size, len(self.depths), self.shift)

    def block_arguments(self, stage: int, grid: Grid) -> list[tuple[Windows]]:
        """Return the windows of the blocks: every second one shifts them by half, by the rule `shift`."""
        return self.alternating_windows(stage, grid, together=self.shift == "microsoft")


def _with_windows(grid: Grid, size: WindowSize, stages: int, shift: Shift) -> Grid:
    """Return the first stage's grid with the windows of all `stages`, each no larger than the grid of its stage."""
    is_one = isinstance(size, int) or (len(size) == 2 and all(isinstance(side, int) for side in size))
    sides: list[Any] = [size] * stages if is_one else list(cast("Any", size))
    if len(sides) != stages or not (is_one or all(isinstance(pair, tuple | list) for pair in sides)):
        raise ValueError(
            f"`window_size` must be a side or (rows, columns), or (rows, columns) for each of {stages} stages, got "
            f"{size}."
        )
    windows = list(grid.in_windows(sides, pad=True).windows)
    if shift == "microsoft" and isinstance(size, int):
        windows = [(min(window),) * 2 for window in windows]
    return grid.with_windows(windows)


torch.fx.wrap("_with_windows")  # it compares sizes, so torch.fx records each call as one node


_SMALL = {"depths": (2, 2, 18, 2)}
_BASE = {"embed_dim": 128, "num_heads": (4, 8, 16, 32), **_SMALL}
_PEG = "relative_bias + peg"  # a PEG after the first block of every stage and the bias tables, which "peg" omits
register_sizes(
    SwinTransformer,
    {
        "swin_tiny_patch4_window7_224": Size(28_288_354, hub="ms_in1k"),
        "swin_small_patch4_window7_224": Size(49_606_258, _SMALL, hub="ms_in1k"),
        "swin_base_patch4_window7_224": Size(87_768_224, _BASE, hub="ms_in1k"),
        "swin_tiny_peg_patch4_window7_224": Size(28_302_754, encoding=_PEG),
        "swin_small_peg_patch4_window7_224": Size(49_620_658, _SMALL, _PEG),
        "swin_base_peg_patch4_window7_224": Size(87_787_424, _BASE, _PEG),
    },
    pool_size=(7, 7),
)
register_small(
    "Swin", "swin_tiny_patch4_window7_224", img_size=32, embed_dim=12, depths=(2, 2), num_heads=(1, 2), window_size=4
)
