"""Position information of a layer in which every patch gets the position of another patch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graticule.external.view import Unavailable
from graticule.position.bias import BiasSum, LowRank
from graticule.position.displacement import Displacements, TokenMlp
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition, PositionalAttention


@dataclass(frozen=True, eq=False)
class Places:
    """The source of each patch's position.

    index: (H * W,), for each patch the index of the patch of `source` whose position it gets.
    source: the grid that the position information was computed for.
    window: the same within the windows in which tokens see each other; None without windows.
    """

    index: Tensor
    source: Grid
    window: Places | None = None

    @property
    def permutes(self) -> bool:
        """True if every patch of the source is used once."""
        return len(self.index) == self.source.patches and (self.window is None or self.window.permutes)

    @property
    def within(self) -> Places:
        """The sources for the tokens that see each other: those within a window, or in the whole grid."""
        return self.window or self

    def rows(self, count: int) -> Tensor:
        """Return the rows of a table of `count` rows, prefix tokens first, that the tokens get.

        Raises:
            Unavailable: if the table is neither for the grid nor for a window.
        """
        for places in (self, self.within):
            if count == places.source.tokens:
                prefix = places.source.prefix
                return torch.cat([torch.arange(prefix), places.index + prefix])
        raise Unavailable(f"position information has {count} rows where there are {self.source.tokens} tokens")


def placed(position: LayerPosition, places: Places, own: LayerPosition | None = None) -> LayerPosition:
    """Return the position of a layer in which every patch gets the position of another patch.

    A function of the tokens is moved only if `places` is a permutation: token i is passed to it at the index whose
    position it gets, and its output is taken from there. Otherwise the function of `own` is used.

    Args:
        position: made for the grid `places.source`.
        places: the patch whose position each patch gets.
        own: the position for the grid of the tokens.

    Raises:
        Unavailable: for position information of a kind that is not known.
    """
    own = position if own is None else own
    moves = places.permutes

    def rows(table: Tensor | None, axis: int = -2) -> Tensor | None:
        return None if table is None else table.index_select(axis, places.rows(table.shape[axis]).to(table.device))

    def function(kept: Any, moved: Callable[[Any], Any]) -> Any:
        return None if kept is None else moved(kept) if moves else kept

    def bias(given: object, kept: Any) -> Any:
        if isinstance(given, Tensor):
            return rows(rows(given), -1)
        if isinstance(given, LowRank):
            return LowRank(_some(rows(given.queries)), _some(rows(given.keys)))
        if isinstance(given, BiasSum):
            return BiasSum(bias(given.constant, None), bias(given.function, kept.function))
        return function(kept, lambda f: _Moved(f, places, (-2,), (-2, -1)))

    tokens = (-2,)
    positional = position.positional
    return LayerPosition(
        pre=rows(position.pre),
        inner=rows(position.inner),
        queries_keys=rows(position.queries_keys),
        bias=bias(position.bias, own.bias),
        token_bias=function(own.token_bias, lambda f: _Moved(f, places, tokens, tokens)),
        key_bias=function(own.key_bias, lambda f: _Moved(f, places, tokens, (-2, -1))),
        value_bias=function(own.value_bias, lambda f: _Moved(f, places, (-2, -1), tokens)),
        positional=None
        if positional is None
        else PositionalAttention(_some(rows(rows(positional.weights), -1)), _some(rows(positional.gate))),
        rotary=None if position.rotary is None else _rotation(position.rotary, places),
        query_scale=rows(position.query_scale, -1),
        before=function(own.before, lambda f: _Moved(f, places, tokens, tokens)),
        inputs=function(own.inputs, lambda f: _Moved(f, places, tokens, tokens)),
        after=function(own.after, lambda f: _Moved(f, places, tokens, tokens)),
        mixing=None if position.mixing is None else _mixing(position.mixing, places),
        spatial_bias=rows(position.spatial_bias, -1),
    )


class _Moved:
    """A function of the tokens with the tokens moved to `places`.

    into: the token axes of its input.
    out: the token axes of its output, which is one tensor or several.
    """

    def __init__(self, function: Callable[..., Any], places: Places, into: tuple[int, ...], out: tuple[int, ...]):
        self.function, self.places, self.into, self.out = function, places, into, out

    def __call__(self, x: Tensor) -> Any:
        for axis in self.into:
            x = x.index_select(axis, self.places.rows(x.shape[axis]).argsort().to(x.device))
        return self._back(self.function(x))

    def _back(self, found: Any) -> Any:
        if isinstance(found, Tensor):
            for axis in self.out:
                found = found.index_select(axis, self.places.rows(found.shape[axis]).to(found.device))
            return found
        parts = [self._back(part) for part in found]
        return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)


def _rotation(rotation: Any, places: Places) -> Any:
    take = getattr(rotation, "take", None)
    if take is None:
        raise Unavailable(f"the rotation {type(rotation).__name__} has no method `take`")
    return take(places.within.rows(places.within.source.tokens))


def _mixing(mixing: Tensor | Displacements | TokenMlp, places: Places) -> Tensor | TokenMlp:
    if isinstance(mixing, TokenMlp):
        rows = places.rows(len(mixing.second)).to(mixing.second.device)
        return TokenMlp(mixing.first[:, rows], mixing.first_bias, mixing.second[rows])
    matrix = mixing.matrix() if isinstance(mixing, Displacements) else mixing
    rows = places.rows(matrix.shape[-1]).to(matrix.device)
    return matrix[:, rows][:, :, rows]


def _some(table: Tensor | None) -> Tensor:
    assert table is not None
    return table
