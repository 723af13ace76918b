"""The forms of an attention bias: a table, a function of the queries, their sum, and two factors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from graticule.position.tokens import TokenSelection
from graticule.system.symbolic import without_autocast

BiasFunction = Callable[..., Tensor]


class Bias:
    """A bias on the attention logits, in any form: the sum of a constant and a function of the scaled queries.

    A form is a `NamedTuple` too, so that it can be folded. `LayerPosition.bias` holds a table and a function as they
    are, and other forms as a `Bias`; `Bias.of` returns a `Bias` for each of them.
    """

    #: Whether its tensors stay in float32 at least.
    wide: ClassVar[bool] = False

    @staticmethod
    def of(bias: Tensor | Bias | BiasFunction) -> Bias:
        """Return the bias that a layer's position holds as a `Bias`."""
        if isinstance(bias, Bias):
            return bias
        return BiasSum(bias, None) if isinstance(bias, Tensor) else BiasSum(None, bias)

    @property
    def as_field(self) -> Tensor | Bias | BiasFunction:
        return self

    @property
    def constant(self) -> Tensor | None:
        """The part that depends on parameters and grid only, (heads, N, N), if there is one."""
        return None

    @property
    def function(self) -> BiasFunction | None:
        """The part that is computed from the scaled queries, if there is one."""
        return None

    def table(self, queries: Tensor | None = None) -> Tensor:
        """Return the bias as a tensor, computed from the scaled queries, (B, heads, N, d), if it depends on them."""
        table = _sum(self.constant, None if self.function is None else self.function(queries))
        assert table is not None, "a form must have a constant or a function"
        return table

    def append(self, queries: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
        """Append channels to queries and keys, (B, heads, N, d) each, whose product times `scale` is the bias.

        None if it must be added as a table.
        """
        return None

    def plus(self, other: Bias) -> Bias:
        first, second = self.function, other.function
        function = second if first is None else first
        if first is not None and second is not None:
            function = partial(_add, first, second)
        return BiasSum(_sum(self.constant, other.constant), function)

    def take(self, tokens: TokenSelection) -> Bias:
        constant, function = self.constant, self.function
        moved = None if function is None else tokens.function(function, (-2,), (-2, -1))
        return BiasSum(None if constant is None else tokens.pairs(constant), moved)

    def with_function(self, other: Bias) -> Bias:
        """Return the same constant with the function of another bias."""
        return self if other.function is None else BiasSum(self.constant, other.function)


class BiasSum(NamedTuple("BiasSum", [("constant", Tensor | None), ("function", BiasFunction | None)]), Bias):
    """A table, (heads, N, N), a function of the scaled queries, (B, heads, N, d) -> (B, heads, N, N), or their sum."""

    @property
    def as_field(self) -> Tensor | Bias | BiasFunction:
        """The table or function alone, if there is no other part."""
        if self.constant is None:
            return self if self.function is None else self.function
        return self.constant if self.function is None else self


class LowRank(NamedTuple("LowRank", [("queries", Tensor), ("keys", Tensor)]), Bias):
    """A bias in two factors: b_ij is the dot product of row i of `queries` and row j of `keys`.

    Attention appends the factors to its queries and keys as r more channels, so the bias itself, (heads, N, N), is
    never computed. The sum of two biases has the channels of both.

    queries: (heads or 1, N, r), with a leading batch axis if the bias depends on the tokens.
    keys: the same.
    """

    wide = True  # 16 bits are too few: the differences of squares in a bias would be rounding errors

    @property
    def rank(self) -> int:
        return self.queries.shape[-1]

    @property
    def constant(self) -> Tensor:
        """The bias itself, (heads, N, N), in the precision of the factors, also under autocast."""
        with without_autocast(self.queries):
            return self.queries @ self.keys.transpose(-2, -1)

    def append(self, queries: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
        """Append the factors to queries and keys, except in 16 bits.

        For a part of a text (`LayerPosition.part`) the factors include the factors of earlier keys, which are appended
        already.
        """
        if queries.dtype not in (torch.float32, torch.float64):
            return None
        more = (self.queries / scale, self.keys[..., self.keys.shape[-2] - keys.shape[-2] :, :])
        pairs = zip((queries, keys), more, strict=True)
        longer = (torch.cat([x, y.to(x.dtype).expand(*x.shape[:-1], -1)], -1) for x, y in pairs)
        return next(longer), next(longer)

    def plus(self, other: Bias) -> Bias:
        """Add another bias; two of them in factors give one in factors."""
        if not isinstance(other, LowRank):
            return super().plus(other)
        return LowRank(_concatenate(self.queries, other.queries), _concatenate(self.keys, other.keys))

    def take(self, tokens: TokenSelection) -> LowRank:
        return LowRank(tokens.rows(self.queries), tokens.columns(self.keys))


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Add two tensors; each may be None."""
    return b if a is None else a if b is None else a + b


def _concatenate(a: Tensor, b: Tensor) -> Tensor:
    """Concatenate the channels of two factors; one of them may be shared by all heads."""
    heads = max(len(a), len(b))
    return torch.cat([a.expand(heads, -1, -1), b.expand(heads, -1, -1)], -1)


def _add(first: BiasFunction, second: BiasFunction, queries: Tensor, **part: Any) -> Tensor:
    return first(queries, **part) + second(queries, **part)
