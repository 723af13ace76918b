"""Attention within the windows of a grid, which may be shifted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from graticule.layers.attention import Attention
from graticule.position.layer import LayerPosition
from graticule.position.windows import Windows
from graticule.system.symbolic import is_statically_true

#: The most tokens of a window for which cuDNN's kernel, PyTorch's first choice with a bias, is left out.
SMALL_WINDOW = 64


class WindowAttention(Attention):
    """Attention among the tokens of a window; bias and rotation of the position are for a window.

    With a shift the map is rolled first. The windows of the last row and column then contain tokens that were not
    neighbors, and these do not attend to each other. Queries, keys and values of all windows are projected at once, and
    the mask of each window is added to the bias.

    Where windows do not tile the grid, the rolled map is padded with zeros at the bottom and on the right, as in timm.
    The zeros are attended to, there and in Microsoft's code. Since timm rolls before it pads, opposite borders can meet
    in a shifted layer: on 9 rows with windows of 4, row 0 attends to rows 6 to 8. Microsoft's code for detection pads
    first, so they never meet.

    Reference: Swin Transformer (Liu et al., 2021), section 3.2.

    The `Windows` are passed to every call; the arguments are as in `Attention`. `weights` has all windows,
    (B * windows, h, M, M); the windows of a sample are the rolled map's, row by row.
    """

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Any) -> Tensor:  # noqa: B008
        """Mix the tokens x: (B, N, D) within the windows `where`, after rolling the map by their shift."""
        y = self._mix(*self._project(x, position, *where), position)
        y = where[0].join(y.transpose(1, 2).flatten(2), x.shape[0])
        return self.proj_drop(self.proj(self.norm(y)))

    def masking(self, dtype: torch.dtype) -> float:
        """Return the number that is added to the logits of tokens of a window that are not neighbors."""
        return torch.finfo(dtype).min / 2  # half of it, so that no sum with a bias is infinite

    def _project(self, x: Tensor, position: LayerPosition, *where: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Cut tokens into windows and project them to q, k and v, (B * windows, h, M, d), with the bias.

        The first axis of a bias with a mask is for the windows of a sample, unless it is one per sample.
        """
        windows: Windows
        (windows,) = where
        q, k, v, bias = super()._project(windows.cut(x), position)
        if not any(windows.shift):
            return q, k, v, bias
        mask = self._mask(windows, q.dtype, x.device)
        if bias is None:
            return q, k, v, mask
        return q, k, v, bias + (mask if is_statically_true(bias.shape[0] == 1) else mask.repeat(x.shape[0], 1, 1, 1))

    def _mask(self, windows: Windows, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return `masking` for tokens that are not neighbors, (windows, 1, M, M), computed once for all blocks."""
        kind = self.masking(dtype), dtype, device
        if kind not in windows.masks:
            windows.masks[kind] = kind[0] * windows.strangers(device)[:, None].to(dtype)
        return windows.masks[kind]

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, position: LayerPosition, is_causal: bool = False
    ) -> Tensor:
        if (
            bias is None
            or is_statically_true(bias.shape[0] == 1)
            or is_statically_true(bias.shape[0] == q.shape[0])
            or position.value_bias is not None
        ):
            with _kernels(q, bias):
                return super()._mix(q, k, v, bias, position, is_causal)
        # as heads, the windows of a sample have one bias for all samples, which would otherwise be copied for each
        windows, heads = bias.shape[0], q.shape[1]
        q, k, v = (y.unflatten(0, (-1, windows)).contiguous().flatten(1, 2) for y in (q, k, v))
        bias = bias.expand(-1, heads, -1, -1).contiguous().flatten(0, 1)[None]
        with _kernels(q, bias):
            y = super()._mix(q, k, v, bias, position, is_causal)
        return y.unflatten(1, (windows, heads)).flatten(0, 1)

    def _weights(self, q: Tensor, k: Tensor, bias: Tensor | None, position: LayerPosition) -> Tensor:
        if bias is not None and not is_statically_true(bias.shape[0] == 1):
            bias = bias.repeat(q.shape[0] // bias.shape[0], 1, 1, 1)
        return super()._weights(q, k, bias, position)


def _kernels(q: Tensor, bias: Tensor | None) -> AbstractContextManager[Any]:
    """Leave out cuDNN's kernel of attention for small windows on a GPU, four times as slow there as the efficient one.

    In training PyTorch does so itself, as the bias has a gradient. A user's choice of kernels is kept outside of
    compiled models, whose choice is made once.
    """
    if bias is None or not q.is_cuda or q.shape[-2] > SMALL_WINDOW:
        return nullcontext()
    enabled: dict[SDPBackend, Callable[[], bool]] = {
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled,
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled,
        SDPBackend.MATH: cuda.math_sdp_enabled,
    }
    chosen = [kernel for kernel, is_on in enabled.items() if torch.compiler.is_compiling() or is_on()]
    return sdpa_kernel(chosen) if SDPBackend.EFFICIENT_ATTENTION in chosen else nullcontext()
