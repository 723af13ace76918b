"""All maps of position information of a model: correlations, similarity under rotation, and biases, by stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.analysis.correlation import layers_of_stage, position_correlations
from graticule.analysis.similarity import Array, Correlations, cosine_similarity, mean_distance
from graticule.backbones.language import LanguageModel
from graticule.backbones.token_model import TokenModel
from graticule.encodings.forms.absolute import AbsoluteEncoding
from graticule.external.debiased import Debiased
from graticule.external.images import Size, image_size, window_of
from graticule.external.structure import Structure
from graticule.external.traced_model import TracedModel
from graticule.position.bias import Bias
from graticule.position.grid import Grid
from graticule.registry.checks import checked
from graticule.system.files import write_arrays
from graticule.system.tables import PrintedTable

#: Columns of `BiasMaps.summary()`.
COLUMNS = ("layers", "spread", "reach (patches)", "of uniform")


@dataclass(frozen=True, eq=False, repr=False)
class BiasMaps(PrintedTable):
    """The biases that the layers of a model, or of one stage, add to their attention logits.

    Args:
        grid: the grid of the tokens, or of a window if attention is within windows; without prefix tokens.
        layers: for every map, the layers that have this bias, counted from 0; more than one if they share it.
        bias: (maps, heads, H * W, H * W), rows are queries; NaN where a key is not seen.
    """

    grid: Grid
    layers: tuple[tuple[int, ...], ...]
    bias: Array

    def __post_init__(self) -> None:
        tokens = self.grid.patches
        if self.bias.ndim != 4 or self.bias.shape[::2] != (len(self.layers), tokens) or self.bias.shape[3] != tokens:
            expected = f"({len(self.layers)}, heads, {tokens}, {tokens})"
            raise ValueError(f"`bias` must be (maps, heads, H * W, H * W) = {expected}, got {self.bias.shape}.")

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
        return np.array([[mean_distance(_softmax(head), distance) for head in heads] for heads in self.bias])

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

    Reference: LaPE's released code draws these for a relative bias, one figure per layer and head.

    It takes the arguments of `position_correlations`. Within windows the bias belongs to the window that
    the model is built for.

    Returns:
        The maps; None if no layer has one.
    """
    grid, layers = layers_of_stage(model, img_size, stage)
    # of a bias that layers share; layers that share a constant share the tensor
    constants = {
        id(position.bias): Bias.of(position.bias).constant for _, position in layers if position.bias is not None
    }
    biases = {layer: constants.get(id(position.bias)) for layer, (_, position) in enumerate(layers)}
    pairs = (grid.tokens, grid.tokens)
    known = {layer: bias for layer, bias in biases.items() if bias is not None and bias.shape[-2:] == pairs}
    return _bias_maps(known, grid, causal=isinstance(model, LanguageModel)) if known else None


