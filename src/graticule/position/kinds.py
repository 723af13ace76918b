"""The kinds of fields of `LayerPosition`: how a value follows a change of the tokens, and combines with another one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from graticule.position.bias import Bias
from graticule.position.displacement import Displacements, TokenMlp
from graticule.position.rotation import Rotation
from graticule.position.tokens import Axes, Function, Part, Prefix, Subset, Tokens


class Kind(NamedTuple):
    """The kind of a field of `LayerPosition`.

    take: computes a value for other tokens from the value, and from the value for their grid, whose functions are used.
    shapes: its possible shapes as letters of axes, such as 'h N N'; those of a function's result begin with B.
    of: the shape of a function's input; '' if there is no function of this kind.
    combine: combines the values of two encodings; None if only one of them may give the field.
    pairs: whether it is for pairs of tokens, those that attend to each other.
    refuses: the changes of the tokens that it cannot follow.
    """

    take: Callable[[Any, Any, Tokens], Any]
    shapes: tuple[str, ...] = ()
    of: str = ""
    combine: Callable[[Any, Any], Any] | None = None
    pairs: bool = False
    refuses: tuple[type[Tokens], ...] = ()


def _rows(value: Tensor, own: Tensor, tokens: Tokens) -> Tensor:
    return tokens.rows(value)


def _numbers(value: Tensor, own: Tensor, tokens: Tokens) -> Tensor:
    return tokens.rows(value, -1, fill=1.0)


def _function(into: Axes, out: Axes, value: Function, own: Function, tokens: Tokens) -> Function:
    return tokens.function(own, into, out)


def _bias(value: Any, own: Any, tokens: Tokens) -> Any:
    bias = Bias.of(value)
    return bias.take(tokens, bias if own is value else Bias.of(own)).held


def _rotation(value: Rotation, own: Rotation, tokens: Tokens) -> Rotation:
    return tokens.rotation(value)


def _attention(value: Any, own: Any, tokens: Tokens) -> Any:
    return value._replace(weights=tokens.pairs(value.weights), gate=tokens.rows(value.gate))


def _mixing(value: Tensor | Displacements | TokenMlp, own: Any, tokens: Tokens) -> Tensor | TokenMlp:
    if isinstance(value, TokenMlp):
        return TokenMlp(tokens.columns(value.first, -1), value.first_bias, tokens.rows(value.second))
    return tokens.pairs(value.matrix() if isinstance(value, Displacements) else value)


def _plus(a: Any, b: Any) -> Any:
    return Bias.of(a).plus(Bias.of(b)).held


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def _chain(first: Function, second: Function) -> Function:
    return partial(_composed, first, second)


def _composed(first: Function, second: Function, x: Tensor) -> Any:
    return second(first(x))


_of_tokens = partial(_function, (-2,), (-2,))
_of_keys, _of_weights = partial(_function, (-2,), (-2, -1)), partial(_function, (-2, -1), (-2,))

ADDED = Kind(_rows, ("N D",), combine=_plus)
RESIDUAL = Kind(_of_tokens, ("B N D",), "B N D", _chain, refuses=(Part, Subset))
INPUTS = Kind(_of_tokens, of="B N D", refuses=(Part, Subset))
BIAS = Kind(_bias, ("h N N", "B h N N"), "B h N d", _plus, pairs=True)
TOKEN_BIAS = Kind(_of_tokens, of="B N D", pairs=True, refuses=(Prefix,))
KEY_BIAS = Kind(_of_keys, ("B h N N",), "B h N d", _plus, pairs=True, refuses=(Part, Prefix))
VALUE_BIAS = Kind(_of_weights, ("B h N d",), "B h N N", _plus, pairs=True, refuses=(Part, Prefix))
POSITIONAL = Kind(_attention, pairs=True, refuses=(Part, Subset))
ROTARY = Kind(_rotation, pairs=True)
SCALE = Kind(_numbers, ("N", "h N"), combine=_product, pairs=True)
MIXING = Kind(_mixing, refuses=(Part, Prefix, Subset))
SPATIAL = Kind(_numbers, ("N", "h N"), combine=_plus, refuses=(Part, Prefix, Subset))
