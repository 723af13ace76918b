"""Position information of a layer in which every patch gets the position of another patch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from graticule.external.view import Unavailable
from graticule.position.grid import Grid
from graticule.position.kinds import Axes, Function, Tokens
from graticule.position.layer import LayerPosition
from graticule.position.rotation import Rotation


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
    return position.take(_Placed(places), own)


@dataclass(frozen=True, eq=False)
class _Placed(Tokens):
    """The change of the tokens to those of `places`, of queries and keys alike."""

    places: Places

    def rows(self, table: Tensor, axis: int = -2, fill: float = 0.0) -> Tensor:
        return table.index_select(axis, self.places.rows(table.shape[axis]).to(table.device))

    def rotation(self, rotation: Rotation) -> Rotation:
        take = getattr(rotation, "take", None)
        if take is None:
            raise Unavailable(f"the rotation {type(rotation).__name__} has no method `take`")
        within = self.places.within
        return cast("Rotation", take(within.rows(within.source.tokens)))

    def function(self, function: Function, into: Axes, out: Axes) -> Function:
        return _Moved(function, self.places, into, out) if self.places.permutes else function


class _Moved:
    """A function of the tokens with the tokens moved to `places`.

    into: the token axes of its input.
    out: the token axes of its output, which is one tensor or several.
    """

    def __init__(self, function: Function, places: Places, into: Axes, out: Axes) -> None:
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
