"""`LayerPosition`: the position information of one layer, in all forms that a layer can use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_type_hints

from torch import Tensor

from graticule.position import kinds
from graticule.position.bias import Bias, BiasFunction, LowRank
from graticule.position.displacement import Displacements, TokenMlp
from graticule.position.kinds import Kind
from graticule.position.rotation import Rotation
from graticule.position.tokens import Function, Part, Prefix, Tokens

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

    A field is declared in one line, with its kind: how it follows a change of the tokens, and adds up with another one.

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

    pre: Annotated[Tensor | None, kinds.ADDED] = None
    inner: Annotated[Tensor | None, kinds.ADDED] = None
    bias: Annotated[Tensor | Bias | BiasFunction | None, kinds.BIAS] = None
    token_bias: Annotated[Callable[..., LowRank] | None, kinds.TOKEN_BIAS] = None
    key_bias: Annotated[Function | None, kinds.KEY_BIAS] = None
    value_bias: Annotated[Function | None, kinds.VALUE_BIAS] = None
    positional: Annotated[PositionalAttention | None, kinds.POSITIONAL] = None
    rotary: Annotated[Rotation | None, kinds.ROTARY] = None
    queries_keys: Annotated[Tensor | None, kinds.ADDED] = None
    query_scale: Annotated[Tensor | None, kinds.SCALE] = None
    before: Annotated[Function | None, kinds.RESIDUAL] = None
    inputs: Annotated[Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None, kinds.INPUTS] = None
    after: Annotated[Function | None, kinds.RESIDUAL] = None
    mixing: Annotated[Mixing | None, kinds.MIXING] = None
    spatial_bias: Annotated[Tensor | None, kinds.SPATIAL] = None

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
        return self.take(Part(start, stop))

    def with_prefix(self, count: int) -> LayerPosition:
        """Return the position with `count` additional tokens before those of the grid, which get no position.

        They are not changed between blocks, get nothing added, attend without a bias or a rotation, and are neither
        scaled nor gated.

        Raises:
            ValueError: if a field cannot exclude tokens.
        """
        return self.take(Prefix(count))

    def take(self, tokens: Tokens, own: LayerPosition | None = None) -> LayerPosition:
        """Return the position of other tokens.

        Args:
            tokens: says how each kind of field follows the change of the tokens.
            own: the position for the grid of these tokens, whose functions are used; by default the same.

        Raises:
            ValueError: naming a field that cannot follow the change.
        """
        changed = {}
        for field, value in zip(self._fields, self, strict=True):
            if value is not None:
                kind = KINDS[field]
                if isinstance(tokens, kind.refuses):
                    raise ValueError(f"`{field}` must be None {tokens.where}.")
                changed[field] = kind.take(value, value if own is None else getattr(own, field), tokens)
        return LayerPosition(**changed)

    def merge(self, other: LayerPosition) -> LayerPosition:
        """Combine two positions: add tensors and biases, multiply scales, chain functions of the residual stream.

        Raises:
            ValueError: if both rotate queries and keys, compute the inputs or a bias from the tokens, have positional
                attention, or mix tokens; or if a bias is computed from queries or keys whose channels a rotation
                doubles.
        """
        values: list[Any] = []
        for (field, kind), a, b in zip(KINDS.items(), self, other, strict=True):
            if a is None or b is None:
                values.append(b if a is None else a)
            elif kind.combine is None:
                raise ValueError(f"`{field}` must be given by one encoding at most, got two.")
            else:
                values.append(kind.combine(a, b))
        merged = LayerPosition(*values)
        doubles = getattr(merged.rotary, "channels", None) is not None
        if doubles and (merged.key_bias or (merged.bias is not None and Bias.of(merged.bias).function)):
            raise ValueError(
                "`bias` must not be made from queries or keys whose channels `rotary` doubles; use another of them."
            )
        return merged


#: The kind of each field.
KINDS: dict[str, Kind] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(LayerPosition, include_extras=True).items()
}
#: The fields for pairs of tokens; the others are for the tokens that enter a layer.
OF_PAIRS = tuple(name for name, kind in KINDS.items() if kind.pairs)
