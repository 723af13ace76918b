"""Multi-head self-attention with the inputs, bias and rotation of a `LayerPosition`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.position.bias import Bias
from graticule.position.layer import OF_PAIRS, LayerPosition
from graticule.position.rotation import saves_inputs
from graticule.registry.checks import checked
from graticule.registry.fields import Channels, Positive, ShareBelowOne, SmallCount


class Attention(nn.Module):
    r"""softmax(q k^T / sqrt(d) + bias) v in every head, through `scaled_dot_product_attention`.

    Queries, keys and values are projected by one matrix, ordered q, k, v and then by head, with the names of timm and
    DeiT (`qkv`, `proj`).

    With `cosine` the logits are :math:`\min(e^{\tau_h}, 100) \cos(q, k)` + bias, with tau learned per head, starting at
    ln 10.

    Reference: Attention Is All You Need (Vaswani et al., 2017), Eq. 1; `cosine`, Swin Transformer V2 (Liu et al.,
    2022), Eq. 2.

    Args:
        dim: D, a multiple of `num_heads`.
        num_heads: h.
        qkv_bias: whether the three projections have a bias.
        attn_drop: dropout rate on the attention weights.
        proj_drop: dropout rate on the output.
        scale: of the logits, instead of d^(-1/2).
        cosine: whether logits are cosines times a learned scale; `scale` must then be left out.
        proj_bias: whether the projection of the output has a bias.
        qkv: projects to concatenated queries, keys and values, (..., D) -> (..., 3D); a linear layer by default.
        qk_norm: builds a norm of the d channels of queries, and one of keys, before rotation; None for no norm.
        inner_norm: builds a norm of the D channels of the mixed values, before the projection; None for no norm.
    """

    #: The fields of `LayerPosition` that it uses.
    takes: ClassVar[frozenset[str]] = frozenset({"inputs", "queries_keys", *OF_PAIRS})

    @checked
    def __init__(
        self,
        dim: Channels,
        num_heads: SmallCount = 8,
        qkv_bias: bool = True,
        attn_drop: ShareBelowOne = 0.0,
        proj_drop: ShareBelowOne = 0.0,
        scale: Positive | None = None,
        cosine: bool = False,
        proj_bias: bool = True,
        qkv: nn.Module | None = None,
        qk_norm: Callable[[int], nn.Module] | None = None,
        inner_norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        if cosine and scale is not None:
            raise ValueError(f"`scale` must be left out with `cosine`, whose scale is learned, got {scale}.")
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"`embed_dim` must be a multiple of `num_heads`, got {dim} with {num_heads} heads.")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = 1.0 if cosine else self.head_dim**-0.5 if scale is None else scale
        self.logit_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(10))) if cosine else None
        self.attn_drop = attn_drop
        self.qkv = qkv or nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.q_norm, self.k_norm = (qk_norm(self.head_dim) if qk_norm else nn.Identity() for _ in range(2))
        self.norm = inner_norm(dim) if inner_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Any) -> Tensor:  # noqa: B008
        """Mix the tokens x: (B, N, D) into (B, N, D); `where` is the grid, which is not used."""
        mixed = self._mix(*self._project(x, position, *where), position)
        return self.proj_drop(self.proj(self.norm(mixed.transpose(1, 2).flatten(2))))

    def weights(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Any) -> Tensor:  # noqa: B008
        """Compute the attention weights, which `forward` never stores, (B, h, N, N), rows summing to 1."""
        q, k, _, bias = self._project(x, position, *where)
        return self._weights(q, k, bias, position)

    def _project(self, x: Tensor, position: LayerPosition, *where: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys and values with the position, (B, h, N, d) each, and the bias, if there is one.

        A bias in two factors is not returned: it is part of queries and keys, which then have r more channels.
        """
        if position.inputs is None and position.queries_keys is None:
            y = self.qkv(x)  # `unflatten` and iteration, which are Python, would cost the host more
            y = y.reshape(y.shape[0], y.shape[1], 3, self.num_heads, self.head_dim)
            q, k, v = y.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            # each different input passes through the whole projection, and a part of the output is used: slicing the
            # weight would bypass hooks on the module, and a replacement of it (quantized, with an adapter) may have no
            # weight
            of_q, of_k, of_v = (x, x, x) if position.inputs is None else position.inputs(x)
            if position.queries_keys is not None:
                same, of_q = of_k is of_q, of_q + position.queries_keys
                of_k = of_q if same else of_k + position.queries_keys
            all_q = self.qkv(of_q)
            all_k = all_q if of_k is of_q else self.qkv(of_k)
            all_v = all_q if of_v is of_q else self.qkv(of_v)
            q, k, v = (
                y.chunk(3, -1)[i].unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # (B, h, N, d)
                for i, y in enumerate((all_q, all_k, all_v))
            )
        q, k = self.q_norm(q), self.k_norm(k)
        if self.logit_scale is not None:
            q = F.normalize(q, dim=-1) * self.logit_scale.clamp(max=math.log(100)).exp().to(q.dtype)
            k = F.normalize(k, dim=-1)
        if position.rotary is not None:
            plain = isinstance(self.q_norm, nn.Identity) and self.logit_scale is None
            if v.requires_grad and plain and not saves_inputs(position.rotary):
                v = v.contiguous()  # a view would keep queries and keys before the rotation for the backward pass
            q, k = position.rotary(q, k)
        if position.query_scale is not None:
            q = (q * position.query_scale[..., None]).type_as(v)
        longer, tables = (q, k), []
        if position.bias is not None:
            bias = Bias.of(position.bias)
            appended = bias.append(*longer, self.scale)
            if appended is None:
                tables.append(bias.table(q * self.scale).to(q.dtype))
            longer = appended or longer
        if position.key_bias is not None:
            tables.append(position.key_bias(k * self.scale).to(q.dtype))
        q, k = longer
        if not tables:
            return q, k, v, None
        table: Tensor = sum(tables[1:], tables[0])
        # the fused kernel accepts a bias with a batch axis; without, PyTorch falls back to a kernel half as fast
        return q, k, v, table[None] if table.ndim == 3 else table

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, position: LayerPosition, is_causal: bool = False
    ) -> Tensor:
        """Compute softmax(q k^T scale + bias) v, (B, h, N, d); queries and keys may have more channels than values."""
        dropout = self.attn_drop if self.training else 0.0
        if position.value_bias is not None or (dropout and position.positional is not None):
            weights = F.dropout(self._weights(q, k, bias, position), dropout)
            mixed = weights @ v
            return mixed if position.value_bias is None else mixed + position.value_bias(weights)
        more = q.shape[-1] - v.shape[-1]
        # the fused kernel needs as many channels in the values; without it, attention takes two to three times as long
        values = F.pad(v, (0, more)) if more else v
        mixed = F.scaled_dot_product_attention(q, k, values, bias, dropout, is_causal, scale=self.scale)
        mixed = mixed[..., : v.shape[-1]] if more else mixed
        return mixed if position.positional is None else position.positional.mix(mixed, v)

    def _weights(self, q: Tensor, k: Tensor, bias: Tensor | None, position: LayerPosition) -> Tensor:
        """Compute the attention weights, (B, h, N, N)."""
        logits = q * self.scale @ k.transpose(-2, -1)
        weights = (logits if bias is None else logits + bias).softmax(-1)
        return weights if position.positional is None else position.positional.blend(weights)


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
        sees_all_keys = bias is None and q.shape[-2] == k.shape[-2]
        mask = None if sees_all_keys else self._masked(bias, q.shape[-2], k)
        mixed = self._mix(q, k, v, mask, LayerPosition(), is_causal=sees_all_keys)
        return self.proj_drop(self.proj(self.norm(mixed.transpose(1, 2).flatten(2))))

    def weights(self, x: Tensor, position: LayerPosition = LayerPosition(), *where: Any) -> Tensor:  # noqa: B008
        """Compute the attention weights, which `forward` never stores, (B, h, N, N), rows summing to 1."""
        q, k, _, bias = self._project(x, position)
        mask = self._masked(q.new_zeros(()) if bias is None else bias, q.shape[-2], k)
        logits = q * self.scale @ k.transpose(-2, -1)
        return (logits if mask is None else logits + mask).softmax(-1)

    def _masked(self, bias: Tensor | None, new: int, keys: Tensor) -> Tensor | None:
        """Return a bias plus the mask, or the mask, True for visible keys; None if all keys are visible.

        The queries belong to the tokens of the last `new` keys.
        """
        if new == 1:
            return bias
        every = keys.shape[-2]
        ahead = torch.ones(new, every, dtype=torch.bool, device=keys.device).triu(every - new + 1)
        return ~ahead if bias is None else bias.masked_fill(ahead, -torch.inf)


