"""All maps of one model at one size for the explorer: position, attention and mixing, for every layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from graticule.analysis.mixing import mixing_matrices
from graticule.analysis.position_maps import position_maps
from graticule.analysis.similarity import Array, Correlations
from graticule.external.images import Size
from graticule.external.view import ModelView, Unavailable
from graticule.position.grid import Grid

#: Kind of map -> its title. Maps of attention depend on the image.
KINDS = {
    "correlation": "Position correlation",
    "rotary": "Similarity under rotation",
    "bias": "Bias of attention",
    "mixing": "Mixing weights",
    "attention": "Attention",
    "without": "Attention without position",
}
#: Name of the average over heads, which replaces the names of the heads.
MEAN = "mean over heads"


@dataclass(frozen=True, eq=False)
class Maps:
    """The maps of one kind of one layer: the values of all keys for each query.

    kind: one of `KINDS`.
    layer: counted from 0 through all stages.
    values: (heads, Q, M): the queries are `prefix` prefix tokens and then the patches of `queries`; with windows,
        (heads, L, M, M); by displacement, (heads, 2H - 1, 2W - 1).
    queries, keys: (height, width) of their grids.
    heads: the name of each entry of the first axis.
    prefix: number of prefix tokens among the queries.
    image: of attention, the number of the image; None otherwise.
    windows: (L, M), the tokens of each window, -1 for padding.
    by_displacement: whether the values depend only on the displacement, the position of the query minus the key's.
    """

    kind: str
    layer: int
    values: Array
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: tuple[str, ...]
    prefix: int = 0
    image: int | None = None
    windows: NDArray[np.int64] | None = None
    by_displacement: bool = False

    def averaged(self) -> Maps:
        """Return the mean over the heads, if there are several."""
        if len(self.heads) == 1:
            return self
        return Maps(**{**vars(self), "values": self.values.mean(0, keepdims=True), "heads": (MEAN,)})


@dataclass(frozen=True, eq=False)
class SizeMaps:
    """The maps of one model for images of one size.

    img_size: (height, width) in pixels.
    grids: (height, width) in patches of each layer.
    maps: in the order of `KINDS`.
    notes: reasons why maps of some kind are missing.
    """

    img_size: Size
    grids: list[tuple[int, ...]]
    maps: list[Maps]
    notes: list[str]


def explorer_maps(view: ModelView, images: Tensor) -> SizeMaps:
    """Compute all maps of a model.

    Args:
        view: of the model.
        images: (B, C, height, width), as the model takes them.
    """
    size = tuple(images.shape[2:])
    view = view.resized_to(size)
    grids = [grid.shape for grid in view.grids(size)]
    maps, notes = list(_of_position(view, size)), []
    with suppress(ValueError):  # if the model is not a gated MLP
        matrices = enumerate(mixing_matrices(view.model, size))
        maps += [
            _compact("mixing", layer, values, grid, _names("group", len(values))) for layer, (grid, values) in matrices
        ]
    try:
        maps += _attention(view, images, "attention")
        maps += _attention(view.without_position(), images, "without")
    except Unavailable as error:
        notes.append(str(error).rstrip(".") + ".")
    if not maps:
        raise ValueError(f"`model` must have maps of position or attention, got {type(view.model).__name__}: {notes}.")
    order = list(KINDS)
    return SizeMaps(size, grids, sorted(maps, key=lambda item: order.index(item.kind)), notes)


def _of_position(view: ModelView, size: Size) -> Iterator[Maps]:
    """Yield correlations, similarities under rotation and biases."""
    try:
        stages = position_maps(view.model, size)
    except ValueError:  # the size is accepted, so the model has no map of position
        return
    depths = list(getattr(view.model, "depths", [view.depth]))
    for number, stage in enumerate(stages):
        first = sum(depths[:number])
        if stage.correlations is not None:
            yield from _similarity("correlation", stage.correlations, first)
        if stage.rotary is not None:
            yield from _similarity("rotary", stage.rotary, first)
        if (biases := stage.biases) is not None:
            heads = _names("head", biases.bias.shape[1])
            of_stage = first if len(stages) == len(depths) else 0
            for layers, values in zip(biases.layers, biases.bias, strict=True):
                for layer in layers:
                    yield _compact("bias", layer + of_stage, values, biases.grid, heads)


def _similarity(kind: str, similarities: Correlations, first: int) -> Iterator[Maps]:
    shape, heads = similarities.grid.shape, (MEAN if kind == "rotary" else "all heads",)
    for layer, (values, source) in enumerate(zip(similarities.similarity, similarities.sources, strict=True)):
        if source is not None:
            yield Maps(kind, first + layer, values[None], shape, shape, heads)


def _attention(view: ModelView, images: Tensor, kind: str) -> Iterator[Maps]:
    for layer in view.attention(images):
        shapes, heads = (layer.queries.shape, layer.keys.shape), _names("head", layer.num_heads)
        to_patches = layer.weights[..., layer.keys.prefix :]
        of_images = to_patches.reshape(len(images), -1, *layer.weights.shape[1:3], layer.keys.patches)
        for image, values in enumerate(of_images):  # (windows, heads, N, M)
            if layer.windows is not None:
                yield Maps(kind, layer.layer, values.swapaxes(0, 1), *shapes, heads, 0, image, layer.windows)
            elif len(values) == 1:
                yield Maps(kind, layer.layer, values[0], *shapes, heads, layer.queries.prefix, image)


def _compact(kind: str, layer: int, values: Array, grid: Grid, heads: tuple[str, ...]) -> Maps:
    """Return the maps (heads, N, N), by displacement if they depend on it alone."""
    shape = grid.shape
    if len(shape) > 2:
        return Maps(kind, layer, values, shape, shape, heads)
    height, width = shape
    index = grid.offset_index().numpy()
    table = np.zeros((len(values), (2 * height - 1) * (2 * width - 1)))
    table[:, index] = values
    if not np.array_equal(table[:, index], values):
        return Maps(kind, layer, values, shape, shape, heads)
    values = table.reshape(-1, 2 * height - 1, 2 * width - 1)
    return Maps(kind, layer, values, shape, shape, heads, by_displacement=True)


def _names(noun: str, count: int) -> tuple[str, ...]:
    return tuple(f"{noun} {number}" for number in range(count))
