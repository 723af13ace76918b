"""All maps of position information of a model: correlations, similarity under rotation, and biases, by stage."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graticule.analysis.bias import BiasMaps, bias_maps
from graticule.analysis.correlation import position_correlations
from graticule.analysis.rotary_similarity import correlations_of, rotary_similarity
from graticule.analysis.similarity import Array, Correlations, cosine_similarity
from graticule.backbones.token_model import TokenModel
from graticule.encodings.forms.absolute import AbsoluteEncoding
from graticule.external.debiased import Debiased
from graticule.external.open_view import view_of
from graticule.external.timm_position import Bias, Rotary, Table
from graticule.external.timm_view import TimmView
from graticule.external.view import Size
from graticule.position.grid import Grid


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


@dataclass(frozen=True, eq=False)
class StageMaps:
    """The maps of one stage; None for a kind that it does not have.

    correlations: of the tables as each layer sees them.
    rotary: similarity under the rotation of queries and keys alone.
    biases: of attention.
    """

    correlations: Correlations | None = None
    rotary: Correlations | None = None
    biases: BiasMaps | None = None


def position_maps(model: nn.Module, img_size: Size | None = None, untrained: int = 0) -> list[StageMaps]:
    """Compute all maps of position information of a model, one entry for each stage.

    Args:
        model: one of our backbones, a language model, or a model of timm.
        img_size: (height, width) in pixels; by default the size that the model is built for.
        untrained: number of untrained models that correlations are compared with.

    Raises:
        ValueError: if there is no map of any kind, the position is attached, or the size is refused.
    """
    if isinstance(model, Debiased):
        model = model.backbone
    if isinstance(getattr(model, "graticule", None), nn.Module):
        raise ValueError(
            f"`model` must have no attached position for position maps, got {type(model).__name__}, which has one; "
            "translation_error measures any model, attention_maps shows attention."
        )
    if not isinstance(model, TokenModel):
        view = view_of(model)
        assert isinstance(view, TimmView)
        found = _of_timm(view if img_size is None else view.sized(img_size))
    else:
        found = _of_backbone(model, img_size, untrained)
    if not any(one.correlations or one.rotary or one.biases for one in found):
        raise ValueError(
            f"`model` must have a table, a rotation or a bias of positions, got {type(model).__name__}, which has none "
            "that is known; translation_error measures any model, attention_maps shows attention."
        )
    return found


def _of_backbone(model: TokenModel, img_size: Size | None, untrained: int) -> list[StageMaps]:
    stages = range(len(getattr(model, "depths", (1,))))
    biases = [bias_maps(model, img_size, stage) for stage in stages]
    rotary = [rotary_similarity(model, img_size, stage) for stage in stages]
    tables = any(isinstance(module, AbsoluteEncoding) for module in model.modules())
    drawn = tables or not any(one is not None for one in (*biases, *rotary))
    return [
        StageMaps(
            position_correlations(model, img_size, stage, untrained) if drawn else None, rotary[stage], biases[stage]
        )
        for stage in stages
    ]


def _of_timm(view: TimmView) -> list[StageMaps]:
    biases = timm_bias_maps(view)
    first = StageMaps(timm_correlations(view), timm_rotary(view), biases[0] if biases else None)
    return [first, *(StageMaps(biases=one) for one in biases[1:])]