class KeyValueCache:
    """Keys and values of the tokens so far, with memory for `capacity` tokens.

    The memory, 2 B h d numbers per token, is allocated with the first tokens, in their dtype and on their device. Keys
    may have another number of channels than values. It is for inference: its contents have no gradient.

    Args:
        capacity: maximum number of tokens.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"`capacity` must be at least 1, got {capacity}.")
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None  # (B, h, capacity, d)
        self._values: Tensor | None = None  # the same

    @property
    def bytes(self) -> int:
        return sum(memory.nbytes for memory in (self._keys, self._values) if memory is not None)

    @torch.no_grad()
    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of n tokens, (B, h, n, d) each; return all keys and values, (B, h, length, d) each."""
        stop = self.length + keys.shape[-2]
        if stop > self.capacity:
            raise ValueError(f"`keys` must leave the cache at {self.capacity} tokens at most, got {stop}.")
        if self._keys is None or self._values is None:
            self._keys, self._values = (
                new.new_empty(*new.shape[:2], self.capacity, new.shape[-1]) for new in (keys, values)
            )
        same = (keys.shape[:2], keys.dtype, keys.device) == (self._keys.shape[:2], self._keys.dtype, self._keys.device)
        if not same:
            raise ValueError(
                f"`cache` must be continued with the batch, heads, dtype and device that it has, "
                f"{tuple(self._keys.shape[:2])} of {self._keys.dtype} on {self._keys.device}, got "
                f"{tuple(keys.shape[:2])} of {keys.dtype} on {keys.device}."
            )
        self._keys[:, :, self.length : stop] = keys
        self._values[:, :, self.length : stop] = values
        self.length = stop
        return self._keys[:, :, :stop], self._values[:, :, :stop]
