"""The kinds of fields of `LayerPosition`: how a value follows a change of the tokens, and combines with another one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from graticule.position.bias import BiasSum, LowRank, sum_of
from graticule.position.displacement import Displacements, TokenMlp
from graticule.position.rotation import Rotation

Function = Callable[..., Any]
Axes = tuple[int, ...]


class Tokens(ABC):
    """A change of the tokens of a layer: fewer of them, others, or some without a position before them."""

    @abstractmethod
    def rows(self, table: Tensor, axis: int = -2, fill: float = 0.0) -> Tensor:
        """Return a table with the rows of the queries along `axis`; tokens without a position get `fill`."""

    def columns(self, table: Tensor, axis: int = -2) -> Tensor:
        """Return a table with the rows of the keys along `axis`."""
        return self.rows(table, axis)

    def pairs(self, table: Tensor) -> Tensor:
        """Return a table (..., N, N) with the rows of the queries and the columns of the keys."""
        return self.columns(self.rows(table), -1)

    @abstractmethod
    def rotation(self, rotation: Rotation) -> Rotation:
        """Return the rotation of the queries and keys."""

    def bias(self, function: Function) -> Function:
        """Return a function that computes a bias, (B, heads, N, N), from the queries, (B, heads, N, d)."""
        return self.function(function, (-2,), (-2, -1))

    @abstractmethod
    def function(self, function: Function, into: Axes, out: Axes) -> Function:
        """Return another function; `into` and `out` are the axes of tokens of its input and of its output."""


class Kind(NamedTuple):
    """The kind of a field of `LayerPosition`.

    take: computes a value for other tokens from the value, and from the value for their grid, whose functions are used.
    shapes: its possible shapes as letters of axes, such as 'h N N'; those of a function's result begin with B.
    of: the shape of a function's input; '' if there is no function of this kind.
    combine: combines the values of two encodings; None if only one of them may give the field.
    pairs: whether it is for pairs of tokens, those that attend to each other.
    part: whether there is a part of it for the last tokens of a text.
    prefix: whether there can be tokens without a position before the others.
    """

    take: Callable[[Any, Any, Tokens], Any]
    shapes: tuple[str, ...] = ()
    of: str = ""
    combine: Callable[[Any, Any], Any] | None = None
    pairs: bool = False
    part: bool = True
    prefix: bool = True


def _rows(value: Tensor, own: Tensor, tokens: Tokens) -> Tensor:
    return tokens.rows(value)


def _numbers(value: Tensor, own: Tensor, tokens: Tokens) -> Tensor:
    return tokens.rows(value, -1, fill=1.0)


def _function(into: Axes, out: Axes, value: Function, own: Function, tokens: Tokens) -> Function:
    return tokens.function(own, into, out)


def _bias(value: Any, own: Any, tokens: Tokens) -> Any:
    if isinstance(value, Tensor):
        return tokens.pairs(value)
    if isinstance(value, LowRank):
        return LowRank(tokens.rows(value.queries), tokens.columns(value.keys))
    if isinstance(value, BiasSum):
        return BiasSum(tokens.pairs(value.constant), tokens.bias(own.function))
    return tokens.bias(own)


def _rotation(value: Rotation, own: Rotation, tokens: Tokens) -> Rotation:
    return tokens.rotation(value)


def _attention(value: Any, own: Any, tokens: Tokens) -> Any:
    return value._replace(weights=tokens.pairs(value.weights), gate=tokens.rows(value.gate))


def _mixing(value: Tensor | Displacements | TokenMlp, own: Any, tokens: Tokens) -> Tensor | TokenMlp:
    if isinstance(value, TokenMlp):
        return TokenMlp(tokens.columns(value.first, -1), value.first_bias, tokens.rows(value.second))
    return tokens.pairs(value.matrix() if isinstance(value, Displacements) else value)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def _chain(first: Function, second: Function) -> Function:
    return partial(_composed, first, second)


def _composed(first: Function, second: Function, x: Tensor) -> Any:
    return second(first(x))


_of_tokens = partial(_function, (-2,), (-2,))

ADDED = Kind(_rows, ("N D",), combine=sum_of)
RESIDUAL = Kind(_of_tokens, ("B N D",), "B N D", _chain, part=False)
INPUTS = Kind(_of_tokens, of="B N D", part=False)
BIAS = Kind(_bias, ("h N N", "B h N N"), "B h N d", sum_of, pairs=True)
TOKEN_BIAS = Kind(_of_tokens, of="B N D", pairs=True, prefix=False)
KEY_BIAS = Kind(partial(_function, (-2,), (-2, -1)), ("B h N N",), "B h N d", sum_of, True, False, False)
VALUE_BIAS = Kind(partial(_function, (-2, -1), (-2,)), ("B h N d",), "B h N N", sum_of, True, False, False)
POSITIONAL = Kind(_attention, pairs=True, part=False)
ROTARY = Kind(_rotation, pairs=True)
SCALE = Kind(_numbers, ("N", "h N"), combine=_product, pairs=True)
MIXING = Kind(_mixing, part=False, prefix=False)
SPATIAL = Kind(_numbers, ("N", "h N"), combine=sum_of, part=False, prefix=False)


def pick(table: Tensor, axis: int, index: Any) -> Tensor:
    """Return the entries of a table at a slice or at indices along `axis`, -2 or -1."""
    return table[..., index, :] if axis == -2 else table[..., index]
