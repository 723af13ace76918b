"""The bias of one layer, for all or some heads, and positions with one bias per layer or a shared one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from graticule.attention_bias import BiasFunction, LowRank
from graticule.encodings.base import Position
from graticule.grid import Grid
from graticule.joined_layers import Layers, PerLayer, joined_layers, spread, spread_heads
from graticule.layer_position import LayerPosition
from graticule.symbolic import holds

#: A bias is passed in two factors from this number of tokens, up to this number of channels (`benchmarks/bias.py`).
LOW_RANK_TOKENS, LOW_RANK_CHANNELS = 1024, 16


class LayerBias(nn.Module, ABC):
    """Makes the bias of one layer or of all: an encoding, a normalized one, or one for some heads."""

    #: The grid that it is built for.
    grid: Grid

    @abstractmethod
    def forward(self, grid: Grid) -> Tensor | BiasFunction | LayerPosition:
        """Return the bias for `grid`, (heads, N, N), a function of the scaled queries, or a `LayerPosition`."""

    def low_rank(self, grid: Grid) -> LowRank | None:
        """Return the bias for `grid` in two factors, exactly; None if it has no such form."""
        return None

    def layer(self, grid: Grid) -> LayerPosition:
        """Return the position of a layer for `grid`, with the bias in its fastest form."""
        if holds(grid.tokens >= LOW_RANK_TOKENS):
            factors = self.low_rank(grid)
            if factors is not None and factors.rank <= LOW_RANK_CHANNELS:
                return LayerPosition(bias=factors)
        given = self(grid)
        return given if isinstance(given, LayerPosition) else LayerPosition(bias=given)

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the bias; here no parameter depends on it."""
        self.grid = grid

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Make `value` of a checkpoint fit the parameter `name`; a value that cannot be is returned unchanged.

        `shape` is the (H, W) of the grid or window that the value is for, if the checkpoint records it.
        """
        return value

    def published_names(self, name: str) -> tuple[str, ...]:
        """Return the published names of the parameter `name`, after `blocks.l.attn.`; the usual name is last."""
        return (name,)


class SomeHeads(LayerBias):
    """A bias for some heads; it is zero for the others.

    Args:
        bias: a bias for as many heads as are chosen.
        heads: their indices.
        num_heads: h.
    """

    def __init__(self, bias: LayerBias, heads: Sequence[int], num_heads: int) -> None:
        super().__init__()
        self.grid = bias.grid
        self.bias = bias
        self.heads, self.num_heads = tuple(heads), num_heads

    def forward(self, grid: Grid) -> LayerPosition:
        """Return the position of a layer with all heads for `grid`."""
        given = self.bias.layer(grid)
        positional = given.positional
        return given._replace(
            bias=self._spread(given.bias),
            key_bias=self._spread(given.key_bias),
            value_bias=self._spread(given.value_bias),
            positional=None if positional is None else type(positional)(*map(self._spread, positional)),
        )

    def _spread(self, made: Any) -> Any:
        """Extend a tensor (heads, ...), or a function from and to (B, heads, ...), from the chosen heads to all."""
        if made is None or isinstance(made, Tensor):
            return None if made is None else spread_heads(made, self.heads, self.num_heads)
        if isinstance(made, LowRank):
            return LowRank(spread_heads(made.queries, self.heads, self.num_heads), made.keys[:1])
        return partial(_of_heads, made, self.heads, self.num_heads)

    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the encoding, and resample its parameters."""
        super().set_grid(grid)
        self.bias.set_grid(grid)

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """Make `value` of a checkpoint fit the parameter `name`, as the bias does."""
        return self.bias.fit(name.removeprefix("bias."), value, shape)

    def published_names(self, name: str) -> tuple[str, ...]:
        """Return the published names of the parameter `name`, as the bias does."""
        return self.bias.published_names(name.removeprefix("bias."))

    def extra_repr(self) -> str:
        return f"heads={list(self.heads)}, num_heads={self.num_heads}"


