"""Attention maps: the score matrices that `scaled_dot_product_attention` never writes down, on demand."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from graticule.backbones import Backbone
from graticule.checks import checked
from graticule.encodings import NoPosition
from graticule.files import write_bytes
from graticule.grid import Grid, Windows

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The attention weights of one layer: how much every query takes of every key.

    Args:
        layer: counted from 0 through all stages.
        weights: (B, heads, N, M), rows summing to 1. Where attention stays within windows, B counts windows.
        queries: grid of the N queries; with windows, that of a window.
        keys: grid of the M keys, which may be coarser.
    """

    layer: int
    weights: Array
    queries: Grid
    keys: Grid

    @property
    def num_heads(self) -> int:
        """How many heads."""
        return len(self.weights[0])

    def patches(self, head: int, image: int = 0) -> Array:
        """Return the weights between patches alone, (H * W, M'), as they are: rows sum to 1 less the prefix's."""
        return self.weights[image, head, self.queries.prefix :, self.keys.prefix :]

    def distance(self, head: int, image: int = 0) -> float:
        """Mean distance from a query patch to what it attends to, in patches of the queries' grid.

        Reference: An Image Is Worth 16x16 Words (Dosovitskiy et al., 2021), Figure 7, "attention distance".
        """
        scale = np.array(self.queries.shape) / np.array(self.keys.shape)
        here = self.queries.coordinates().double().numpy()
        there = (self.keys.coordinates().double().numpy() + 0.5) * scale - 0.5
        far = np.linalg.norm(here[:, None] - there[None], axis=-1)
        weights = self.patches(head, image)
        return float((weights * far).sum() / weights.sum())


@torch.no_grad()
@checked
def attention_maps(
    model: nn.Module, images: Tensor, layers: Sequence[int] | None = None, *, without_position: bool = False
) -> list[AttentionMap]:
    """Compute the attention weights of chosen layers of `model` on `images`.

    Training and inference go through `scaled_dot_product_attention` all the same: each chosen layer computes
    its weights once more, beside its forward pass.

    Reference: CPVT (Chu et al., 2023), Figures 5 and 6.

    Args:
        model: one of our backbones; it is left as it is, and looked at in evaluation mode.
        images: (B, C, height, width).
        layers: counted from 0 through all stages; all by default.
        without_position: look at the same weights without any position information.

    Raises:
        ValueError: if the model has no such layers.
    """
    attentions = _attentions(model) if isinstance(model, Backbone) else []
    if not isinstance(model, Backbone) or not attentions:
        raise ValueError(f"`model` must be one of our backbones with attention, got {type(model).__name__}.")
    chosen = list(range(len(attentions))) if layers is None else list(layers)
    for layer in chosen:
        if not 0 <= layer < len(attentions):
            raise ValueError(f"`layers` must be from 0 to {len(attentions) - 1}, got {layer}.")
    found: dict[int, tuple[Tensor, Grid | None]] = {}
    handles = [
        attentions[layer].register_forward_pre_hook(_keep(found, layer), with_kwargs=True) for layer in set(chosen)
    ]
    training = model.training
    model.eval()
    grids: list[Grid] = []
    try:
        with _without_position(model, len(attentions)) if without_position else nullcontext():
            grids = [grid for _, grid in model.each_layer(images)]
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return [_map(layer, *found[layer], grids[layer], attentions[layer]) for layer in chosen]


def _attentions(model: Backbone) -> list[nn.Module]:
    """Return the attention of every block, through all stages; that of a stem or a head is not between patches."""
    blocks = [model.block(stage, index) for stage, depth in enumerate(model.depths) for index in range(depth)]
    found = (getattr(block, "attn", None) for block in blocks)
    return [attention for attention in found if isinstance(attention, nn.Module)]


def _keep(found: dict[int, tuple[Tensor, Grid | None]], layer: int) -> Any:
    """Return a hook that keeps the weights of a layer, and the grid of its windows if it has some."""

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        window = next((given.window for given in args if isinstance(given, Windows)), None)
        found[layer] = module.weights(*args, **kwargs), window

    return hook


@contextmanager
def _without_position(model: Backbone, depth: int) -> Iterator[None]:
    """Remove the position information of all `depth` layers within the block."""
    position = model.position
    model.position = NoPosition(depth)
    try:
        yield
    finally:
        model.position = position


def _map(layer: int, weights: Tensor, window: Grid | None, grid: Grid, attention: nn.Module) -> AttentionMap:
    """Name the grids of queries and keys from what the layer is."""
    reduction: int = getattr(attention, "reduction", 1)
    queries = keys = grid if window is None else window
    if reduction > 1:
        keys = Grid(grid.height // reduction, grid.width // reduction)
    return AttentionMap(layer, weights.double().cpu().numpy(), queries, keys)


def save_attention(maps: Sequence[AttentionMap], path: str | Path) -> Path:
    """Write the weights of `maps` to `path` as .npz, one array per layer from `layer1` on; returns the path."""
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {f"layer{one.layer + 1}": one.weights for one in maps}
    np.savez_compressed(buffer, **arrays)
    return write_bytes(path, buffer.getvalue())
