"""Relative encodings: a bias on the attention logits of each layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

from graticule.encodings import NormalizedBias
from graticule.grid import Grid, resize_map
from graticule.joining import LayerPosition
from graticule.position.base import Position


class BiasPosition(Position):
    """A relative encoding a layer; the layers past the last one get nothing.

    Args:
        encodings: one a layer, of the same grid.
        depth: number of layers.
        window: side of the windows within which tokens attend; then the encodings' grid is that of a window, and it
            stays so whatever grid is asked about, until `set_grid`.
    """

    def __init__(
        self,
        encodings: Iterable[nn.Module],
        depth: int,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.window = window
        self.encodings = nn.ModuleList(encodings)
        self.depth = depth
        if not 1 <= len(self.encodings) <= depth:
            raise ValueError(f"`encodings` must be from 1 to {depth}, one a layer, got {len(self.encodings)}.")

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Say what each layer gets for `grid`: (heads, N, N) as `bias`, or what makes it from the queries."""
        each = cast("Iterable[Any]", self.encodings)
        given = [LayerPosition(bias=encoding(grid if self.window is None else encoding.grid)) for encoding in each]
        return given + [LayerPosition()] * (self.depth - len(given))

    def set_grid(self, grid: Grid) -> None:
        """Resample every table for `grid`."""
        for encoding in cast("Iterable[Any]", self.encodings):
            encoding.set_grid(grid.window(self.window))

    def layer_lists(self) -> list[str]:
        """The biases."""
        return ["encodings"]

    def published_names(self) -> dict[str, str]:
        """`blocks.l.attn.` and the name in the code of LaPE, Swin, Swin V2 and iRPE; `pe_norm` for LaPE's norm."""
        names = {}
        for own, _ in self.encodings.named_parameters():
            layer, *rest = own.split(".")
            kind, *more = rest
            if kind == "norm":
                leaf = f"pe_norm.{more[-1]}"
            elif kind == "lookup_table_weight":
                leaf = "rpe_k.lookup_table_weight"
            else:
                leaf = ".".join(more if kind == "bias" and more else rest)
            names[f"blocks.{layer}.attn.{leaf}"] = f"encodings.{own}"
        return names

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor | None:
        """Bring a bias table, or a norm of one, of another grid or window to this one."""
        return _fit(self.encodings[int(name.split(".")[1])], name, self.get_parameter(name), value, shape)


class SharedBiasPosition(Position):
    """One relative encoding whose bias all the first layers share, as T5 and ALiBi have it.

    With a `RelativeBias` it is the RPE that CPVT's Table 8 counts beside a learnable embedding: 37,824 + 3 * 27 * 27 =
    40,011 parameters.

    Args:
        encoding: built for the grid, or for a window of it.
        depth: number of layers.
        layers: only the first ones get the bias; all by default.
        window: side of the windows within which tokens attend, as `BiasPosition`.
    """

    def __init__(self, encoding: nn.Module, depth: int, layers: int | None = None, window: int | None = None) -> None:
        super().__init__()
        self.encoding = encoding
        self.depth = depth
        self.layers = depth if layers is None else layers
        self.window = window
        if not 1 <= self.layers <= depth:
            raise ValueError(f"`joined_layers` must be from 1 to the depth of the model, {depth}, got {layers}.")

    def forward(self, grid: Grid) -> list[LayerPosition]:
        """Say what each layer gets for `grid`: the same (heads, N, N) as `bias`."""
        encoding: Any = self.encoding
        given = LayerPosition(bias=encoding(grid if self.window is None else encoding.grid))
        return [given] * self.layers + [LayerPosition()] * (self.depth - self.layers)

    def set_grid(self, grid: Grid) -> None:
        """Make `grid`, or a window of it, the one that the encoding is built for."""
        encoding: Any = self.encoding
        encoding.set_grid(grid.window(self.window))

    def fit(self, name: str, value: Tensor, shape: tuple[int, int] | None = None) -> Tensor | None:
        """Bring a bias table of another grid or window to this one."""
        return _fit(self.encoding, name, self.get_parameter(name), value, shape)


def _fit(encoding: Any, name: str, own: Tensor, value: Tensor, shape: tuple[int, int] | None) -> Tensor:
    """Resample `name`, a parameter of a bias or of its norm, from the grid `shape` to that of `encoding`, if it can be.

    Without `shape` the number of rows tells the grid, as far as it does (`Grid.alike`).
    """
    if name.endswith("relative_position_bias_table") and value.ndim == 2 and value.shape[1] == own.shape[1]:
        height, width = encoding.grid.shape
        displacements = Grid(2 * height - 1, 2 * width - 1, sequence=encoding.grid.sequence)
        old = displacements.alike(value.shape[0], shape and (2 * shape[0] - 1, 2 * shape[1] - 1))
        if old is not None and old.shape != displacements.shape and old.height % 2 and old.width % 2:
            return resize_map(value.T.unflatten(1, old.shape), displacements.shape).flatten(1).T
    if isinstance(encoding, NormalizedBias) and value.ndim == 1:
        old = encoding.grid.alike(value.shape[0], shape)
        if old is not None and old.shape != encoding.grid.shape:
            return resize_map(value.view(1, *old.shape), encoding.grid.shape).flatten()
    return value
