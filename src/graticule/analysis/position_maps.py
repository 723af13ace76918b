"""All maps of position information of a model: correlations, similarity under rotation, and biases, by stage."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.analysis.correlation import layers_of, position_correlations, positions_of, seen_in
from graticule.analysis.similarity import Array, Correlations, cosine_similarity, mean_distance
from graticule.backbones.language import LanguageModel
from graticule.backbones.token_model import TokenModel
from graticule.encodings.forms.absolute import AbsoluteEncoding
from graticule.external.debiased import Debiased
from graticule.external.images import Size, image_size, window_of
from graticule.external.structure import PositionSite, Structure
from graticule.external.traced_model import TracedModel
from graticule.position.bias import Bias
from graticule.position.grid import Grid
from graticule.registry.checks import checked
from graticule.system.files import write_arrays
from graticule.system.tables import PrintedTable

#: Columns of `BiasMaps.summary()`.
COLUMNS = ("layers", "spread", "reach (patches)", "of uniform")


@dataclass(frozen=True, eq=False)
class BiasMaps(PrintedTable):
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
        return np.nanstd(self.bias, axis=-1).mean(-1)

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
            **{name: getattr(self, name) for name in ("bias", "spread", "reach", "uniform_distance")},
        }
        return write_arrays(path, arrays)


@torch.no_grad()
def bias_maps(model: nn.Module, img_size: int | tuple[int, ...] | None = None, stage: int = 0) -> BiasMaps | None:
    """Read the bias that every layer adds to its attention logits; with LaPE, after its norm.

    An encoding that depends on the queries, too (Shaw's, iRPE), has no such map; if it is combined with another one,
    the bias of the other is read. A layer with pooled queries or keys has no map either, nor has a layer with windows
    where others see the whole grid (SAM). Prefix tokens, which get no bias, are left out. In a language model the keys
    after a query are not seen.

    The model is not changed; it may be folded.

    Reference: LaPE's released code draws these for a relative bias, one picture per layer and head.

    The arguments are those of `position_correlations`. Within windows the bias is that of the window that
    the model is built for.

    Returns:
        The maps; None if no layer has one.
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
    return np.nan_to_num(weight / np.nansum(weight, axis=-1, keepdims=True))


def _span(values: Array, form: str, unit: str = "") -> str:
    least, most = f"{values.min():{form}}", f"{values.max():{form}}"
    return f"{least}{unit}" if least == most else f"{least} to {most}{unit}"


@torch.no_grad()
@checked
def rotary_similarity(
    model: nn.Module, img_size: int | tuple[int, ...] | None = None, stage: int = 0
) -> Correlations | None:
    r"""Compare all pairs of positions by the rotations that a layer applies to the same query and key.

    .. math:: s_{i, j} = \frac{1}{d} \sum_k (R_i e_k) \cdot (R_j e_k)

    over the d channels of a head, mean over the heads: for pairs of channels that is the mean cosine of the angles
    between i and j. Magnitudes (PoPE) are assumed to be all the same.

    The arguments are those of `position_correlations`.

    Returns:
        The similarities of every layer; NaN for a layer without rotation, with pooled queries or keys, or with windows
        where others see the whole grid. None if there are no other layers.
    """
    positions, grid, _ = positions_of(model, img_size, stage)
    layers: list[Array | None] = []
    where, device = seen_in(model, grid, stage), next(model.parameters()).device
    for (at, index, block, _), position in zip(layers_of(model, grid), positions, strict=True):
        if index == stage:
            rotary = position.rotary if at.within == where and not _pools(block, at) else None
            if rotary is None:
                layers.append(None)
            else:
                layers.append(similarity_of(rotary, where, cast("Any", block).attn.head_dim, device))
    return correlations_of(layers, where)


def _pools(block: nn.Module, grid: Grid) -> bool:
    """Return whether the queries or keys of a layer are not the tokens of `grid`."""
    seen_grids = getattr(getattr(block, "attn", None), "seen_grids", None)
    return bool(seen_grids is not None and seen_grids(grid) != (grid, grid))


def similarity_of(rotary: Any, grid: Grid, head_dim: int, device: torch.device | None = None) -> Array:
    """Return the similarity of the patches under a rotation on `device`, mean over heads, (H * W, H * W)."""
    if rotary.channels is None:
        basis = torch.eye(head_dim, device=device)[:, None, None].expand(-1, 1, grid.tokens, -1)  # (d, 1, N, d)
    else:
        basis = torch.zeros(1, 1, grid.tokens, head_dim, device=device)
    queries, keys = rotary(basis, basis)
    queries, keys = (_patch_vectors(x, grid) for x in (queries, keys))
    return (queries @ keys.mT).mean(0).cpu().numpy()


def correlations_of(layers: list[Array | None], grid: Grid) -> Correlations | None:
    """Return the similarities of every layer; None if no layer has any."""
    if all(layer is None for layer in layers):
        return None
    nothing = np.full((grid.patches, grid.patches), np.nan)
    similarity = np.stack([nothing if layer is None else layer for layer in layers])
    return Correlations(
        replace(grid, prefix=0).plane, similarity, tuple(None if one is None else "rotation" for one in layers)
    )


def _patch_vectors(x: Tensor, grid: Grid) -> Tensor:
    """Return (k, h, N, d) as one unit vector per head and patch, (h, H * W, k * d), in float64."""
    vectors = grid.split(x.double())[1].permute(1, 2, 0, 3).flatten(2)
    return nn.functional.normalize(vectors, dim=-1)


@torch.no_grad()
def table_correlations(found: Structure) -> Correlations | None:
    """Return the position correlations of a table that is added before the first block; None if there is none.

    Each layer of the first grid sees the table through the norm of its own input, as in `position_correlations`.
    """
    tables = [site for site in found.of_kind("absolute table") if site.layer is None]
    norms = [norm for norm, grid in zip(found.norms, found.grids, strict=True) if grid.shape == found.grid.shape]
    if len(tables) != 1 or None in norms:
        return None
    grid, (site,) = Grid(*found.grid.shape), tables
    rows = site.rows()[-grid.patches :]
    if len(rows) < grid.patches:
        return None
    w = rows.double().cpu()
    known = [norm for norm in norms if norm is not None]
    seen = [F.layer_norm(w, w.shape[-1:], _double(a), _double(b), eps) for a, b, eps in known]
    similarity = np.stack([cosine_similarity(one.numpy()) for one in seen])
    return Correlations(grid, similarity, ("stream",) * len(seen), cosine_similarity(w.numpy()))


@torch.no_grad()
def logit_biases(found: Structure) -> list[BiasMaps]:
    """Return the biases of attention, one entry for each size of window and number of heads."""
    each: dict[tuple[tuple[int, ...], int], dict[int, Array]] = {}
    blocks = found.modules()
    for site in found.of_kind("bias of displacements"):
        if site.layer is None or site.constant is None:
            continue
        values = (
            site.constant.reshape(-1, *site.constant.shape[-3:])[0] if site.constant.ndim > 2 else site.constant[None]
        )
        grid, tokens = found.grids[site.layer], values.shape[-1]
        ahead = found.ahead(tokens)
        shape = grid.shape if tokens == grid.tokens else window_of(blocks[site.layer]) or (math.isqrt(tokens),) * 2
        if math.prod(shape) == tokens - ahead and values.shape[-2] == tokens:
            maps = each.setdefault((shape, len(values)), {})
            maps.setdefault(site.layer, values[:, ahead:, ahead:].double().cpu().numpy())
    return [
        BiasMaps(Grid(*shape), tuple((layer,) for layer in maps), np.stack(list(maps.values())))
        for (shape, _), maps in each.items()
    ]


@torch.no_grad()
def rotation_similarity(found: Structure) -> Correlations | None:
    """Return the similarity under rotation of every layer, as `rotary_similarity` does; None without a rotation."""
    if len({grid.shape for grid in found.grids}) > 1:
        return None
    grid = Grid(*found.grid.shape)
    layers: list[Array | None] = []
    for layer in range(len(found.grids)):
        sites = [site for site in found.of_kind("rotary") if site.layer == layer and site.constant is not None]
        factors = [next((site for site in sites if site.sine is sine), None) for sine in (True, False)]
        rows = [_heads(site, grid) for site in factors if site is not None]
        if len(rows) != 2 or any(one is None for one in rows):
            return None
        both = torch.cat([one for one in rows if one is not None], -1)
        layers.append((both @ both.mT * 2 / both.shape[-1]).mean(0).numpy())
    return correlations_of(layers, grid)


def _heads(site: PositionSite, grid: Grid) -> Tensor | None:
    """Return the factors of a rotation for the patches, (h, H * W, d); None if there are fewer rows."""
    assert site.constant is not None
    values = site.constant.movedim(site.axes[0], -2).double().cpu()[..., -grid.patches :, :]
    return values.reshape(-1, *values.shape[-2:]) if values.shape[-2] == grid.patches else None


def _double(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().cpu().double()


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
    """
    if isinstance(model, Debiased):
        model = model.backbone
    if isinstance(getattr(model, "graticule", None), nn.Module):
        raise ValueError(
            f"`model` must have no attached position for position maps, got {type(model).__name__}, which has one; "
            "translation_error measures any model, attention_maps shows attention."
        )
    if not isinstance(model, TokenModel):
        view = TracedModel(model, image_size(model) or img_size)
        found = _of_structure((view.resized_to(img_size) if img_size else view).structure)
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


def _of_structure(found: Structure) -> list[StageMaps]:
    biases = logit_biases(found)
    first = StageMaps(table_correlations(found), rotation_similarity(found), biases[0] if biases else None)
    return [first, *(StageMaps(biases=one) for one in biases[1:])]
