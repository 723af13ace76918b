"""CeiT's locally enhanced feed-forward layer, and the block around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graticule.grid import Grid
from graticule.layer_position import LayerPosition
from graticule.layers.block import Block


class LocallyEnhancedFeedForward(nn.Module):
    """An MLP with a depth-wise convolution between its layers, on the patches alone; prefix tokens pass unchanged.

    Each of the three convolutions has a batch norm, and the first two an activation.

    Reference: Incorporating Convolution Designs into Visual Transformers (CeiT, Yuan et al., 2021), section 3.3.

    Args:
        dim: D.
        hidden: channels between.
        kernel: side of the depth-wise convolution, odd.
        act_layer: the activation.
    """

    def __init__(self, dim: int, hidden: int, kernel: int = 3, act_layer: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"`kernel` must be odd, got {kernel}.")
        self.conv1 = nn.Conv2d(dim, hidden, 1)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, hidden, kernel, padding=kernel // 2, groups=hidden)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.conv3 = nn.Conv2d(hidden, dim, 1)
        self.bn3 = nn.BatchNorm2d(dim)
        self.act = act_layer()

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Take tokens x: (B, N, D) to (B, N, D)."""
        maps = grid.to_map(x)  # a view, channels last
        maps = self.act(self.bn1(self.conv1(maps)))
        maps = self.act(self.bn2(self.conv2(maps)))
        patches = grid.from_map(self.bn3(self.conv3(maps)))
        return torch.cat([grid.split(x)[0], patches], 1) if grid.prefix else patches


class LeffBlock(Block):
    r"""Attention, then the locally enhanced feed-forward layer, each behind a norm and a shortcut.

    Reference: CeiT (Yuan et al., 2021), section 3.3.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        act_layer: type[nn.Module] = nn.GELU,
        **kwargs: Any,
    ) -> None:
        leff = LocallyEnhancedFeedForward(dim, int(dim * mlp_ratio), act_layer=act_layer)
        super().__init__(dim, num_heads, mlp_ratio, qkv_bias, mlp=leff, **kwargs)

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Grid) -> Tensor:  # noqa: B008
        """Take tokens x: (B, N, D) of the grid to (B, N, D)."""
        (grid,) = where
        x = x + self.drop_path1(self.attn(self._normalized(x, position.inner), position, grid))
        return x + self.drop_path2(self.mlp(self.norm2(x), grid))
