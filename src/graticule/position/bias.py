"""Relative encodings: a bias on the attention logits of each layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import nn

from graticule.encodings import NormalizedBias, RelativeBias, ShawBias
from graticule.grid import Grid
from graticule.joining import LayerPosition
from graticule.position.base import Position


class BiasPosition(Position):
    """A relative encoding a layer; the layers past the last one get nothing."""

    def __init__(self, encodings: Iterable[RelativeBias | NormalizedBias | ShawBias], depth: int) -> None:
        super().__init__()
        self.encodings = nn.ModuleList(encodings)
        self.depth = depth
        if not 1 <= len(self.encodings) <= depth:
            raise ValueError(f"`encodings` must be from 1 to {depth}, one a layer, got {len(self.encodings)}.")

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Say what each layer gets for `grid`: (heads, N, N) as `bias`, or what makes it from the queries."""
        given = [LayerPosition(bias=encoding(grid)) for encoding in self.encodings]
        return given + [LayerPosition()] * (self.depth - len(given))

    def set_grid(self, grid: Grid) -> None:
        """Resample every table for `grid`."""
        for encoding in cast("Iterable[Any]", self.encodings):
            encoding.set_grid(grid)

    def layer_lists(self) -> list[str]:
        """The biases."""
        return ["encodings"]

    def published_names(self) -> dict[str, str]:
        """`blocks.l.attn.relative_position_bias_table` and `blocks.l.attn.pe_norm`, as LaPE's code."""
        names = {}
        for own, _ in self.encodings.named_parameters():
            layer, *rest = own.split(".")
            leaf = "pe_norm." + rest[-1] if rest[0] == "norm" else rest[-1]
            names[f"blocks.{layer}.attn.{leaf}"] = f"encodings.{own}"
        return names
