"""Changes of the tokens of a layer, which all fields of its `LayerPosition` follow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.position.rotation import PatchRotation, Rotation

Function = Callable[..., Any]
Axes = tuple[int, ...]


class Tokens(ABC):
    """A change of the tokens of a layer: fewer of them, others, or some without a position before them."""

    #: Where fields that cannot follow the change must be None, with the reason.
    where: ClassVar[str]

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


def pick(table: Tensor, axis: int, index: Any) -> Tensor:
    """Return the entries of a table at a slice or at indices along `axis`, -2 or -1."""
    return table[..., index, :] if axis == -2 else table[..., index]


@dataclass(frozen=True)
class Part(Tokens):
    """The tokens from `start` on in a text that ends before `stop`; they attend to all tokens before `stop`."""

    where = "for a part of the tokens: it takes all of them at once"
    start: int
    stop: int

    def rows(self, table: Tensor, axis: int = -2, fill: float = 0.0) -> Tensor:
        """Return the rows from `start` to `stop`."""
        return pick(table, axis, slice(self.start, self.stop))

    def columns(self, table: Tensor, axis: int = -2) -> Tensor:
        """Return the rows before `stop`."""
        return pick(table, axis, slice(self.stop))

    def pairs(self, table: Tensor) -> Tensor:
        """Return the rows from `start` to `stop` and the columns before `stop`."""
        return table[..., self.start : self.stop, : self.stop]

    def rotation(self, rotation: Rotation) -> Rotation:
        """Return the rotation of the tokens from `start` to `stop`."""
        return rotation.part(self.start, self.stop)

    def function(self, function: Function, into: Axes, out: Axes) -> Function:
        """Return a function of these tokens, or of a part of them."""
        return partial(_moved, function, self.start, self.stop)


def _moved(function: Function, first: int, last: int, x: Tensor, start: int = 0, stop: int | None = None) -> Any:
    return function(x, start=first + start, stop=last if stop is None else stop)


@dataclass(frozen=True)
class Prefix(Tokens):
    """All tokens, and `count` tokens without a position before them."""

    where = "for further tokens before those of the grid"
    count: int

    def rows(self, table: Tensor, axis: int = -2, fill: float = 0.0) -> Tensor:
        """Return the table with `count` rows of `fill` before its own."""
        return F.pad(table, (*(0, 0) * (-1 - axis), self.count, 0), value=fill)

    def pairs(self, table: Tensor) -> Tensor:
        """Return the table with `count` rows and columns of zeros before its own."""
        return F.pad(table, (self.count, 0, self.count, 0))

    def rotation(self, rotation: Rotation) -> Rotation:
        """Return a rotation that leaves the first `count` tokens unchanged."""
        return PatchRotation(rotation, self.count)

    def bias(self, function: Function) -> Function:
        """Return a function whose bias is zero for the first `count` tokens."""
        return partial(_padded, function, self.count)

    def function(self, function: Function, into: Axes, out: Axes) -> Function:
        """Return a function that leaves the first `count` tokens unchanged."""
        return partial(_of_grid, function, self.count)


def _padded(bias: Function, count: int, queries: Tensor) -> Tensor:
    return F.pad(bias(queries[..., count:, :]), (count, 0, count, 0))


def _of_grid(function: Function, count: int, x: Tensor) -> Any:
    """Apply a function with one or several results to all tokens but the first `count`."""
    made = function(x[:, count:])
    if isinstance(made, Tensor):
        return torch.cat([x[:, :count], made], 1)
    return tuple(torch.cat([x[:, :count], each], 1) for each in made)
