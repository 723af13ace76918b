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

from graticule.position.rotation import PatchRotation, Rotation, select

Function = Callable[..., Any]
Axes = tuple[int, ...]


class TokenSelection(ABC):
    """A change of the tokens of a layer: fewer of them, others, or some without a position before them."""

    #: Where fields that cannot follow the change must be None, with the reason.
    error_phrase: ClassVar[str]

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

    @abstractmethod
    def function(self, function: Function, into: Axes, out: Axes) -> Function:
        """Return another function; `into` and `out` are the axes of tokens of its input and of its output."""


def pick(table: Tensor, axis: int, index: Any) -> Tensor:
    """Return the entries of a table at a slice or at indices along `axis`, -2 or -1."""
    return table[..., index, :] if axis == -2 else table[..., index]


@dataclass(frozen=True)
class TextSlice(TokenSelection):
    """The tokens from `start` on in a text that ends before `stop`; they attend to all tokens before `stop`."""

    error_phrase = "for a part of the tokens: it takes all of them at once"
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
        return rotation.take(slice(self.start, self.stop))

    def function(self, function: Function, into: Axes, out: Axes) -> Function:
        """Return a function of these tokens, or of a part of them."""
        return partial(_moved, function, self.start, self.stop)


def _moved(function: Function, first: int, last: int, x: Tensor, start: int = 0, stop: int | None = None) -> Any:
    return function(x, start=first + start, stop=last if stop is None else stop)


@dataclass(frozen=True)
class WithPrefix(TokenSelection):
    """All tokens, and `count` tokens without a position before them."""

    error_phrase = "for further tokens before the grid's tokens"
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

    def function(self, function: Function, into: Axes, out: Axes) -> Function:
        """Return a function that leaves the first `count` tokens unchanged, or whose bias is zero for them."""
        return partial(_of_grid if into == out else _pad, function, self.count)


def _pad(bias: Function, count: int, queries: Tensor) -> Tensor:
    return F.pad(bias(queries[..., count:, :]), (count, 0, count, 0))


def _of_grid(function: Function, count: int, x: Tensor) -> Any:
    """Apply a function with one or several results to all tokens but the first `count`."""
    patches = function(x[:, count:])
    if isinstance(patches, Tensor):
        return torch.cat([x[:, :count], patches], 1)
    return tuple(torch.cat([x[:, :count], result], 1) for result in patches)


@dataclass(frozen=True, eq=False)
class Subset(TokenSelection):
    """Some of all tokens, which attend to each other only.

    index: (n,), or (B, n) for other tokens of each sample; a prefix must be whole and come first.
    count: N, the number of all tokens.
    """

    error_phrase = "for a subset of the tokens: it needs all tokens of the grid"
    index: Tensor
    count: int

    def __post_init__(self) -> None:
        if self.index.ndim not in (1, 2) or self.index.dtype != torch.int64:
            raise ValueError(
                f"`index` must be (n,) or (B, n), int64, got {self.index.dtype} {tuple(self.index.shape)}."
            )
        if torch.compiler.is_compiling() or self.index.is_meta:  # values are not known
            return
        if self.index.numel() and not (self.index.min() >= 0 and self.index.max() < self.count):
            least, most = self.index.min().item(), self.index.max().item()
            raise ValueError(f"`index` must be from 0 to {self.count - 1}, got {least} to {most}.")
        if (self.index.sort(-1).values.diff(dim=-1) == 0).any():
            raise ValueError("`index` must have each token at most once, got one twice.")

    @classmethod
    def known(cls, index: Tensor, count: int) -> Subset:
        """Return a subset without a check of the values of `index`, which waits for a GPU."""
        selection = object.__new__(cls)
        object.__setattr__(selection, "index", index)
        object.__setattr__(selection, "count", count)
        return selection

    def of(self, x: Tensor, axis: int = -2) -> Tensor:
        """Return these tokens of x, whose first axis is for the samples."""
        index = self.index.to(x.device)
        if index.ndim == 1:
            return x.index_select(axis, index)
        return torch.take_along_dim(x, self._along(axis, x.ndim, index), axis)

    def _along(self, axis: int, ndim: int, index: Tensor) -> Tensor:
        shape = [1] * ndim
        shape[0], shape[axis] = index.shape[0] if index.ndim == 2 else 1, index.shape[-1]
        return index.view(shape)

    def scatter(self, x: Tensor, axis: int = -2) -> Tensor:
        """Return x with zeros for all other tokens, the inverse of `of`."""
        shape = list(x.shape)
        shape[axis] = self.count
        index = self._along(axis, x.ndim, self.index.to(x.device))
        return x.new_zeros(shape).scatter(axis, index.expand_as(x), x)

    def rows(self, table: Tensor, axis: int = -2, fill: float = 0.0) -> Tensor:
        """Return the rows of these tokens; with (B, n), the first axis is for samples."""
        return select(table, self.index, axis, heads=axis == -1)

    def pairs(self, table: Tensor) -> Tensor:
        return self.of(select(table, self.index, -2), -1)

    def rotation(self, rotation: Rotation) -> Rotation:
        return rotation.take(self.index)

    def function(self, function: Function, into: Axes, out: Axes) -> Function:
        """Return a function of these tokens, which computes it for all with zeros for the others."""
        return partial(_of_some, function, self, into, out)


def _of_some(function: Function, tokens: Subset, into: Axes, out: Axes, x: Tensor) -> Any:
    for axis in into:
        x = tokens.scatter(x, axis)
    outputs = function(x)
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    for axis in out:
        results = tuple(tokens.of(result, axis) for result in results)
    return results if isinstance(outputs, tuple) else results[0]