def _bias_maps(biases: Mapping[int, Tensor], grid: Grid, causal: bool = False) -> BiasMaps:
    """Return the maps of the biases (heads, N, N) of layers; layers that share a tensor share a map."""
    groups: dict[int, list[int]] = {}
    for layer, bias in biases.items():
        groups.setdefault(id(bias), []).append(layer)
    ahead = grid.tokens - grid.patches
    maps = np.stack([biases[layers[0]][:, ahead:, ahead:].cpu().double().numpy() for layers in groups.values()])
    if causal:
        maps[..., ~np.tri(grid.patches, dtype=bool)] = np.nan
    maps[np.isneginf(maps)] = np.nan  # a mask
    return BiasMaps(replace(grid, prefix=0).plane, tuple(map(tuple, groups.values())), maps)


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

    It takes the arguments of `position_correlations`.

    Returns:
        The similarities of every layer; NaN for a layer without rotation, or with windows where others see the whole
        grid. None if there are no other layers.
    """
    grid, layers = layers_of_stage(model, img_size, stage)
    device = next(model.parameters()).device
    rotations = [(position.rotary, block) for block, position in layers]
    return correlations_of(
        [
            None if rotary is None else similarity_of(rotary, grid, block.attn.head_dim, device)
            for rotary, block in rotations
        ],
        grid,
    )


def similarity_of(rotary: Any, grid: Grid, head_dim: int, device: torch.device | None = None) -> Array:
    """Return the similarity of the patches under a rotation on `device`, mean over heads, (H * W, H * W)."""
    if rotary.channels is None:
        basis = torch.eye(head_dim, device=device)[:, None, None].expand(-1, 1, grid.tokens, -1)  # (d, 1, N, d)
    else:
        basis = torch.zeros(1, 1, grid.tokens, head_dim, device=device)
    # one unit vector for each head and patch, (h, H * W, k * d)
    vectors = (grid.split(x.double())[1].permute(1, 2, 0, 3).flatten(2) for x in rotary(basis, basis))
    queries, keys = (F.normalize(x, dim=-1) for x in vectors)
    return (queries @ keys.mT).mean(0).cpu().numpy()


def correlations_of(layers: list[Array | None], grid: Grid) -> Correlations | None:
    """Return the similarities of every layer; None if no layer has any."""
    if all(layer is None for layer in layers):
        return None
    nothing = np.full((grid.patches, grid.patches), np.nan)
    similarity = np.stack([nothing if layer is None else layer for layer in layers])
    sources = tuple(None if layer is None else "rotation" for layer in layers)
    return Correlations(replace(grid, prefix=0).plane, similarity, sources)


def _table_of_structure(structure: Structure) -> Correlations | None:
    """Return the position correlations of a table that is added before the first block; None if there is none.

    Each layer of the first grid sees the table through the norm of its own input, as in `position_correlations`.
    """
    tables = [site for site in structure.of_kind("absolute table") if site.layer is None]
    grid = Grid(*structure.grid.shape)
    norms = [norm for norm, at in zip(structure.norms, structure.grids, strict=True) if at.shape == grid.shape]
    if len(tables) != 1 or None in norms or len(tables[0].rows()) < grid.patches:
        return None
    w = tables[0].rows()[-grid.patches :].double().cpu()
    similarity = []
    for weight, bias, eps in filter(None, norms):
        scale, shift = (None if value is None else value.detach().cpu().double() for value in (weight, bias))
        similarity.append(cosine_similarity(F.layer_norm(w, w.shape[-1:], scale, shift, eps).numpy()))
    return Correlations(grid, np.stack(similarity), ("stream",) * len(norms), cosine_similarity(w.numpy()))


def _biases_of_structure(structure: Structure) -> list[BiasMaps]:
    """Return the biases of attention, one entry for each size of window and number of heads."""
    groups: dict[tuple[Grid, int], dict[int, Tensor]] = {}
    blocks = structure.modules()
    for site in structure.of_kind("bias of displacements"):
        if site.layer is None or site.constant is None:
            continue
        bias = (
            site.constant.reshape(-1, *site.constant.shape[-3:])[0] if site.constant.ndim > 2 else site.constant[None]
        )
        grid, tokens = structure.grids[site.layer], bias.shape[-1]
        ahead = structure.ahead(tokens)
        shape = grid.shape if tokens == grid.tokens else window_of(blocks[site.layer]) or (math.isqrt(tokens),) * 2
        if math.prod(shape) == tokens - ahead and bias.shape[-2] == tokens:
            groups.setdefault((Grid(*shape, prefix=ahead), len(bias)), {}).setdefault(site.layer, bias)
    return [_bias_maps(biases, grid) for (grid, _), biases in groups.items()]


def _rotation_of_structure(structure: Structure) -> Correlations | None:
    """Return the similarity under rotation of every layer, as `rotary_similarity` does; None without a rotation."""
    grid = Grid(*structure.grid.shape)
    layers: list[Array | None] = []
    for layer, at in enumerate(structure.grids):
        sites = [site for site in structure.of_kind("rotary") if site.layer == layer and site.constant is not None]
        factors = {site.sine: site.heads().double().cpu()[:, -grid.patches :] for site in reversed(sites)}
        if at.shape != grid.shape or len(factors) < 2 or any(x.shape[1] < grid.patches for x in factors.values()):
            return None
        both = torch.cat([factors[True], factors[False]], -1)
        layers.append((both @ both.mT * 2 / both.shape[-1]).mean(0).numpy())
    return correlations_of(layers, grid)


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


@torch.no_grad()
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
    if isinstance(model, TokenModel):
        stages = range(len(getattr(model, "depths", (1,))))
        biases = [bias_maps(model, img_size, stage) for stage in stages]
        rotary = [rotary_similarity(model, img_size, stage) for stage in stages]
        tables = any(isinstance(module, AbsoluteEncoding) for module in model.modules())
        draw_tables = tables or not any(maps is not None for maps in (*biases, *rotary))
        stage_correlations = [
            position_correlations(model, img_size, stage, untrained) if draw_tables else None for stage in stages
        ]
        maps = [StageMaps(*parts) for parts in zip(stage_correlations, rotary, biases, strict=True)]
    else:
        view = TracedModel(model, image_size(model) or img_size)
        structure = (view.resized_to(img_size) if img_size else view).structure
        biases = [*_biases_of_structure(structure)] or [None]
        maps = [StageMaps(biases=group) for group in biases]
        maps[0] = replace(
            maps[0], correlations=_table_of_structure(structure), rotary=_rotation_of_structure(structure)
        )
    if not any(stage.correlations or stage.rotary or stage.biases for stage in maps):
        raise ValueError(
            f"`model` must have a table, a rotation or a bias of positions, got {type(model).__name__}, which has none "
            "that is known; translation_error measures any model, attention_maps shows attention."
        )
    return maps
