"""Attention within the windows of a grid, which may be shifted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graticule.layers.attention import Attention
from graticule.position.grid import Grid, Windows
from graticule.position.layer import LayerPosition


class WindowAttention(Attention):
    """Attention among the tokens of a window; bias and rotation of the position are for a window.

    With a shift the map is rolled first. The windows of the last row and column then contain tokens that were not
    neighbors, and these do not attend to each other. There are only four kinds of windows, so attention is computed
    for each kind at once, with one bias of the size of a window: no mask per window or per sample.

    Where windows do not tile the grid, the rolled map is padded with zeros at the bottom and on the right, as in timm.
    The zeros are attended to, there and in Microsoft's code. Since timm rolls before it pads, opposite borders can meet
    in a shifted layer: on 9 rows with windows of 4, row 0 attends to rows 6 to 8. Microsoft's code for detection pads
    first, so they never meet.

    Reference: Swin Transformer (Liu et al., 2021), section 3.2.

    The `Windows` are passed to every call; the arguments are those of `Attention`.
    """

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Any) -> Tensor:  # noqa: B008
        """Mix the tokens x: (B, N, D) within the windows `where`, after rolling the map by their shift."""
        windows: Windows
        (windows,) = where
        grid, window = windows.grid, windows.window
        strips = []
        for strip in windows.kinds(x):
            row = []
            for part, seen in strip:
                y = self._attend(*self._project_windows(part, window, position, seen), position)
                y = y.transpose(1, 2).flatten(2).unflatten(1, window.shape)  # (B * windows, h, w, D)
                rows, columns = part.shape[1] // window.height, part.shape[2] // window.width
                y = y.unflatten(0, (x.shape[0], rows, columns)).transpose(2, 3).contiguous()
                row.append(y.flatten(3, 4).flatten(1, 2))
            strips.append(torch.cat(row, 2) if len(row) > 1 else row[0])
        y = torch.cat(strips, 1) if len(strips) > 1 else strips[0]
        y = y[:, : grid.height, : grid.width]
        if any(windows.shift):
            y = y.roll(windows.shift, (1, 2))
        out: Tensor = self.proj_drop(self.proj(self.norm(y.flatten(1, 2))))
        return out

    def weights(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Any) -> Tensor:  # noqa: B008
        """Compute the attention weights, which `forward` never stores, (B * windows, h, M, M), rows summing to 1.

        The windows of a sample are ordered by kind: those that the shift does not divide, then those of the last
        column, of the last row, and the corner.
        """
        windows: Windows
        (windows,) = where
        found = []
        for strip in windows.kinds(x):
            for part, seen in strip:
                q, k, _, bias = self._project_windows(part, windows.window, position, seen)
                logits = q * self.scale @ k.transpose(-2, -1)
                found.append((logits if bias is None else logits + bias).softmax(-1).unflatten(0, (x.shape[0], -1)))
        return torch.cat(found, 1).flatten(0, 1)

    def _project_windows(
        self, part: Tensor, window: Grid, position: LayerPosition, seen: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Cut a rectangle into windows and project them to q, k and v, (B * windows, h, M, d), with the bias."""
        rows, columns = part.shape[1] // window.height, part.shape[2] // window.width
        windows = part.unflatten(2, (columns, window.width)).unflatten(1, (rows, window.height)).transpose(2, 3)
        # copied here instead of by `flatten`, whose search for a view takes minutes with symbolic sizes
        q, k, v, bias = self._project(windows.contiguous().flatten(3, 4).flatten(0, 2), position)
        if seen is None:
            return q, k, v, bias
        bias = torch.zeros((), dtype=q.dtype, device=q.device) if bias is None else bias
        bias = torch.where(seen, bias, torch.finfo(q.dtype).min)
        return q, k, v, bias[None, None] if bias.ndim == 2 else bias


def window_tokens(windows: Windows) -> Tensor:
    """Return the tokens of each window in the order of `WindowAttention.weights`, (windows, M); -1 for padding."""
    window = windows.window
    numbers = torch.arange(1, windows.grid.patches + 1)[None, :, None]
    found = []
    for strip in windows.kinds(numbers):
        for part, _ in strip:
            cut = part[0, :, :, 0].unflatten(1, (-1, window.width)).unflatten(0, (-1, window.height))
            found.append(cut.transpose(1, 2).flatten(2).flatten(0, 1))
    return torch.cat(found) - 1
