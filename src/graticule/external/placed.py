"""Position information of a layer in which every patch gets the position of another patch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from graticule.external.view import Unavailable
from graticule.position.grid import Grid
from graticule.position.rotation import Rotation
from graticule.position.tokens import Axes, Function, Tokens


@dataclass(frozen=True, eq=False)
class Places(Tokens):
    """The source of each patch's position; `LayerPosition.take` gives every patch the position of its source.

    A function of the tokens is moved only if this is a permutation: token i is passed to it at the index whose position
    it gets, and its output is taken from there. Otherwise it must be that for the grid of the tokens.

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

    def of_rows(self, count: int) -> Tensor:
        """Return the rows of a table of `count` rows, prefix tokens first, that the tokens get.

        Raises:
            Unavailable: if the table is neither for the grid nor for a window.
        """
        for places in (self, self.window or self):
            if count == places.source.tokens:
                prefix = places.source.prefix
                return torch.cat([torch.arange(prefix), places.index + prefix])
        raise Unavailable(f"position information has {count} rows where there are {self.source.tokens} tokens")

    def rows(self, table: Tensor, axis: int = -2, fill: float = 0.0) -> Tensor:
        """Return a table with the rows of the sources along `axis`."""
        return table.index_select(axis, self.of_rows(table.shape[axis]).to(table.device))

    def rotation(self, rotation: Rotation) -> Rotation:
        """Return the rotation of the sources."""
        take = getattr(rotation, "take", None)
        if take is None:
            raise Unavailable(f"the rotation {type(rotation).__name__} has no method `take`")
        return cast("Rotation", take(self.of_rows((self.window or self).source.tokens)))

    def function(self, function: Function, into: Axes, out: Axes) -> Function:
        """Return a function of moved tokens, if they can be moved back."""
        return partial(_moved, function, self, into, out) if self.permutes else function


def _moved(function: Function, places: Places, into: Axes, out: Axes, x: Tensor) -> Any:
    """Apply a function to tokens moved to `places`."""
    for axis in into:
        x = x.index_select(axis, places.of_rows(x.shape[axis]).argsort().to(x.device))
    return _back(function(x), places, out)


def _back(found: Any, places: Places, out: Axes) -> Any:
    """Move the tokens of one tensor or several back."""
    if isinstance(found, Tensor):
        for axis in out:
            found = places.rows(found, axis)
        return found
    parts = [_back(part, places, out) for part in found]
    return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)
