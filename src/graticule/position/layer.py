"""`LayerPosition`: the position information of one layer, and the kinds of its fields."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from graticule.position.bias import Bias, BiasFunction
from graticule.position.displacement import Displacements, TokenMlp
from graticule.position.rotation import Rotation
from graticule.position.tokens import Axes, Function, Subset, TextSlice, TokenSelection, WithPrefix


class FieldKind(NamedTuple):
    """The kind of a field of `LayerPosition`.

    take: computes a value for other tokens.
    shapes: its possible shapes as letters of axes, such as 'h N N'; the shapes of a function's result begin with B.
    function_input: the shape of a function's input; '' if there is no function of this kind.
    combine: combines the values of two encodings; None if only one of them may give the field.
    pairs: whether it is for pairs of tokens, those that attend to each other.
    unsupported: the changes of the tokens that it cannot follow.
    stacked: number of axes of a sample's tensor, with the axis of heads, which a batch may lack.
    """

    take: Callable[[Any, TokenSelection], Any]
    shapes: tuple[str, ...] = ()
    function_input: str = ""
    combine: Callable[[Any, Any], Any] | None = None
    pairs: bool = False
    unsupported: tuple[type[TokenSelection], ...] = ()
    stacked: int = 0


def _rows(value: Tensor, tokens: TokenSelection) -> Tensor:
    return tokens.rows(value)


def _numbers(value: Tensor, tokens: TokenSelection) -> Tensor:
    return tokens.rows(value, -1, fill=1.0)


def _function(into: Axes, out: Axes, value: Function, tokens: TokenSelection) -> Function:
    return tokens.function(value, into, out)


def _bias(value: Any, tokens: TokenSelection) -> Any:
    return Bias.of(value).take(tokens).as_field


def _rotation(value: Rotation, tokens: TokenSelection) -> Rotation:
    return tokens.rotation(value)


def _attention(value: Any, tokens: TokenSelection) -> Any:
    return value._replace(weights=tokens.pairs(value.weights), gate=tokens.rows(value.gate))


def _mixing(value: Tensor | Displacements | TokenMlp, tokens: TokenSelection) -> Tensor | TokenMlp:
    if isinstance(value, TokenMlp):
        return TokenMlp(tokens.columns(value.first, -1), value.first_bias, tokens.rows(value.second))
    return tokens.pairs(value.matrix() if isinstance(value, Displacements) else value)


def _stack(values: Sequence[Any], axes: int) -> Any:
    """Stack the values of samples; tensors of less than `axes` axes get one for heads."""
    first = values[0]
    if isinstance(first, Tensor):
        together = torch.stack(list(values))
        return together[:, None] if first.ndim < axes else together
    if hasattr(first, "_fields"):
        return type(first)(*(_stack(parts, axes) for parts in zip(*values, strict=True)))
    return partial(_of_samples, tuple(values)) if callable(first) else first


def _of_samples(functions: Sequence[Function], x: Tensor, **part: Any) -> Any:
    """Compute a function of tokens of each sample, (B, ...)."""
    results = [function(sample, **part) for function, sample in zip(functions, x.split(1), strict=True)]
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    return type(results[0])(*map(torch.cat, zip(*results, strict=True)))


def _plus(a: Any, b: Any) -> Any:
    return Bias.of(a).plus(Bias.of(b)).as_field


def _chain(first: Function, second: Function) -> Function:
    return partial(_compose, first, second)


def _compose(first: Function, second: Function, x: Tensor) -> Any:
    return second(first(x))


_of_tokens = partial(_function, (-2,), (-2,))
_of_keys, _of_weights = partial(_function, (-2,), (-2, -1)), partial(_function, (-2, -1), (-2,))

ADDED = FieldKind(_rows, ("N D",), combine=_plus)
RESIDUAL = FieldKind(_of_tokens, ("B N D",), "B N D", _chain, unsupported=(TextSlice, Subset))
INPUTS = FieldKind(_of_tokens, function_input="B N D", unsupported=(TextSlice, Subset))
BIAS = FieldKind(_bias, ("h N N", "B h N N"), "B h N d", _plus, pairs=True)
KEY_BIAS = FieldKind(_of_keys, ("B h N N",), "B h N d", _plus, pairs=True, unsupported=(TextSlice, WithPrefix))
VALUE_BIAS = FieldKind(_of_weights, ("B h N d",), "B h N N", _plus, pairs=True, unsupported=(TextSlice, WithPrefix))
POSITIONAL = FieldKind(_attention, pairs=True, unsupported=(TextSlice, Subset))
ROTARY = FieldKind(_rotation, pairs=True, stacked=3)
SCALE = FieldKind(_numbers, ("N", "h N"), combine=operator.mul, pairs=True, stacked=2)
MIXING = FieldKind(_mixing, unsupported=(TextSlice, WithPrefix, Subset))
SPATIAL = FieldKind(_numbers, ("N", "h N"), combine=_plus, unsupported=(TextSlice, WithPrefix, Subset))


MixingWeights = Tensor | Displacements | TokenMlp


class PositionalAttention(NamedTuple):
    r"""Blends attention weights P that depend on the grid alone with the tokens' weights A, by a gate per head.

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

    A field that depends only on parameters and grid is a tensor; a field that depends on the tokens is a function.

    added_to_stream: (N, D), added to the residual stream before the layer.
    map_before: maps the residual stream before the layer, after `added_to_stream` is added, (B, N, D) ->
        (B, N, D).
    after_norm: (N, D), added after the layer's first norm, before attention.
    inputs: maps the normalized tokens to the inputs of the projections to queries, keys and values, (B, N, D) -> three
        of (B, N, D).
    bias: (heads, N, N), added to the attention logits; the same as two factors (`LowRank`); or a function that computes
        it from the scaled queries, (B, heads, N, d) -> (B, heads, N, N). It also takes `start` and `stop`: then the n
        queries start at token `start`, and the bias is for the keys of the tokens before `stop`.
    key_bias: a function of the scaled keys, (B, heads, N, d), whose result is added to the attention logits, (B, heads,
        N, N), queries before keys.
    value_bias: a function of the attention weights, (B, heads, N, N), whose result is added to the mixed values, (B,
        heads, N, d).
    positional: attention weights that depend on the grid alone, and a gate that blends them with the tokens' weights.
    rotary: rotates queries and keys by their positions.
    queries_keys: (N, D), added to the inputs of queries and keys, but not of values.
    query_scale: (N,) or (heads, N), the factor of the queries of each token.
    map_after: maps the residual stream after the layer, (B, N, D) -> (B, N, D).
    mixing: the weights that mix the patches of a grid or window: (groups, N, N), with one group if all channels are
        mixed by the same weights; or `Displacements` if they depend on displacements only; or `TokenMlp`, an MLP over
        the patches.
    spatial_bias: (N,) or (groups, N), added to every channel of the mixed tokens, or to the channels of its group.

    `added_to_stream`, `map_before` and `map_after` act between blocks, in `enter_block` and `leave_block`. A block
    applies `after_norm` in `add_after_norm`.
    """

    added_to_stream: Annotated[Tensor | None, ADDED] = None
    after_norm: Annotated[Tensor | None, ADDED] = None
    bias: Annotated[Tensor | Bias | BiasFunction | None, BIAS] = None
    key_bias: Annotated[Function | None, KEY_BIAS] = None
    value_bias: Annotated[Function | None, VALUE_BIAS] = None
    positional: Annotated[PositionalAttention | None, POSITIONAL] = None
    rotary: Annotated[Rotation | None, ROTARY] = None
    queries_keys: Annotated[Tensor | None, ADDED] = None
    query_scale: Annotated[Tensor | None, SCALE] = None
    map_before: Annotated[Function | None, RESIDUAL] = None
    inputs: Annotated[Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None, INPUTS] = None
    map_after: Annotated[Function | None, RESIDUAL] = None
    mixing: Annotated[MixingWeights | None, MIXING] = None
    spatial_bias: Annotated[Tensor | None, SPATIAL] = None

    def enter_block(self, x: Tensor) -> Tensor:
        """Turn the residual stream x: (B, N, D) into the input of the layer."""
        if self.added_to_stream is not None:
            x = x + self.added_to_stream
        return x if self.map_before is None else self.map_before(x)

    def add_after_norm(self, y: Tensor) -> Tensor:
        """Add `after_norm` to the normalized y: (B, N, D); not in place: hooks may keep the output of a norm."""
        return y if self.after_norm is None else y + self.after_norm

    def leave_block(self, x: Tensor) -> Tensor:
        """Turn the output of the layer, x: (B, N, D), into the residual stream after it."""
        return x if self.map_after is None else self.map_after(x)

    def part(self, start: int, stop: int) -> LayerPosition:
        """Return the position of the tokens from `start` on in a text that ends before `stop`.

        So token-by-token generation gets the same position as the whole text.

        Raises:
            ValueError: if a field is a function of all tokens and cannot be sliced.
        """
        return self.take(TextSlice(start, stop))

    def with_prefix(self, count: int) -> LayerPosition:
        """Return the position with `count` additional tokens before the grid's, which get no position.

        They are not changed between blocks, get nothing added, attend without a bias or a rotation, and are neither
        scaled nor gated.

        Raises:
            ValueError: if a field cannot exclude tokens.
        """
        return self.take(WithPrefix(count))

    def take(self, tokens: TokenSelection) -> LayerPosition:
        """Return the position of other tokens; `tokens` says how each kind of field follows the change."""
        changed = {}
        for field, value in zip(self._fields, self, strict=True):
            if value is not None:
                kind = FIELD_KINDS[field]
                if isinstance(tokens, kind.unsupported):
                    raise ValueError(f"`{field}` must be None {tokens.error_phrase}.")
                changed[field] = kind.take(value, tokens)
        return LayerPosition(**changed)

    def with_functions(self, other: LayerPosition) -> LayerPosition:
        """Return the same constants with the functions of another position, which has the same fields."""
        functions = {
            name: value
            for name, value in other._asdict().items()
            if FIELD_KINDS[name].function_input and callable(value)
        }
        if self.bias is not None and other.bias is not None:
            functions["bias"] = Bias.of(self.bias).with_function(Bias.of(other.bias)).as_field
        return self._replace(**functions)

    @staticmethod
    def stack(samples: Sequence[LayerPosition]) -> LayerPosition:
        """Return the position of a batch from the positions of its samples, which have the same fields.

        Each tensor gets a first axis for the samples, and one for heads if it has none; a function computes the samples
        one by one.
        """
        fields = zip(FIELD_KINDS.values(), *samples, strict=True)
        return LayerPosition(*(_stack(values, kind.stacked) for kind, *values in fields))

    def merge(self, other: LayerPosition) -> LayerPosition:
        """Combine two positions: add tensors and biases, multiply scales, chain functions of the residual stream.

        Raises:
            ValueError: if both rotate queries and keys, compute the inputs of the projections, have positional
                attention, or mix tokens; or if a bias is computed from queries or keys whose channels a rotation
                doubles.
        """
        values: list[Any] = []
        for (field, kind), a, b in zip(FIELD_KINDS.items(), self, other, strict=True):
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
FIELD_KINDS: dict[str, FieldKind] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(LayerPosition, include_extras=True).items()
}
#: The fields for pairs of tokens; the others are for the tokens that enter a layer.
OF_PAIRS = tuple(name for name, kind in FIELD_KINDS.items() if kind.pairs)
