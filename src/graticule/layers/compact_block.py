"""The block of compact transformers, whose second norm stands on the stream itself."""

from __future__ import annotations

from torch import Tensor

from graticule.grid import Grid
from graticule.layer_position import LayerPosition
from graticule.layers.block import Block


class CompactBlock(Block):
    r"""Attention behind a norm and a shortcut; then a norm of the stream, and an MLP with a shortcut around itself.

    .. math:: x' = LN(x + MSA(LN(x) + p)), \quad x'' = x' + MLP(x')

    where p is `inner` of the layer's position, if any. So the second norm is not passed by, as it is in ViT.

    Reference: Compact Transformers (Hassani et al., 2021), whose text draws ViT's block and whose code has this one.
    """

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Grid) -> Tensor:  # noqa: B008
        """Take tokens x: (B, N, D) to (B, N, D); `where`, the grid, is for an attention that needs it."""
        x = self.norm2(x + self.drop_path1(self.attn(self._normalized(x, position.inner), position, *where)))
        return x + self.drop_path2(self.mlp(x))

    def carried(self, stream: Tensor) -> Tensor:
        """Say what becomes of a table on the stream, (N, D), behind the block."""
        return self.norm2(stream)
