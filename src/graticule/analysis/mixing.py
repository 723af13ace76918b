"""Token mixing of gated MLPs: the weights around a query, the bias maps, and the non-locality of each layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from graticule.analysis.similarity import Array
from graticule.encodings.forms.mixing import MixingEncoding, MixingPosition
from graticule.encodings.forms.pyramid import PyramidPosition
from graticule.encodings.gqpe import QuadraticMixing
from graticule.encodings.lrpe import MixingSum
from graticule.position.displacement import TokenMlp
from graticule.position.folded import Folded
from graticule.position.grid import Grid
from graticule.position.position import Position
from graticule.registry.checks import checked
from graticule.system.files import write_arrays

#: An eigenvalue below this (in 1 / patches^2) is flat in its direction over any window: sigma is more than 30 patches.
_FLAT = 1e-3


@dataclass(frozen=True, eq=False)
class Mixing:
    """What one layer mixes.

    Args:
        layer: counted from 0 through all stages.
        stage: counted from 0.
        grid: of the tokens that are mixed; with windows, a window's.
        query: (row, column) of the token whose weights are drawn.
    """

    layer: int
    stage: int
    grid: Grid
    query: tuple[int, int]


@dataclass(frozen=True, eq=False)
class MixingMap(Mixing):
    """The weights by which one layer mixes the tokens into one query token.

    Args:
        logits: (groups, H, W), the query's row of attention logits, up to a constant that the softmax cancels; the
            weights themselves without a softmax.
        weights: (groups, H, W), the query's row of the mixing weights.
        softmax: whether the weights are a softmax of the logits.
        bias: (H, W), added to every channel of the mixed tokens; None without a bias.
        centers: (groups, 2), Delta as (x, y), of a quadratic encoding; None otherwise.
        matrices: (groups, 2, 2), the matrix of the quadratic form; None otherwise.
    """

    logits: Array
    weights: Array
    softmax: bool
    bias: Array | None
    centers: Array | None
    matrices: Array | None

    @property
    def groups(self) -> int:
        return len(self.weights)

    def distance(self) -> float:
        """Return the mean distance from the query, weighted by absolute weight, over all groups, in patches."""
        y, x = np.indices(self.grid.shape)
        away = np.hypot(y - self.query[0], x - self.query[1])
        weights = np.abs(self.weights)
        return float(np.mean((weights * away).sum((1, 2)) / weights.sum((1, 2)).clip(np.finfo(float).tiny)))

    def non_locality(self) -> tuple[float, int]:
        r"""Return g and the number of groups that it is the mean of; smaller g is less local (NaN without groups).

        .. math:: g(M) = \frac1s \sum_i \sqrt{\lambda_{i, 1} \lambda_{i, 2}}

        The eigenvalues belong to the symmetric part of the matrix in the quadratic form. Groups that have one
        below 0.001 are left out, as the paper leaves out those that are "singular or close to 0" without a number.

        Reference: PosMLP (Wang et al., 2022), Eq. 16.
        """
        if self.matrices is None:
            return float("nan"), 0
        values = np.linalg.eigvalsh((self.matrices + self.matrices.transpose(0, 2, 1)) / 2)
        curved = values[values.min(-1) >= _FLAT]
        return (float(np.sqrt(curved.prod(-1)).mean()) if len(curved) else float("nan")), len(curved)


@dataclass(frozen=True, eq=False)
class MixingParts(Mixing):
    """The two parts of the mixing weights of a layer of LRPE-M, which adds them: the dense matrix and the table.

    Args:
        dense: (1, N, N) or (groups, N, N), the weights of the first part.
        relative: (groups, N, N), the weights of the second.
    """

    dense: Array
    relative: Array

    @property
    def total(self) -> Array:
        """The sum of both, (groups, N, N), which are the mixing weights of the layer."""
        return self.dense + self.relative

    def relative_share(self) -> float:
        """Return the share of the relative part in the sum of the squares of both, from 0 to 1."""
        groups = len(self.relative) / len(self.dense)
        dense, relative = groups * float(np.square(self.dense).sum()), float(np.square(self.relative).sum())
        return relative / max(dense + relative, np.finfo(float).tiny)


@torch.no_grad()
@checked
def mixing_maps(
    model: nn.Module,
    img_size: tuple[int, int] | None = None,
    query: tuple[int, int] | None = None,
    layers: Sequence[int] | None = None,
) -> list[MixingMap]:
    """Read the mixing weights of a query token from layers of a gated MLP; no image is needed.

    Reference: PosMLP (Wang et al., 2022), Figures 1 (d, e), 4, 5 and 8.

    Args:
        model: a gMLP or PosMLP of ours; it is not changed.
        img_size: (height, width) in pixels; the model's own by default.
        query: (row, column) within the grid or window of the layer; its center by default.
        layers: counted from 0 through all stages; all by default.

    Raises:
        ValueError: if the model does not mix tokens by position or has no such layer, or the query is outside of a
            layer's grid.
    """
    return [_map(layer, layer.query_at(query)) for layer in _layers(model, img_size, layers)]


@torch.no_grad()
def mixing_parts(
    model: nn.Module,
    img_size: tuple[int, int] | None = None,
    query: tuple[int, int] | None = None,
    layers: Sequence[int] | None = None,
) -> list[MixingParts]:
    """Read the two parts of the weights of every layer with LRPE-M; layers with other encodings are left out.

    Reference: PosMLP (Wang et al., 2022), Eq. 10 and Figure 7.

    Args:
        model: this and all others are as in `mixing_maps`, with the same errors.
    """
    return [
        MixingParts(
            layer.layer,
            layer.stage,
            layer.grid,
            layer.query_at(query),
            *(_array(part(layer.grid)) for part in (layer.encoding.first, layer.encoding.second)),
        )
        for layer in _layers(model, img_size, layers)
        if isinstance(layer.encoding, MixingSum)
    ]


@torch.no_grad()
@checked
def mixing_matrices(model: nn.Module, img_size: tuple[int, ...] | None = None) -> list[tuple[Grid, Array]]:
    """Return the weights by which each layer of a gated MLP mixes all tokens, (groups, N, N), with their grid.

    Args:
        model: as in `mixing_maps`, with the same errors.
        img_size: as in `mixing_maps`.
    """
    matrices = []
    for layer in _layers(model, img_size, None):
        table = layer.encoding.displacements(layer.grid)
        matrices.append((layer.grid, _array(layer.encoding(layer.grid) if table is None else table.matrix())))
    return matrices


class _MixingLayer(NamedTuple):
    """The number, stage, grid or window, encoding and bias of a layer of a gated MLP."""

    layer: int
    stage: int
    grid: Grid
    encoding: MixingEncoding
    bias: Tensor | None

    def query_at(self, query: tuple[int, int] | None) -> tuple[int, int]:
        """Return the row and column of the query, the center by default."""
        row, column = divmod(self.grid.center, self.grid.width) if query is None else query
        if not (0 <= row < self.grid.height and 0 <= column < self.grid.width):
            raise ValueError(
                f"`query` must be a (row, column) inside the {self.grid.height} x {self.grid.width} tokens that stage "
                f"{self.stage} mixes, got ({row}, {column})."
            )
        return row, column


def _layers(model: nn.Module, img_size: tuple[int, ...] | None, layers: Sequence[int] | None) -> list[_MixingLayer]:
    """Return layers of a gated MLP, all by default."""
    position: Any = getattr(model, "position", None)
    position = position.original if isinstance(position, Folded) else position
    pyramid = isinstance(position, PyramidPosition)
    stages = position.stages if pyramid else [position] if isinstance(position, Position) else []
    parts = [[part for part in stage.modules() if isinstance(part, MixingPosition)] for stage in stages]
    if not any(parts):
        raise ValueError(f"`model` must mix its tokens by position, as gMLP and PosMLP do, got {type(model).__name__}.")
    backbone: Any = model
    grid = backbone.grid_at(backbone.img_size if img_size is None else img_size)
    every: list[_MixingLayer] = []
    for stage, (mixing, at) in enumerate(zip(parts, position.grids(grid) if pyramid else [grid], strict=True)):
        first, encodings = len(every), {}
        for part in mixing:
            fields = part(at)
            for layer, encoding in zip(
                part.layer_indices, cast("Iterable[MixingEncoding]", part.encodings), strict=True
            ):
                if isinstance(fields[layer].mixing, TokenMlp):
                    raise ValueError("`model` must mix its tokens by weights, got one that mixes them by an MLP.")
                gate = fields[layer].spatial_bias
                # the mean over the groups, if each has its own
                encodings[layer] = encoding, gate if gate is None or gate.ndim == 1 else gate.mean(0)
        for index, layer in enumerate(sorted(encodings)):
            every.append(_MixingLayer(first + index, stage, at.within, *encodings[layer]))
    for layer in layers or ():
        if not 0 <= layer < len(every):
            raise ValueError(f"`layers` must be from 0 to {len(every) - 1}, got {layer}.")
    return every if layers is None else [every[layer] for layer in layers]


def _map(layer: _MixingLayer, query: tuple[int, int]) -> MixingMap:
    (row, column), grid, encoding = query, layer.grid, layer.encoding
    table = encoding.displacements(grid)
    if table is None:
        logits = weights = encoding(grid)[:, row * grid.width + column].unflatten(-1, grid.shape).double()
    else:  # the row of a query is a slice of the table
        first, left = grid.height - 1 - row, grid.width - 1 - column
        logits = table.table.double()[:, first : first + grid.height, left : left + grid.width]
        weights = logits.flatten(1).softmax(-1).view_as(logits) if table.softmax else logits
    quadratic = encoding if isinstance(encoding, QuadraticMixing) else None
    return MixingMap(
        layer.layer,
        layer.stage,
        grid,
        query,
        _array(logits),
        _array(weights),
        softmax=table is not None and table.softmax,
        bias=None if layer.bias is None else _array(layer.bias.view(grid.shape)),
        centers=None if quadratic is None else _array(quadratic.center),
        matrices=None if quadratic is None else _array(quadratic.quadratic()),
    )


def _array(values: Tensor) -> Array:
    return values.detach().double().cpu().numpy().copy()


def save_mixing(maps: Sequence[MixingMap], path: str | Path, parts: Sequence[MixingParts] = ()) -> Path:
    """Write `maps` to `path` as .npz; returns the path.

    `layer0_weights`, `layer0_logits` (groups, H, W), `layer0_bias` (H, W), `layer0_centers` (groups, 2) as (x, y) and
    `layer0_matrices` (groups, 2, 2) belong to the first layer, if it has them, and `layer0_dense` and
    `layer0_relative` (groups, N, N) come from `parts`.
    """
    arrays = {}
    for layer in (*maps, *parts):
        for name in ("weights", "logits", "bias", "centers", "matrices", "dense", "relative"):
            if (array := getattr(layer, name, None)) is not None:
                arrays[f"layer{layer.layer}_{name}"] = array
    return write_arrays(path, arrays)
