"""Attention within windows, for some layers of a plain ViT on large images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.grid import Grid
from graticule.layer_position import LayerPosition
from graticule.layers import Attention


class WindowedAttention(Attention):
    """Attends within square windows of the grid, with the layer's position on the whole grid.

    Queries, keys and values are computed for the whole grid, including position, and then split into windows; of a
    bias, a window gets the pairs of its own tokens. So each encoding means the same as in attention to all tokens.
    Windows begin at the top left; those that extend beyond the grid have zeros as keys and values, which are attended
    to, as in ViT-Adapter's code.

    Args:
        attention: the attention that it replaces, whose parts and options it keeps.
        window: side of a window, in patches.
    """

    def __init__(self, attention: Attention, window: int) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(attention.__dict__)
        self.window = window

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Grid) -> Tensor:  # noqa: B008
        """Mix the tokens x: (B, N, D) of the grid `where` into (B, N, D)."""
        (grid,) = where
        check_windowed(position)
        q, k, v, bias = self._project(x, position)
        q, k, v = (self._cut(one, grid) for one in (q, k, v))
        mixed = self._fused(q, k, v, None if bias is None else self._cut_bias(bias, grid, len(x)))
        return self._output(self._join(mixed, grid, len(x)))

    def weights(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Grid) -> Tensor:  # noqa: B008
        """Compute the attention weights between all tokens, (B, h, N, N), zero across windows.

        Rows of a window that extends beyond the grid sum to less than 1: the rest is on the zeros.
        """
        (grid,) = where
        q, k, _, bias = self._project(x, position)
        logits = self._cut(q, grid) * self.scale @ self._cut(k, grid).mT
        if bias is not None:
            logits = logits + self._cut_bias(bias, grid, len(x))
        index = self._index(grid, x.device)  # (L, n), -1 beyond the grid
        inner = logits.softmax(-1).unflatten(0, (len(x), -1)).permute(0, 2, 1, 3, 4)  # (B, h, L, n, n)
        rows, columns = (
            index[:, :, None].expand(-1, -1, index.shape[1]),
            index[:, None].expand(-1, index.shape[1], -1),
        )
        kept = (rows >= 0) & (columns >= 0)
        out: Tensor = inner.new_zeros(*inner.shape[:2], grid.patches, grid.patches)
        out[..., rows[kept], columns[kept]] = inner[..., kept]
        return out

    def _padding(self, grid: Grid) -> tuple[int, int]:
        return -grid.height % self.window, -grid.width % self.window

    def _cut(self, x: Tensor, grid: Grid) -> Tensor:
        """Split (B, h, N, d) into windows, (B * L, h, n, d), zero beyond the grid."""
        down, right = self._padding(grid)
        padded = F.pad(x.unflatten(2, grid.shape), (0, 0, 0, right, 0, down))
        cut = padded.unflatten(3, (-1, self.window)).unflatten(2, (-1, self.window))  # (B, h, rows, w, columns, w, d)
        windows: Tensor = cut.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(0, 2)
        return windows

    def _join(self, x: Tensor, grid: Grid, batch: int) -> Tensor:
        """Join windows (B * L, h, n, d) to (B, h, N, d)."""
        down, right = self._padding(grid)
        rows, columns = (grid.height + down) // self.window, (grid.width + right) // self.window
        windows = x.unflatten(2, (self.window, self.window)).unflatten(0, (batch, rows, columns))
        joined = windows.permute(0, 3, 1, 4, 2, 5, 6).flatten(4, 5).flatten(2, 3)  # (B, h, H', W', d)
        tokens: Tensor = joined[:, :, : grid.height, : grid.width].flatten(2, 3)
        return tokens

    def _index(self, grid: Grid, device: torch.device) -> Tensor:
        """Return the tokens of each window, (L, n), -1 beyond the grid."""
        order = torch.arange(1, grid.patches + 1, device=device, dtype=torch.float64)[None, None, :, None]
        return self._cut(order, grid)[:, 0, :, 0].long() - 1

    def _cut_bias(self, bias: Tensor, grid: Grid, batch: int) -> Tensor:
        """Return the bias of the pairs of each window, (B * L, h, n, n), from (B, h, N, N) or (h, N, N)."""
        index = self._index(grid, bias.device)
        within = (index >= 0).to(bias.dtype)
        each = bias[..., index.clamp(0)[:, :, None], index.clamp(0)[:, None]]  # (..., h, L, n, n)
        each = each * within[:, :, None] * within[:, None]
        windows = each.transpose(-4, -3).expand(batch, -1, -1, -1, -1).flatten(0, 1)
        return windows


def check_windowed(position: LayerPosition) -> None:
    """Check that the position of a layer supports windowed attention.

    Raises:
        ValueError: if it has more than tensors and functions of queries and keys.
    """
    if position.value_bias is not None or position.positional is not None:
        raise ValueError(
            "`window` must be 0 for encodings of all pairs of tokens, got one of those that add to the mixed "
            "values or blend attention weights (iRPE on values, GPSA)."
        )
