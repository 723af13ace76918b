"""Swin Transformer: attention within shifted windows, with any encoding and joining."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from timm.layers.helpers import to_2tuple
from timm.models.swin_transformer import PatchMerging
from torch import nn

from graticule.backbones.pyramid import MergingPyramid
from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.backbones.window_attention import WindowAttention
from graticule.layers.block import Block
from graticule.layers.parts import norm_layer_of
from graticule.position.grid import Grid
from graticule.position.position import PositionBuilder
from graticule.position.windows import Windows
from graticule.registry.checks import checked

#: Rule for the axes along which windows are shifted.
Shift = Literal["timm", "microsoft"]
#: Size of windows in patches: the side for all stages, or (rows, columns) for each.
WindowSize = int | tuple[tuple[int, int], ...]


class SwinTransformer(MergingPyramid):
    """Swin: shifted windows; by default ('relative_bias') every block has a bias table for its window, as published.

    An absolute encoding in addition to it or instead of it is added before the first stage; with a joining that adds
    it in every layer, a later stage gets it through its patch merging (`PyramidPosition`). The names of the parameters
    are timm's, except those of position; `load_state_dict` accepts timm's.

    With a PEG after the first block of every stage and global average pooling it is Swin + PEG + GAP of CPVT's Table
    15, whose text is ambiguous: section 4.6 says of PVT and Swin "we remove its learnable PE and apply our PEG in
    position 0 of each stage", which in Swin would be its bias tables; but it says that its results (81.1 to 82.25)
    show that PEG "can boost Swin". 29 M parameters fit both (the tables have 23,322). `swin_tiny_peg_...` keeps the
    tables ('relative_bias+peg'), and with `encoding="peg"` it has none.

    Images of any size are accepted: patches, windows and merged patches that the grid does not fill are padded with
    zeros. A window is never larger than the grid that a stage is built for, and a stage of one window does not shift
    it, not even at another size, as in timm and for the published weights; `set_input_size` computes it again. Where
    one window covers only one axis of a stage, timm shifts the windows along the other one and Microsoft's code along
    neither (`shift`). Weights of Microsoft's code load under their names.

    Reference: Swin Transformer (Liu et al., 2021); with PEG, CPVT (Chu et al., 2023), appendix B.5.

    Args:
        position: builds the position of a stage.
        img_size: in pixels, one side or (height, width).
        patch_size: side of a patch of the first stage, in pixels.
        in_chans: channels of the image.
        num_classes: 0 for no head.
        global_pool: 'avg' or '' (none); there is no class token.
        embed_dim: D of the first stage; it doubles from stage to stage.
        depths: blocks of each stage.
        num_heads: h of each stage.
        window_size: in patches, one side, or (rows, columns) for every stage.
        shift: 'timm', every second block shifts its windows along each axis of more than one window; 'microsoft', along
            both axes or, if one window covers either axis, along neither, and one side that is larger than a grid means
            square windows of the grid's shorter side.
        mlp_ratio: hidden channels of the MLPs, as a multiple of D.
        qkv_bias: whether the projections have a bias.
        drop_rate: dropout before the head.
        pos_drop_rate: dropout on the tokens that enter a stage.
        proj_drop_rate: dropout on the outputs of attention and MLP.
        attn_drop_rate: dropout on attention weights.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 at the first.
        patch_norm: whether the patch embedding ends with a norm.
        norm_layer: builds a norm from D, or its name.
        block_layer: builds a block.
        attn_layer: builds the attention of a block.
        merging_layer: builds the patch merging before a stage from the channels before and after it, and `norm_layer`.
    """

    takes = frozenset(
        {"pre", "before", "inner", "after", "bias", "token_bias", "key_bias", "value_bias", "rotary", "query_scale"}
    )
    default_encoding = "relative_bias"

    def __init__(
        self,
        position: PositionBuilder,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window_size: WindowSize = 7,
        shift: Shift = "timm",
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        patch_norm: bool = True,
        norm_layer: str | Callable[[int], nn.Module] | None = None,
        block_layer: Callable[..., nn.Module] = Block,
        attn_layer: Callable[..., nn.Module] | None = None,
        merging_layer: Callable[..., nn.Module] = PatchMerging,
    ) -> None:
        norm = nn.LayerNorm if norm_layer is None else norm_layer_of(norm_layer)
        build_attention = attn_layer or WindowAttention
        dims = [embed_dim << stage for stage in range(len(depths))]
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            embed_dims=dims,
            depths=depths,
            drop_rate=drop_rate,
            pos_drop_rate=pos_drop_rate,
        )
        self.shift = shift
        self._set_windows(self.img_size, window_size)
        self.build_position(position, num_heads)
        self.build_head(norm)

        def block(stage: int, index: int, drop_path: float) -> nn.Module:
            dim, heads = dims[stage], num_heads[stage]
            attn = build_attention(dim, heads, qkv_bias=qkv_bias, attn_drop=attn_drop_rate, proj_drop=proj_drop_rate)
            return block_layer(
                dim, heads, mlp_ratio, qkv_bias, proj_drop_rate, drop_path=drop_path, norm_layer=norm, attn=attn
            )

        self.build_stages(block, in_chans, drop_path_rate, norm, merging_layer, patch_norm)
        self.finish()

    def _set_windows(self, size: tuple[int, int], given: WindowSize) -> None:
        """Set the windows of every stage to those of a model built for images of `size`."""
        grid, count = super().grid_at(size), len(self.depths)
        stages = grid.pyramid(count, pad=True)
        if isinstance(given, int):
            windows = grid.in_windows((given,) * count, pad=True).windows
            self.windows = tuple((min(one),) * 2 for one in windows) if self.shift == "microsoft" else windows
        elif len(given) != count:
            raise ValueError(
                f"`window_size` must be a side, or (rows, columns) for each of {count} stages, got {given}."
            )
        else:
            each = zip(stages, given, strict=True)
            self.windows = tuple((at.window(rows).height, at.window(columns).width) for at, (rows, columns) in each)
        self.window_size = given
        #: (rows, columns) that every second block of each stage shifts its windows by.
        self.shifts = [self._shift_of(at.shape, window) for at, window in zip(stages, self.windows, strict=True)]

    def _shift_of(self, sides: tuple[int, ...], window: tuple[int, ...]) -> tuple[int, int]:
        """Return half of a window, along the axes of the rule `shift`."""
        several = [side > step for side, step in zip(sides, window, strict=True)]
        if self.shift == "microsoft":
            several = [all(several)] * 2
        down, across = (step // 2 if moves else 0 for step, moves in zip(window, several, strict=True))
        return down, across

    @checked
    def set_input_size(
        self, img_size: int | tuple[int, ...] | None = None, window_size: WindowSize | None = None
    ) -> None:
        """Change the image size, or the windows, that position information is stored for.

        Args:
            img_size: in pixels, one side or (height, width); unchanged by default.
            window_size: in patches, one side, or (rows, columns) for every stage; unchanged by default.
        """
        size = to_2tuple(self.img_size if img_size is None else img_size)
        self._set_windows(size, self.window_size if window_size is None else window_size)
        super().set_input_size(size)

    def grid_at(self, image: tuple[int, int]) -> Grid:
        """Return the first stage's grid, with the windows, of an image of `image` = (height, width), in pixels."""
        return super().grid_at(image).with_windows(self.windows)

    def where(self, stage: int, index: int, grid: Grid) -> tuple[Windows]:
        """Return the windows of a block: every second block shifts them by half, along the axes of the rule `shift`.

        The number of windows is the one for the size that the model is built for.
        """
        return (Windows(grid, grid.within, self.shifts[stage] if index % 2 else (0, 0)),)

    def own_name(self, published: str) -> str:
        """Return our name for a parameter of timm."""
        return re.sub(r"^head\.fc\.", "head.", published)

    def published_name(self, own: str) -> str:
        """Return the name of a parameter in timm."""
        return re.sub(r"^head\.", "head.fc.", own)


