"""Biases of attention: the numbers that each layer and head adds to the logits of two positions, for any image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from graticule.analysis.correlation import layers_of, positions_of, seen_in
from graticule.analysis.similarity import Array, mean_distance
from graticule.backbones.language import LanguageModel
from graticule.position.bias import Bias
from graticule.position.grid import Grid
from graticule.system.files import write_arrays

#: Columns of `BiasMaps.summary()`.
COLUMNS = ("layers", "spread", "reach (patches)", "of uniform")


@dataclass(frozen=True, eq=False)
class BiasMaps:
    """The biases that the layers of a model, or of one stage, add to their attention logits.

    Args:
        grid: the grid of the tokens, that of a window if attention is within windows; without prefix tokens.
        layers: for every map, the layers that have this bias, counted from 0; more than one if they share it.
        bias: (maps, heads, H * W, H * W), rows are queries; NaN where a key is not seen.
    """

    grid: Grid
    layers: tuple[tuple[int, ...], ...]
    bias: Array

    def __post_init__(self) -> None:
        tokens = self.grid.patches
        if self.bias.ndim != 4 or self.bias.shape[::2] != (len(self.layers), tokens) or self.bias.shape[3] != tokens:
            wanted = f"({len(self.layers)}, heads, {tokens}, {tokens})"
            raise ValueError(f"`bias` must be (maps, heads, H * W, H * W) = {wanted}, got {self.bias.shape}.")

    @property
    def unit(self) -> str:
        """The unit of distances: patches, or tokens of a text."""
        return "tokens" if self.grid.height == 1 else "patches"

    @cached_property
    def spread(self) -> Array:
        """The standard deviation of the bias over the keys of a query, mean over queries, (maps, heads).

        Only this reaches the softmax: a number that all keys share drops out.
        """
        deviations: Array = np.nanstd(self.bias, axis=-1).mean(-1)
        return deviations

    @cached_property
    def reach(self) -> Array:
        """The mean attention distance of a query if the bias alone decides, (maps, heads), in patches."""
        distance = self.grid.distances().double().numpy()
        return np.array([[mean_distance(_softmax(head), distance) for head in one] for one in self.bias])

    @cached_property
    def uniform_distance(self) -> float:
        """`reach` without any bias, in patches; only keys that are seen count."""
        return mean_distance(_softmax(0 * self.bias[0, 0]), self.grid.distances().double().numpy())

    def name(self, index: int) -> str:
        """Name the layers of a map, counted from 0: 'layer 3', 'layers 0-5'."""
        first, last = self.layers[index][0], self.layers[index][-1]
        return f"layer {first}" if first == last else f"layers {first}-{last}"

    def summary(self) -> list[tuple[str, ...]]:
        """Return rows for a table: `COLUMNS`, then a row per map, with the range over its heads."""
        rows: list[tuple[str, ...]] = [tuple(name.replace("patches", self.unit) for name in COLUMNS)]
        for index, (spread, local) in enumerate(zip(self.spread, self.reach, strict=True)):
            shares = 100 * local / self.uniform_distance if self.uniform_distance else np.full_like(local, np.nan)
            cells = _span(spread, ".3f"), _span(local, ".2f"), _span(shares, ".0f", " %")
            rows.append((self.name(index).partition(" ")[2], *cells))
        return rows

    def save(self, path: str | Path) -> Path:
        """Write all arrays to `path` as .npz, completely or not at all; returns the path.

        `map_of_layer` is the index of the map of every layer up to the last that has one, -1 for none.
        """
        map_of_layer = np.full(1 + max(layer for group in self.layers for layer in group), -1)
        for index, group in enumerate(self.layers):
            map_of_layer[list(group)] = index
        arrays = {
            "grid": np.array(self.grid.shape),
            "map_of_layer": map_of_layer,
            "bias": self.bias,
            "spread": self.spread,
            "reach": self.reach,
            "uniform_distance": self.uniform_distance,
        }
        return write_arrays(path, arrays)


@torch.no_grad()
def bias_maps(model: nn.Module, img_size: int | tuple[int, int] | None = None, stage: int = 0) -> BiasMaps | None:
    """Read the bias that every layer adds to its attention logits; with LaPE, after its norm.

    An encoding that depends on the queries, too (Shaw's, iRPE), has no such map; if it is combined with another one,
    the bias of the other is read. A layer with pooled queries or keys has no map either, nor has a layer with windows
    where others see the whole grid (SAM). Prefix tokens, which get no bias, are left out. In a language model the keys
    after a query are not seen.

    The model is not changed; it may be folded.

    Reference: LaPE's released code draws these for a relative bias, one picture per layer and head.

    Args:
        model: one of our backbones, or a language model.
        img_size: pixels, a side or (height, width); by default the size that the model is built for. Within windows
            the bias is that of the window that the model is built for.
        stage: of a pyramid, counted from 0.

    Returns:
        The maps; None if no layer has one.

    Raises:
        ValueError: if the model is not a backbone or has no such stage.
    """
    positions, grid, _ = positions_of(model, img_size, stage)
    found: dict[int, tuple[Tensor, list[int]]] = {}
    constants: dict[int, Tensor | None] = {}  # of a bias that layers share
    where = seen_in(model, grid, stage)
    layer = 0
    for (at, index, _, _), position in zip(layers_of(model, grid), positions, strict=True):
        if index != stage:
            continue
        held = position.bias
        if held is not None and at.within == where:
            if id(held) not in constants:
                constants[id(held)] = Bias.of(held).constant
            bias = constants[id(held)]
            if bias is not None and bias.shape[-2:] == (where.tokens, where.tokens):
                found.setdefault(id(bias), (bias, []))[1].append(layer)  # layers that share a bias share the tensor
        layer += 1
    if not found:
        return None
    start = where.tokens - where.patches
    each = np.stack([bias[:, start:, start:].cpu().double().numpy() for bias, _ in found.values()])
    if isinstance(model, LanguageModel):
        each[..., ~np.tri(where.patches, dtype=bool)] = np.nan
    each[np.isneginf(each)] = np.nan  # a mask
    return BiasMaps(replace(where, prefix=0).plane, tuple(tuple(group) for _, group in found.values()), each)


def _softmax(logits: Array) -> Array:
    """Return the softmax over the last axis; 0 where a logit is NaN."""
    weight = np.exp(logits - np.nanmax(logits, axis=-1, keepdims=True))
    shares: Array = np.nan_to_num(weight / np.nansum(weight, axis=-1, keepdims=True))
    return shares


def _span(values: Array, form: str, unit: str = "") -> str:
    least, most = f"{values.min():{form}}", f"{values.max():{form}}"
    return f"{least}{unit}" if least == most else f"{least} to {most}{unit}"
