"""The layers and heads that get position information: all, or chosen ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from graticule.layer_position import LayerPosition

#: The joined layers: an int for the first ones, indices for any, None for all.
Layers = int | Sequence[int] | None


def joined_layers(depth: int, layers: Layers) -> tuple[int, ...]:
    """Return the indices of the layers that are joined, in order.

    Raises:
        ValueError: if a layer does not exist, or is named twice.
    """
    if layers is None or isinstance(layers, int):
        count = depth if layers is None else layers
        if not 1 <= count <= depth:
            raise ValueError(f"`layers` must be from 1 to the depth of the model, {depth}, got {layers}.")
        return tuple(range(count))
    if not layers or len(set(layers)) < len(layers) or min(layers) < 0 or max(layers) >= depth:
        raise ValueError(
            f"`layers` must be a number of layers, or different layers from 0 to {depth - 1}, at least one, got "
            f"{list(layers)}."
        )
    return tuple(sorted(layers))


def spread(given: Iterable[LayerPosition], layers: Sequence[int], depth: int) -> list[LayerPosition]:
    """Assign positions to the joined layers, in order, and empty ones to the others."""
    found = [LayerPosition()] * depth
    for layer, position in zip(layers, given, strict=False):
        found[layer] = position
    return found


def chosen_heads(num_heads: int, heads: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the chosen heads, in order.

    Raises:
        ValueError: if a head does not exist, or is named twice.
    """
    if not heads or len(set(heads)) < len(heads) or min(heads) < 0 or max(heads) >= num_heads:
        raise ValueError(f"`heads` must be different heads from 0 to {num_heads - 1}, at least one, got {list(heads)}.")
    return tuple(sorted(heads))


def spread_heads(values: Tensor, heads: Sequence[int], num_heads: int, dim: int = 0, rest: float = 0.0) -> Tensor:
    """Assign values to the chosen heads along the axis `dim`, in order, and the number `rest` to the others."""
    shape = list(values.shape)
    shape[dim] = num_heads
    index = torch.tensor(heads, device=values.device)
    return torch.full(shape, rest, dtype=values.dtype, device=values.device).index_copy(dim, index, values)


class PerLayer(nn.ModuleList):
    """One module per joined layer, under the index of the layer: `norms.4` belongs to layer 4."""

    def __init__(self, modules: Iterable[nn.Module], layers: Sequence[int]) -> None:
        super().__init__()
        for layer, module in zip(layers, modules, strict=True):
            self.add_module(str(layer), module)