_POOL = {"pool_size": (7, 7)}
# 'peg' has a PEG after the first block of every stage and the bias tables; `encoding="peg"` omits the latter.
register_sizes(
    SwinTransformer,
    {
        "swin_tiny_patch4_window7_224": Size(28_288_354, hub="timm/swin_tiny_patch4_window7_224.ms_in1k", cfg=_POOL),
        "swin_small_patch4_window7_224": Size(
            49_606_258, {"depths": (2, 2, 18, 2)}, hub="timm/swin_small_patch4_window7_224.ms_in1k", cfg=_POOL
        ),
        "swin_base_patch4_window7_224": Size(
            87_768_224,
            {"embed_dim": 128, "num_heads": (4, 8, 16, 32), "depths": (2, 2, 18, 2)},
            hub="timm/swin_base_patch4_window7_224.ms_in1k",
            cfg=_POOL,
        ),
        "swin_tiny_peg_patch4_window7_224": Size(28_302_754, encoding="relative_bias + peg", cfg=_POOL),
        "swin_small_peg_patch4_window7_224": Size(
            49_620_658, {"depths": (2, 2, 18, 2)}, encoding="relative_bias + peg", cfg=_POOL
        ),
        "swin_base_peg_patch4_window7_224": Size(
            87_787_424,
            {"embed_dim": 128, "num_heads": (4, 8, 16, 32), "depths": (2, 2, 18, 2)},
            encoding="relative_bias + peg",
            cfg=_POOL,
        ),
    },
)
register_small(
    "Swin", "swin_tiny_patch4_window7_224", img_size=32, embed_dim=12, depths=(2, 2), num_heads=(1, 2), window_size=4
)
