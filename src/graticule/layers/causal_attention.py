"""Self-attention of a text: every token attends to itself and to those before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graticule.layer_position import LayerPosition
from graticule.layers.attention import Attention


class CausalAttention(Attention):
    r"""softmax(q k^T / sqrt(d) + bias) v over the keys j <= i of every query i, otherwise as `Attention`.

    Without a bias the kernel applies the mask (`is_causal`). With a bias the mask is added to it, minus infinity above
    the diagonal, once per layer, or per sample if the bias is per sample.

    With a cache the tokens x are the next ones of a text: their rotated keys and their values are cached, and their
    queries attend to all tokens so far. Then the position is for these tokens: n rows of a bias with a column for every
    key, n rows of a rotation (`LayerPosition.part`).

    Reference: An Introduction to Transformers (Turner, 2024), section 4.1: A_{n,n'} = 0 where n > n'.
    """

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Any) -> Tensor:  # noqa: B008
        """Mix the tokens x: (B, n, D) into (B, n, D); `where` is their `KeyValueCache`, or nothing."""
        q, k, v, bias = self._project(x, position)
        for cache in where:
            k, v = cache.append(k, v)
        whole = bias is None and q.shape[-2] == k.shape[-2]
        x = self._fused(q, k, v, None if whole else self._masked(bias, q.shape[-2], k), is_causal=whole)
        return self._output(x)

    def weights(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Any) -> Tensor:  # noqa: B008
        """Compute the attention weights, which `forward` never stores, (B, h, N, N), rows summing to 1."""
        q, k, _, bias = self._project(x, position)
        mask = self._masked(q.new_zeros(()) if bias is None else bias, q.shape[-2], k)
        logits = q * self.scale @ k.transpose(-2, -1)
        return (logits if mask is None else logits + mask).softmax(-1)

    def _masked(self, bias: Tensor | None, new: int, keys: Tensor) -> Tensor | None:
        """Return a bias plus the mask, or the mask, True for visible keys; None if all keys are visible.

        The queries are those of the last `new` keys.
        """
        if new == 1:
            return bias
        every = keys.shape[-2]
        ahead = torch.ones(new, every, dtype=torch.bool, device=keys.device).triu(every - new + 1)
        return ~ahead if bias is None else bias.masked_fill(ahead, -torch.inf)