def _of_heads(function: BiasFunction, heads: tuple[int, ...], num_heads: int, queries: Tensor, **part: Any) -> Tensor:
    return spread_heads(function(queries[:, list(heads)], **part), heads, num_heads, dim=1)


class BiasPosition(Position):
    """One relative encoding per joined layer; the other layers get nothing.

    Args:
        biases: one per joined layer, all for the same grid or window.
        depth: number of layers.
        layers: indices of the joined layers; the first ones by default.
    """

    def __init__(self, biases: Iterable[LayerBias], depth: int, layers: Sequence[int] | None = None) -> None:
        super().__init__()
        self.depth = depth
        biases = list(biases)
        if not 1 <= len(biases) <= depth:
            raise ValueError(f"`biases` must be from 1 to {depth}, one per layer, got {len(biases)}.")
        self.joined = joined_layers(depth, len(biases) if layers is None else layers)
        self.encodings = PerLayer(biases, self.joined)

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the bias of each layer for `grid`, or for its windows: (heads, N, N), or a function of the queries."""
        return spread([bias.layer(grid.within) for bias in self._each()], self.joined, self.depth)

    def set_grid(self, grid: Grid) -> None:
        """Resample every table for `grid`, or for its windows."""
        for bias in self._each():
            bias.set_grid(grid.within)

    def keep(self, layers: Collection[int]) -> None:
        """Remove the encodings of all layers but these."""
        self.joined = tuple(layer for layer in self.joined if layer in layers)
        for name in [name for name, _ in self.encodings.named_children() if int(name) not in self.joined]:
            delattr(self.encodings, name)

    def layer_lists(self) -> list[str]:
        """Return the name of the list of biases."""
        return ["encodings"]

    def published_names(self) -> dict[str, str]:
        """Map `blocks.l.attn.` and the published name of a parameter; `pe_norm` for LaPE's norm."""
        return {
            f"blocks.{layer}.attn.{leaf}": f"encodings.{layer}.{own}"
            for layer, bias in zip(self.joined, self._each(), strict=True)
            for own, _ in bias.named_parameters()
            for leaf in bias.published_names(own)
        }

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor | None:
        """Resample a bias table, or its norm, of another grid or window for this one."""
        _, layer, own = name.split(".", 2)
        return cast("LayerBias", self.encodings.get_submodule(layer)).fit(own, value, shape)

    def _each(self) -> Iterable[LayerBias]:
        return cast("Iterable[LayerBias]", self.encodings)


class SharedBiasPosition(Position):
    """One relative encoding whose bias is the same in all joined layers, as in T5.

    Args:
        encoding: built for the grid, or for a window of it.
        depth: number of layers.
        layers: the number of the first layers that get the bias, or the indices of any layers; all by default.
    """

    def __init__(self, encoding: LayerBias, depth: int, layers: Layers = None) -> None:
        super().__init__()
        self.encoding = encoding
        self.depth = depth
        self.joined = joined_layers(depth, layers)

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return the position of each layer for `grid`: the same `bias`, (heads, N, N)."""
        return spread([self.encoding.layer(grid.within)] * len(self.joined), self.joined, self.depth)

    def set_grid(self, grid: Grid) -> None:
        """Set `grid`, or a window of it, as the grid of the encoding."""
        self.encoding.set_grid(grid.within)

    def published_names(self) -> dict[str, str]:
        """Map `rel_pos_bias.` of BEiT or `shared_rel_pos.` of timm, and the published name of a parameter."""
        return {
            f"{module}.{leaf.removeprefix('rel_pos.')}": f"encoding.{own}"
            for own, _ in self.encoding.named_parameters()
            for module in ("rel_pos_bias", "shared_rel_pos")
            for leaf in self.encoding.published_names(own)
        }

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor | None:
        """Resample a bias table of another grid or window for this one."""
        return self.encoding.fit(name.removeprefix("encoding."), value, shape)
