"""The forms of an attention bias: a tensor, two factors, a function of the queries, and their sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

BiasFunction = Callable[..., Tensor]


class LowRank(NamedTuple):
    """A bias in two factors: b_ij is the dot product of row i of `queries` and row j of `keys`.

    Attention appends the factors to its queries and keys as r more channels, so the bias itself, (heads, N, N), is
    never computed. The sum of two biases has the channels of both.

    queries: (heads or 1, N, r), with a leading batch axis if the bias depends on the tokens.
    keys: the same.
    """

    queries: Tensor
    keys: Tensor

    @property
    def rank(self) -> int:
        """The number of channels r."""
        return self.queries.shape[-1]

    def table(self) -> Tensor:
        """Return the bias itself, (heads, N, N), in the precision of the factors, also under autocast."""
        with torch.autocast(self.queries.device.type, enabled=False):
            return self.queries @ self.keys.transpose(-2, -1)

    def append(self, queries: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Append the factors to queries and keys, (B, h, N, d) each; their product times `scale` includes the bias.

        For a part of a text (`LayerPosition.part`) the factors include those of earlier keys, which are appended
        already.
        """
        more = (self.queries / scale, self.keys[..., self.keys.shape[-2] - keys.shape[-2] :, :])
        pairs = zip((queries, keys), more, strict=True)
        longer = (torch.cat([x, y.to(x.dtype).expand(*x.shape[:-1], -1)], -1) for x, y in pairs)
        return next(longer), next(longer)


class BiasSum(NamedTuple):
    """A bias of two parts: one that can be folded, (heads, N, N), and a function of the scaled queries."""

    constant: Tensor
    function: BiasFunction

    def __call__(self, queries: Tensor) -> Tensor:
        """Compute the bias, (B, heads, N, N), from the scaled queries, (B, heads, N, d)."""
        return self.constant + self.function(queries)


def bias_of(bias: Tensor | LowRank | BiasFunction, queries: Tensor) -> Tensor:
    """Return a bias as a tensor, computed from the scaled queries (B, h, N, d) if it depends on them."""
    if isinstance(bias, LowRank):
        return bias.table()
    return bias if isinstance(bias, Tensor) else bias(queries)


def sum_of(a: Any, b: Any) -> Any:
    """Add two tensors or biases, in any form; either may be None. Two biases in factors give one in factors."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, LowRank) and isinstance(b, LowRank):
        return LowRank(_concatenated(a.queries, b.queries), _concatenated(a.keys, b.keys))
    a, b = (x.table() if isinstance(x, LowRank) else x for x in (a, b))
    constants = [x.constant if isinstance(x, BiasSum) else x for x in (a, b) if isinstance(x, Tensor | BiasSum)]
    functions = [x.function if isinstance(x, BiasSum) else x for x in (a, b) if not isinstance(x, Tensor)]
    if not functions:
        return a + b
    function = functions[0] if len(functions) == 1 else partial(_added, functions[0], functions[1])
    return BiasSum(sum(constants[1:], constants[0]), function) if constants else function


def _concatenated(a: Tensor, b: Tensor) -> Tensor:
    """Concatenate the channels of two factors; one of them may be shared by all heads."""
    heads = max(len(a), len(b))
    return torch.cat([a.expand(heads, -1, -1), b.expand(heads, -1, -1)], -1)


def _added(first: BiasFunction, second: BiasFunction, queries: Tensor, **part: Any) -> Tensor:
    return first(queries, **part) + second(queries, **part)
