"""Maps of the position information of an encoding at the center token of a grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graticule.analysis.position_maps import similarity_of
from graticule.analysis.similarity import cosine_similarity
from graticule.encodings.build import build_position
from graticule.position import layer
from graticule.position.bias import Bias
from graticule.position.displacement import Displacements, TokenMlp
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.position import Position

#: Sizes of the layers for which encodings are built: D, layers, heads or groups.
DIM, DEPTH, HEADS = 96, 2, 3
#: The grid for which encodings are built; they are evaluated on any grid.
BUILT = Grid(7, 7)
#: Maximum number of heads or groups whose maps are drawn.
SHOWN = 3


@dataclass(frozen=True)
class Map:
    """A map over the grid.

    title: description of the values.
    values: (H, W).
    signed: whether 0 is the middle of the colors.
    lowest, highest: the range of the colors.
    """

    title: str
    values: NDArray[np.float64]
    signed: bool = False
    lowest: float | None = None
    highest: float | None = None

    @property
    def colors(self) -> str:
        """Name of the color map of matplotlib."""
        return "RdBu_r" if self.signed else "viridis"


def build(name: str) -> tuple[Position, bool]:
    """Build the position of an encoding for `BUILT`; returns it, and whether its parameters were drawn.

    The maps of encodings that start at zero would be empty, so their parameters are drawn from a normal distribution.
    """
    torch.manual_seed(0)
    position = build_position(BUILT, dim=DIM, depth=DEPTH, num_heads=HEADS, encoding=name).eval()
    with torch.no_grad():
        drawn = any(parameter.requires_grad for parameter in position.parameters())
        blank = drawn and all(np.ptp(panel.values) < 1e-9 for panel in _maps(position, BUILT))
        if blank:
            for parameter in position.parameters():
                parameter.normal_(std=0.5)
    return position, blank


def says_at_center(name: str, grid: Grid, position: Position | None = None) -> list[Map]:
    """Return the maps of an encoding, built for `BUILT`, for the token at the center of `grid`.

    There is one map per head or group of channels if they differ, with a common scale.
    """
    position = build(name)[0] if position is None else position
    with torch.no_grad():
        return common_scale(_maps(position, grid))


def common_scale(maps: list[Map]) -> list[Map]:
    """Set one range of values for all maps, symmetric around 0 if there are values of both signs."""
    if not maps:
        return []
    if not all(np.isfinite(panel.values).all() for panel in maps):  # a mask: minus infinity, or nothing
        maps = [
            replace(panel, title="1: attended, 0: masked", values=np.isfinite(panel.values).astype(float))
            for panel in maps
        ]
    lowest, highest = (float(f([f(panel.values) for panel in maps])) for f in (np.min, np.max))
    rounding = 1e-5 * (highest - lowest)  # of float32, which differs between machines
    signed = maps[0].signed and lowest < -rounding and highest > rounding
    if signed:
        highest = max(-lowest, highest)
        lowest = -highest
    return [replace(panel, lowest=lowest, highest=highest, signed=signed) for panel in maps]


def _maps(position: Position, grid: Grid) -> list[Map]:
    """Return the maps of the first layer that has a position."""
    for layer_position in position(grid):
        if any(value is not None for value in layer_position):
            return _of_layer(layer_position, grid)
    return []


class _Inputs(NamedTuple):
    """The grid of a layer and random inputs: tokens (1, N, D), queries or keys (1, heads, N, d)."""

    grid: Grid
    tokens: Tensor
    heads: Tensor


def _of_layer(position: LayerPosition, grid: Grid) -> list[Map]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(1, grid.tokens, DIM, generator=generator)
    at = _Inputs(grid, tokens, torch.randn(1, HEADS, grid.tokens, DIM // HEADS, generator=generator))
    fields = [(layer.FIELD_KINDS[name], value) for name, value in position._asdict().items() if value is not None]
    return [panel for kind, maps in _MAPS.items() for of, value in fields if of is kind for panel in maps(value, at)]


def _vectors(table: Tensor, at: _Inputs) -> list[Map]:
    similarity = torch.from_numpy(cosine_similarity(table.double().numpy()))
    return [_map("cosine of its vector with all", similarity[at.grid.center], at.grid)]


def _bias(field: Any, at: _Inputs) -> list[Map]:
    bias = Bias.of(field)
    title = "bias for a random query" if bias.function else "bias of attention"
    return _rows(title, bias.table(at.heads), at.grid, signed=True)


def _rotation(rotary: Any, at: _Inputs) -> list[Map]:
    similarity = torch.from_numpy(similarity_of(rotary, at.grid, DIM // HEADS))
    return [_map("similarity of equal queries and keys, rotated", similarity[at.grid.center], at.grid)]


def _mixing(mixing: Any, at: _Inputs) -> list[Map]:
    if isinstance(mixing, TokenMlp):
        return _reaches(mixing.mix, at)
    weights = mixing.matrix() if isinstance(mixing, Displacements) else mixing
    return _rows("weight of each token", weights, at.grid, signed=bool((weights < 0).any()))


def _reaches(function: Callable[[Tensor], Tensor], at: _Inputs, residual: bool = False) -> list[Map]:
    return [_map("reach of each token", _reach(function, at.tokens, at.grid.center, residual), at.grid)]


#: Kind of field -> its maps, in the order of the page. A bias of values and one of mixed tokens have no map.
_MAPS: dict[layer.FieldKind, Callable[[Any, _Inputs], list[Map]]] = {
    layer.ADDED: _vectors,
    layer.BIAS: _bias,
    layer.KEY_BIAS: lambda f, at: _rows("bias for random keys", f(at.heads), at.grid, signed=True),
    layer.POSITIONAL: lambda f, at: _rows("attention by position", f.weights, at.grid),
    layer.ROTARY: _rotation,
    layer.SCALE: lambda f, at: [_map("factor of the queries", f if f.ndim == 1 else f.mean(0), at.grid)],
    layer.RESIDUAL: partial(_reaches, residual=True),
    layer.INPUTS: lambda f, at: _reaches(partial(_first, f), at),
    layer.MIXING: _mixing,
}
if missing := set(layer.FIELD_KINDS.values()) - _MAPS.keys() - {layer.VALUE_BIAS, layer.SPATIAL}:
    raise ValueError(f"`_MAPS` must have every kind of field, got none of {missing}.")


def _rows(title: str, pairs: Tensor, grid: Grid, signed: bool = False) -> list[Map]:
    """Return the row of the center token for each head or group; a single one if all are equal."""
    rows = pairs.reshape(-1, *pairs.shape[-2:])[:SHOWN, grid.center]
    if len(rows) == 1 or torch.allclose(rows, rows[:1].expand_as(rows)):
        return [_map(title, rows[0], grid, signed)]
    return [_map(f"{title}, {n + 1} of {HEADS}", row, grid, signed) for n, row in enumerate(rows)]


def _map(title: str, row: Tensor, grid: Grid, signed: bool = False) -> Map:
    return Map(title, row[grid.prefix :].double().reshape(grid.shape).numpy(), signed)


def _reach(function: Callable[[Tensor], Tensor], tokens: Tensor, center: int, residual: bool = False) -> Tensor:
    """Return the change at the center for a change of each token, (N,); 1 is as large as the change itself.

    Args:
        function: function of tokens (B, N, D).
        tokens: (1, N, D).
        center: index of the center token.
        residual: whether the result includes the tokens themselves, which are subtracted.
    """
    change = torch.randn(tokens.shape[-1], generator=torch.Generator().manual_seed(2))
    changed = tokens + torch.eye(tokens.shape[1])[:, :, None] * change  # (N, N, D): token n changed in entry n
    moved = function(changed)[:, center] - function(tokens)[:, center]  # (N, D)
    if residual:
        moved[center] -= change
    reach: Tensor = moved.norm(dim=-1) / change.norm()
    return reach


def _first(function: Callable[[Tensor], tuple[Tensor, ...]], tokens: Tensor) -> Tensor:
    return function(tokens)[0]
