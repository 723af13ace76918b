"""Twins-SVT: blocks alternate between attention within windows and to a coarser grid, with a PEG in each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from graticule.backbones.pvt import PyramidVisionTransformer
from graticule.backbones.registry import Size, register_sizes, register_small
from graticule.backbones.window_attention import WindowAttention
from graticule.position.grid import Grid, Windows
from graticule.position.position import PositionBuilder


class TwinsSvt(PyramidVisionTransformer):
    """Twins-SVT as published: every second block, from the first, attends within windows; the others attend as in PVT.

    Position is a PEG after the first block of every stage. Windows are not shifted; where they do not tile the grid,
    it is padded with zeros, which are attended to, as in the authors' code and in timm. The names of the parameters are
    theirs.

    Reference: Twins: Revisiting the Design of Spatial Attention in Vision Transformers (Chu et al., 2021), section 3.2.
    Twins-PCPVT is PVT with PEGs and global average pooling (`pvt_small_peg_gap`).

    Args:
        position: builds the position of a stage.
        global_pool: 'avg' or '' (none); there is no class token, as it would be in no window.
        embed_dims: D of each stage.
        depths: blocks of each stage.
        num_heads: h of each stage.
        mlp_ratios: hidden channels of each stage's MLPs, as a multiple of D.
        window_size: side of a window, in patches.
        kwargs: as `PyramidVisionTransformer`.
    """

    pools = ("", "avg")
    default_encoding = "peg"

    def __init__(
        self,
        position: PositionBuilder,
        global_pool: str = "avg",
        embed_dims: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (2, 2, 10, 4),
        num_heads: Sequence[int] = (2, 4, 8, 16),
        mlp_ratios: Sequence[float] = (4, 4, 4, 4),
        window_size: int = 7,
        **kwargs: Any,
    ) -> None:
        if not 2 <= window_size <= 4096:
            raise ValueError(f"`window_size` must be from 2 to 4096 patches, got {window_size}.")
        self.window_size = window_size
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

    def where(self, stage: int, index: int, grid: Grid) -> tuple[Grid | Windows]:
        """Return the windows of an even block, and the grid of an odd one."""
        return (grid,) if index % 2 else (Windows(grid, Grid(self.window_size, self.window_size)),)


_POOL = {"pool_size": (7, 7)}
register_sizes(
    TwinsSvt,
    {
        "twins_svt_small": Size(24_060_776, hub="timm/twins_svt_small.in1k", cfg=_POOL),
        "twins_svt_base": Size(
            56_070_952,
            {"embed_dims": (96, 192, 384, 768), "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)},
            hub="timm/twins_svt_base.in1k",
            cfg=_POOL,
        ),
        "twins_svt_large": Size(
            99_271_400,
            {"embed_dims": (128, 256, 512, 1024), "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)},
            hub="timm/twins_svt_large.in1k",
            cfg=_POOL,
        ),
    },
)
register_small(
    "Twins-SVT",
    "twins_svt_small",
    img_size=16,
    embed_dims=(8, 16),
    depths=(2, 2),
    num_heads=(1, 2),
    sr_ratios=(2, 1),
    mlp_ratios=(2, 2),
    window_size=2,
)
