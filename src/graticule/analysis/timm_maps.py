"""Position maps of a timm model: correlations of its table, biases of its heads, similarity under its rotation."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graticule.analysis.bias import BiasMaps
from graticule.analysis.correlations import Correlations
from graticule.analysis.rotary_similarity import correlations_of
from graticule.analysis.similarity import Array, cosine_similarity
from graticule.analysis.timm_position import Bias, Rotary, Table
from graticule.analysis.timm_view import TimmView
from graticule.grid import Grid


@torch.no_grad()
def timm_correlations(view: TimmView) -> Correlations | None:
    """Return the position correlations of a table that is added before the first block; None if there is none.

    Each layer sees the table through its own first norm, as in `position_correlations`.
    """
    tables = [part for part in view.parts if isinstance(part, Table) and not part.module]
    grids = view.grids(view.img_size)
    if len(tables) != 1 or len({grid.shape for grid in grids}) > 1:
        return None
    (part,), grid = tables, Grid(*grids[0].shape)
    held: Tensor = getattr(part.at(view.model), part.name).detach().flatten(1, -2)[0]
    if held.shape[0] < grid.patches:
        return None
    w = held[held.shape[0] - grid.patches :].double().cpu()
    norms = [getattr(block, "norm1", None) for block in view.blocks]
    if not all(isinstance(norm, nn.LayerNorm) for norm in norms):
        return None
    seen = [copy.deepcopy(norm).cpu().double()(w) for norm in norms if norm is not None]
    similarity = np.stack([cosine_similarity(one.numpy()) for one in seen])
    return Correlations(grid, similarity, ("stream",) * len(seen), cosine_similarity(w.numpy()))


@torch.no_grad()
def timm_bias_maps(view: TimmView) -> list[BiasMaps]:
    """Return the biases of attention, one entry for each size of window and number of heads."""
    found: dict[tuple[tuple[int, int], int], list[tuple[int, Array]]] = {}
    parts = [part for part in view.parts if isinstance(part, Bias)]
    for layer, block in enumerate(view.blocks):
        inside = {id(module) for module in block.modules()}
        for part in parts:
            holder = part.at(view.model)
            if id(holder) not in inside:
                continue
            values = _bias(holder).squeeze(0).double().cpu().numpy()
            shape: tuple[int, int] = tuple(holder.window_size)
            ahead = values.shape[-1] - math.prod(shape)
            found.setdefault((shape, len(values)), []).append((layer, values[:, ahead:, ahead:]))
    return [
        BiasMaps(Grid(*shape), tuple((layer,) for layer, _ in each), np.stack([values for _, values in each]))
        for (shape, _), each in found.items()
    ]


@torch.no_grad()
def timm_rotary(view: TimmView) -> Correlations | None:
    """Return the similarity under rotation of every layer, as `rotary_similarity` does; None without a rotation."""
    parts = [part for part in view.parts if isinstance(part, Rotary) and "." not in part.module]
    grids = view.grids(view.img_size)
    if len(parts) != 1 or len({grid.shape for grid in grids}) > 1:
        return None
    holder, grid = parts[0].at(view.model), Grid(*grids[0].shape)
    table: Tensor = holder.get_embed(shape=list(grid.shape)).double().cpu()
    if table.shape[-2] != grid.patches:
        return None
    per_layer = table if table.ndim == 4 else table.expand(len(grids), -1, -1)[:, None]  # (L, h, N, 2d)
    sines, cosines = per_layer.chunk(2, -1)
    both = torch.cat([sines, cosines], -1)
    layers: list[Array | None] = [(one @ one.mT / sines.shape[-1]).mean(0).numpy() for one in both]
    return correlations_of(layers, grid)


def _bias(holder: Any) -> Tensor:
    """Return the bias that an attention module of timm adds, (heads, n, n) or (1, heads, n, n)."""
    for name in ("get_bias", "_get_rel_pos_bias"):
        if hasattr(holder, name):
            found: Tensor = getattr(holder, name)()
            return found
    # Swin V2: 16 times the sigmoid of an MLP of the displacements
    values = holder.cpb_mlp(holder.relative_coords_table).flatten(0, -2)
    side = math.isqrt(holder.relative_position_index.numel())
    table: Tensor = 16 * values[holder.relative_position_index.flatten()].sigmoid()
    return table.view(side, side, -1).permute(2, 0, 1)
