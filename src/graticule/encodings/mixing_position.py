"""Mixing encodings: the weights by which the gating unit of each layer mixes tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from graticule.displacement import LARGE, Displacements
from graticule.encodings.base import Position
from graticule.encodings.mixing import MixingEncoding, resize_displacements, resize_pairs
from graticule.grid import BICUBIC, Grid, resize_map
from graticule.layer_position import LayerPosition

#: How tokens are mixed: by the matrix of all pairs, or as a convolution over displacements that never makes it.
Product = Literal["auto", "matrix", "displacement"]


class MixingPosition(Position):
    """Holds a mixing encoding per layer and, with `bias`, a number per token that is added to the mixed tokens.

    The bias starts at `bias_start`: at one a unit whose weights start near zero starts as the identity (gMLP), at
    zero as PosMLP's code does. At another grid it is resampled as a map.

    Reference: gMLP (Liu et al., 2021), Eq. 2; PosMLP (Wang et al., 2022), Eq. 15.

    Args:
        encodings: one per layer, of the same grid, or of the windows of it.
        bias: whether each layer has that bias.
        bias_start: initial value of the bias.
        product: 'matrix', or 'displacement' where the encoding has a table of displacements (`Displacements`), which
            takes memory that grows with N instead of N^2; 'auto' takes it from 1,024 patches on, where it is faster
            (with 8 samples or more only from some 1,600 on).
    """

    def __init__(
        self,
        encodings: Iterable[MixingEncoding],
        bias: bool = True,
        product: Product = "auto",
        bias_start: float = 1.0,
    ) -> None:
        super().__init__()
        if product not in get_args(Product):
            raise ValueError(f"`product` must be one of {', '.join(get_args(Product))}, got {product!r}.")
        self.product = product
        self.encodings = nn.ModuleList(encodings)
        if not len(self.encodings):
            raise ValueError("`encodings` must be one per layer, got none.")
        self.grid = cast("MixingEncoding", self.encodings[0]).grid
        count = len(self.encodings) if bias else 0
        self.biases = nn.ParameterList(nn.Parameter(torch.full((self.grid.patches,), bias_start)) for _ in range(count))

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Return weights or their table, and the bias (N,), of each layer for `grid`, or for its windows."""
        grid = grid.within
        gates: list[Tensor | None] = [self._bias_at(bias, grid) for bias in self.biases]
        gates = gates or [None] * len(self.encodings)
        return [
            LayerPosition(mixing=self._mixing(encoding, grid), gate=gate)
            for encoding, gate in zip(cast("Iterable[MixingEncoding]", self.encodings), gates, strict=True)
        ]

    def set_grid(self, grid: Grid) -> None:
        """Resample or recompute everything for `grid`, or for its windows."""
        grid = grid.within
        for encoding in cast("Iterable[Any]", self.encodings):
            encoding.set_grid(grid)
        with torch.no_grad():
            self.biases = nn.ParameterList(
                nn.Parameter(self._bias_at(bias, grid).clone(), requires_grad=bias.requires_grad)
                for bias in self.biases
            )
        self.grid = grid

    def _mixing(self, encoding: MixingEncoding, grid: Grid) -> Tensor | Displacements:
        table = encoding.displacements(grid)
        if table is None:
            weights: Tensor = encoding(grid)
            return weights
        large = grid.patches >= LARGE if self.product == "auto" else self.product == "displacement"
        return table if large else table.with_weights()

    def _bias_at(self, bias: Tensor, grid: Grid) -> Tensor:
        if grid == self.grid:
            return bias
        return resize_map(bias.view(1, *self.grid.shape), grid.shape).flatten()

    def layer_lists(self) -> list[str]:
        """Return the names of the lists of encodings and biases."""
        return ["encodings", "biases"]

    def published_names(self) -> dict[str, str]:
        """`blocks.l.mlp_channels.gate.proj.weight` and `.bias` of a dense matrix, as timm's gMLP."""
        names = {}
        for own, _ in self.named_parameters():
            kind, layer, *rest = own.split(".")
            if kind == "biases":
                names[f"blocks.{layer}.mlp_channels.gate.proj.bias"] = own
            elif rest == ["weight"]:
                names[f"blocks.{layer}.mlp_channels.gate.proj.weight"] = own
        return names

    def table_shapes(self) -> dict[str, tuple[int, int]]:
        """The shape of the grid or window, for every parameter that is held for it."""
        biases = (f"biases.{layer}" for layer in range(len(self.biases)))
        return {**super().table_shapes(), **dict.fromkeys(biases, self.grid.shape)}

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor | None:
        """Bring a matrix, table or bias of another grid or window to this one."""
        kind, *_, leaf = name.split(".")
        grid = self.grid
        if kind == "biases":
            old = grid.alike(value.shape[0], shape) if value.ndim == 1 else None
            if old is not None and old.shape != grid.shape:
                return resize_map(value.view(1, *old.shape), grid.shape).flatten()
            return value
        resampler = getattr(self.get_submodule(name.rpartition(".")[0]), "resampler", BICUBIC)
        if leaf == "weight":
            old = grid.alike(len(value), shape) if value.ndim == 2 and value.shape[0] == value.shape[1] else None
            return value if old is None or old.shape == grid.shape else resize_pairs(value, old, grid, resampler)
        if leaf == "relative_position_table" and value.ndim == 2:
            sides = Grid(2 * grid.height - 1, 2 * grid.width - 1)
            old = sides.alike(value.shape[1], shape and (2 * shape[0] - 1, 2 * shape[1] - 1))
            if old is not None and old.shape != sides.shape and old.height % 2 and old.width % 2:
                half = Grid((old.height + 1) // 2, (old.width + 1) // 2)
                return resize_displacements(value, half, grid, resampler)
        return value
