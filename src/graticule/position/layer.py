"""`LayerPosition`: the position information of one layer, in all forms that a layer can use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.position.bias import BiasFunction, LowRank, bias_with_prefix, part_of, sum_of
from graticule.position.displacement import Displacements, TokenMlp
from graticule.position.rotation import PatchRotation, Rotation

Function = Callable[[Tensor], Tensor]
Mixing = Tensor | Displacements | TokenMlp


class PositionalAttention(NamedTuple):
    r"""Blends attention weights P that depend on the grid alone with those of the tokens, A, by a gate per head.

    .. math:: (1 - g)\, A + g\, P

    weights: P, (heads, N, N); rows sum to 1 where the gate is not 0.
    gate: g in [0, 1], (heads, N, 1).
    """

    weights: Tensor
    gate: Tensor

    def blend(self, attention: Tensor) -> Tensor:
        """Return the blend with the attention weights of the tokens, (B, heads, N, N)."""
        gate = self.gate.to(attention.dtype)
        return (1 - gate) * attention + gate * self.weights.to(attention.dtype)

    def mix(self, mixed: Tensor, values: Tensor) -> Tensor:
        """Return the values mixed by the blend, from those mixed by A and the values, (B, heads, N, d) each."""
        gate = self.gate.to(values.dtype)
        return (1 - gate) * mixed + (gate * self.weights.to(values.dtype)) @ values


class LayerPosition(NamedTuple):
    """The position information of one layer. Every field may be None.

    A field that depends on parameters and grid only is a tensor; one that depends on the tokens is a function of them.

    pre: (N, D), added to the residual stream before the layer.
    before: maps the residual stream before the layer, after `pre` is added, (B, N, D) -> (B, N, D).
    inner: (N, D), added after the layer's first norm, before attention.
    inputs: maps the normalized tokens to the inputs of the projections to queries, keys and values, (B, N, D) -> three
        of (B, N, D).
    bias: (heads, N, N), added to the attention logits; the same as two factors (`LowRank`); or a function that computes
        it from the scaled queries, (B, heads, N, d) -> (B, heads, N, N). It also takes `start` and `stop`: then the
        queries are those of n tokens from `start` on, and the bias is for the keys of the tokens before `stop`.
    token_bias: computes a bias from the normalized tokens from which queries are projected, (B, N, D) -> `LowRank` of
        (B, heads, N, r) and (1, 1, N, r). It takes `start` and `stop` as `bias` does.
    key_bias: a function of the scaled keys, (B, heads, N, d), whose result is added to the attention logits, (B, heads,
        N, N), queries before keys.
    value_bias: a function of the attention weights, (B, heads, N, N), whose result is added to the mixed values, (B,
        heads, N, d).
    positional: attention weights that depend on the grid alone, and a gate that blends them with those of the tokens.
    rotary: rotates queries and keys by their positions.
    queries_keys: (N, D), added to the inputs of queries and keys, but not of values.
    query_scale: (N,) or (heads, N), the factor of the queries of each token.
    after: maps the residual stream after the layer, (B, N, D) -> (B, N, D).
    mixing: the weights that mix the patches of a grid or window: (groups, N, N), with one group if all channels are
        mixed by the same weights; or `Displacements` if they depend on displacements only; or `TokenMlp`, an MLP over
        the patches.
    spatial_bias: (N,) or (groups, N), added to every channel of the mixed tokens, or to those of its group.

    `pre`, `before` and `after` act between blocks: `enter` and `leave` apply them. A block applies `inner` by `inside`.
    """

    pre: Tensor | None = None
    inner: Tensor | None = None
    bias: Tensor | LowRank | BiasFunction | None = None
    token_bias: Callable[..., LowRank] | None = None
    key_bias: Function | None = None
    value_bias: Function | None = None
    positional: PositionalAttention | None = None
    rotary: Rotation | None = None
    queries_keys: Tensor | None = None
    query_scale: Tensor | None = None
    before: Function | None = None
    inputs: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
    after: Function | None = None
    mixing: Mixing | None = None
    spatial_bias: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """Turn the residual stream x: (B, N, D) into the input of the layer."""
        if self.pre is not None:
            x = x + self.pre
        return x if self.before is None else self.before(x)

    def inside(self, y: Tensor) -> Tensor:
        """Add `inner` to the normalized tokens y: (B, N, D); not in place, as a hook may keep the output of a norm."""
        return y if self.inner is None else y + self.inner

    def leave(self, x: Tensor) -> Tensor:
        """Turn the output of the layer, x: (B, N, D), into the residual stream after it."""
        return x if self.after is None else self.after(x)

    def part(self, start: int, stop: int) -> LayerPosition:
        """Return the position of the tokens from `start` on in a text that ends before `stop`.

        So token-by-token generation gets the same position as the whole text.

        Raises:
            ValueError: if a field is a function of all tokens and cannot be sliced.
        """
        for field in ("key_bias", "value_bias", "positional", "before", "inputs", "after", "mixing", "spatial_bias"):
            if getattr(self, field) is not None:
                raise ValueError(f"`{field}` must be None for a part of the tokens: it takes all of them at once.")
        return LayerPosition(
            pre=None if self.pre is None else self.pre[start:stop],
            inner=None if self.inner is None else self.inner[start:stop],
            bias=None if self.bias is None else part_of(self.bias, start, stop),
            token_bias=None if self.token_bias is None else part_of(self.token_bias, start, stop),
            rotary=None if self.rotary is None else self.rotary.part(start, stop),
            queries_keys=None if self.queries_keys is None else self.queries_keys[start:stop],
            query_scale=None if self.query_scale is None else self.query_scale[..., start:stop],
        )

    def with_prefix(self, count: int) -> LayerPosition:
        """Return the position with `count` additional tokens before those of the grid, which get no position.

        They are not changed between blocks, get nothing added, attend without a bias or a rotation, and are neither
        scaled nor gated.

        Raises:
            ValueError: if a field cannot exclude tokens.
        """
        for field in ("token_bias", "key_bias", "value_bias", "mixing", "spatial_bias"):
            if getattr(self, field) is not None:
                raise ValueError(f"`{field}` must be None for further tokens before those of the grid.")
        rows = (0, 0, count, 0)
        positional = self.positional
        if positional is not None:
            pairs = F.pad(positional.weights, (count, 0, count, 0))
            positional = PositionalAttention(pairs, F.pad(positional.gate, rows))
        return LayerPosition(
            pre=None if self.pre is None else F.pad(self.pre, rows),
            inner=None if self.inner is None else F.pad(self.inner, rows),
            bias=None if self.bias is None else bias_with_prefix(self.bias, count),
            positional=positional,
            rotary=None if self.rotary is None else PatchRotation(self.rotary, count),
            queries_keys=None if self.queries_keys is None else F.pad(self.queries_keys, rows),
            query_scale=None if self.query_scale is None else F.pad(self.query_scale, (count, 0), value=1.0),
            before=None if self.before is None else partial(_of_grid, self.before, count),
            inputs=None if self.inputs is None else partial(_inputs_of_grid, self.inputs, count),
            after=None if self.after is None else partial(_of_grid, self.after, count),
        )

    def merge(self, other: LayerPosition) -> LayerPosition:
        """Combine two positions: add tensors and biases, multiply scales, chain functions of the residual stream.

        Raises:
            ValueError: if both rotate queries and keys, compute the inputs or a bias from the tokens, have positional
                attention, or mix tokens; or if a bias is computed from queries or keys whose channels a rotation
                doubles.
        """
        for field in ("token_bias", "positional", "rotary", "inputs", "mixing"):
            if getattr(self, field) is not None and getattr(other, field) is not None:
                raise ValueError(f"`{field}` must be given by one encoding at most, got two.")
        merged = LayerPosition(
            pre=sum_of(self.pre, other.pre),
            inner=sum_of(self.inner, other.inner),
            bias=sum_of(self.bias, other.bias),
            token_bias=self.token_bias if other.token_bias is None else other.token_bias,
            key_bias=sum_of(self.key_bias, other.key_bias),
            value_bias=sum_of(self.value_bias, other.value_bias),
            positional=self.positional if other.positional is None else other.positional,
            rotary=self.rotary if other.rotary is None else other.rotary,
            before=_chain(self.before, other.before),
            inputs=self.inputs if other.inputs is None else other.inputs,
            after=_chain(self.after, other.after),
            mixing=self.mixing if other.mixing is None else other.mixing,
            spatial_bias=sum_of(self.spatial_bias, other.spatial_bias),
            queries_keys=sum_of(self.queries_keys, other.queries_keys),
            query_scale=_product(self.query_scale, other.query_scale),
        )
        if getattr(merged.rotary, "channels", None) is not None and (callable(merged.bias) or merged.key_bias):
            raise ValueError(
                "`bias` must not be made from queries or keys whose channels `rotary` doubles; use another of them."
            )
        return merged


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a * b


def _of_grid(function: Function, count: int, x: Tensor) -> Tensor:
    """Apply a function to all tokens but the first `count`."""
    return torch.cat([x[:, :count], function(x[:, count:])], 1)


def _inputs_of_grid(
    function: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], count: int, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.cat([x[:, :count], each], 1) for each in function(x[:, count:]))
    return q, k, v


def _chain(first: Function | None, second: Function | None) -> Function | None:
    if first is None or second is None:
        return second if first is None else first
    return partial(_composed, first, second)


def _composed(first: Function, second: Function, x: Tensor) -> Tensor:
    return second(first(x))
