"""Self-attention within windows, which may be shifted: Swin's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.checks import checked
from graticule.grid import Grid
from graticule.layer_position import LayerPosition
from graticule.layers.attention import Attention

_WINDOW = Grid(7, 7)


class WindowAttention(Attention):
    """Attention among the tokens of a window; what `position` says of bias and rotation is for a window.

    With a shift the map is rolled first, and in the windows that then hold what was not neighboured, those of the
    last row and column, tokens of different parts do not see one another. There are only four kinds of such windows,
    so each kind is attended at once, with one bias of a window: no mask for every window, and none for every sample.

    Where windows do not tile the grid, the rolled map is padded with zeros below and to the right, as in timm. The
    zeros are attended to, there and in Microsoft's code. Since timm rolls before it pads, opposite borders can meet in
    a shifted layer: on 9 rows with windows of 4, row 0 attends to rows 6 to 8. Microsoft's code for detection pads
    first, where they never do.

    Reference: Swin Transformer (Liu et al., 2021), section 3.2.

    Args:
        dim: D, a multiple of `num_heads`.
        num_heads: h.
        window: sides of a window, in patches.
        shift: how far the map is rolled, (rows, columns).
        kwargs: as `Attention`.
    """

    @checked
    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: Grid = _WINDOW,
        shift: tuple[int, int] = (0, 0),
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.set_window(window, shift)

    def set_window(self, window: Grid, shift: tuple[int, int] = (0, 0)) -> None:
        """Make another window and shift those of the layer; who sees whom is worked out here, once and for all."""
        self.window = window
        self.shift = shift
        for name, down, across in (("right", 0, shift[1]), ("below", shift[0], 0), ("corner", *shift)):
            seen = self._seen(down, across, self.proj.weight.device) if down or across else None
            self.register_buffer(f"seen_{name}", seen, persistent=False)

    seen_right: Tensor | None
    seen_below: Tensor | None
    seen_corner: Tensor | None

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Grid) -> Tensor:  # noqa: B008
        """Mix the tokens x: (B, N, D) of the grid within their windows."""
        (grid,) = where
        dropout = self.attn_drop if self.training else 0.0
        strips = []
        for strip in self._parts(x, grid):
            row = []
            for part, apart in strip:
                q, k, v, bias = self._windows(part, position, apart)
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=self.scale)
                y = y.transpose(1, 2).flatten(2).unflatten(1, self.window.shape)  # (B * windows, h, w, D)
                rows, columns = part.shape[1] // self.window.height, part.shape[2] // self.window.width
                row.append(y.unflatten(0, (-1, rows, columns)).transpose(2, 3).flatten(3, 4).flatten(1, 2))
            strips.append(torch.cat(row, 2) if len(row) > 1 else row[0])
        y = torch.cat(strips, 1) if len(strips) > 1 else strips[0]
        y = y[:, : grid.height, : grid.width]
        if any(self.shift):
            y = y.roll(self.shift, (1, 2))
        return self.proj_drop(self.proj(y.flatten(1, 2)))

    def weights(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Grid) -> Tensor:  # noqa: B008
        """Compute the attention weights that `forward` never writes down, (B * windows, h, M, M), rows summing to 1.

        The windows of a sample stand by kind: those that the shift leaves whole, then those of the last column, of
        the last row, and the corner.
        """
        (grid,) = where
        found = []
        for strip in self._parts(x, grid):
            for part, apart in strip:
                q, k, _, bias = self._windows(part, position, apart)
                logits = q * self.scale @ k.transpose(-2, -1)
                found.append((logits if bias is None else logits + bias).softmax(-1).unflatten(0, (x.shape[0], -1)))
        return torch.cat(found, 1).flatten(0, 1)

    def _parts(self, x: Tensor, grid: Grid) -> list[list[tuple[Tensor, Tensor | None]]]:
        """Cut the map of tokens x into rectangles (B, H, W, D) of one kind of window, with who sees whom, (M, M)."""
        y = x.unflatten(1, grid.shape)
        if any(self.shift):
            y = y.roll((-self.shift[0], -self.shift[1]), (1, 2))
        below, right = (-side % step for side, step in zip(grid.shape, self.window.shape, strict=True))
        if below or right:
            y = F.pad(y, (0, 0, 0, right, 0, below))
        lower, upper = (
            [(0, side, False)] if not shift else [(0, side - step, False), (side - step, side, True)]
            for side, step, shift in zip(y.shape[1:3], self.window.shape, self.shift, strict=True)
        )
        kinds = {(False, False): None, (False, True): self.seen_right}
        kinds |= {(True, False): self.seen_below, (True, True): self.seen_corner}
        return [
            [(y[:, top:bottom, left:end], kinds[last, rightmost]) for left, end, rightmost in upper if end > left]
            for top, bottom, last in lower
            if bottom > top
        ]

    def _seen(self, down: int, across: int, device: torch.device) -> Tensor:
        """Say which tokens of a window see each other where its last rows or columns come from the other edge."""
        y, x = self.window.coordinates(device).unbind(-1)
        kind = 2 * (y >= self.window.height - down) + (x >= self.window.width - across)
        return kind[:, None] == kind[None, :]

    def _windows(
        self, part: Tensor, position: LayerPosition, seen: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Cut a rectangle into windows and project them: q, k and v, (B * windows, h, M, d), and the bias."""
        rows, columns = part.shape[1] // self.window.height, part.shape[2] // self.window.width
        windows = part.unflatten(2, (columns, -1)).unflatten(1, (rows, -1)).transpose(2, 3)
        q, k, v, bias = self._project(windows.flatten(3, 4).flatten(0, 2), position)
        if seen is None:
            return q, k, v, bias
        bias = torch.zeros((), dtype=q.dtype, device=q.device) if bias is None else bias
        bias = torch.where(seen, bias, torch.finfo(q.dtype).min)
        return q, k, v, bias[None, None] if bias.ndim == 2 else bias
