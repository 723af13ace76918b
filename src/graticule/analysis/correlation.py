"""Position correlations: how similar any two positions are to each layer, and numbers that summarize it."""

from __future__ import annotations

import copy
import io
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from graticule.backbones import LanguageModel
from graticule.checks import checked
from graticule.encodings import AbsoluteEncoding
from graticule.files import write_bytes
from graticule.grid import Grid
from graticule.joining import Scale
from graticule.layer_position import LayerPosition

Array = NDArray[np.float64]

#: Columns of `Correlations.summary()`.
COLUMNS = ("layer", "sees", "locality (patches)", "of uniform", "two-dimensionality")

#: A range of localities is more than untrained models show below this p value.
_LEVEL = 0.05
#: Over so many places at most the locality of an untrained model is a mean.
_PLACES = 256


@dataclass(frozen=True, eq=False)
class Correlations:
    """The position correlations of every layer; layers are indexed from 0, and named from 1 in tables.

    Args:
        grid: where the tokens are; prefix tokens are left out of all arrays.
        similarity: (L, H * W, H * W), cosines; NaN for a layer that receives nothing.
        sources: what each layer sees of position: 'stream', 'inner', 'queries_keys', several joined by ' + ', or None.
        initial: (H * W, H * W), cosines of the table w itself; None where there is not just one table.
        untrained: (n,), `locality_range` of n untrained models of the same shape; None where there are none.
    """

    grid: Grid
    similarity: Array
    sources: tuple[str | None, ...]
    initial: Array | None = None
    untrained: Array | None = None

    def __post_init__(self) -> None:
        wanted = (len(self.sources), self.grid.patches, self.grid.patches)
        if self.similarity.shape != wanted:
            raise ValueError(f"`similarity` must be (L, H * W, H * W) = {wanted}, got {self.similarity.shape}.")
        if self.initial is not None and self.initial.shape != wanted[1:]:
            raise ValueError(f"`initial` must be (H * W, H * W) = {wanted[1:]}, got {self.initial.shape}.")

    @property
    def unit(self) -> str:
        """The unit of distances: patches, or tokens of a text."""
        return "tokens" if self.grid.height == 1 else "patches"

    @cached_property
    def center_maps(self) -> Array:
        """The row of the token at (H // 2, W // 2) laid out on the grid, (L, H, W).

        LaPE's figures take row 96 of a 14 x 14 grid, which they call the center; ours is row 105.
        """
        return self.similarity[:, self.grid.center].reshape(-1, *self.grid.shape)

    @cached_property
    def locality(self) -> Array:
        """`locality` of every layer, (L,), in patches."""
        return np.array([locality(s, self.grid) for s in self.similarity])

    @cached_property
    def uniform_distance(self) -> float:
        """The locality of a layer to which all positions are the same, in patches."""
        return locality(np.ones((self.grid.patches, self.grid.patches)), self.grid)

    @cached_property
    def two_dimensionality(self) -> Array:
        """`two_dimensionality` of every layer, (L,)."""
        return np.array([two_dimensionality(s, self.grid) for s in self.similarity])

    @cached_property
    def hierarchy(self) -> float:
        """Spearman's rank correlation of locality with depth, in [-1, 1]: 1 goes from local to global.

        Over the layers that get something, at least three; localities less than a thousandth of a patch
        apart count as the same, so that rounding makes no hierarchy. NaN where it is undefined: too few
        layers, or all the same. It is of ranks: it does not say how large the differences are, and differences of no
        size can reach 1, so read it beside `locality_range` and `p_value`, as `verdict` does.
        """
        depth = np.flatnonzero(np.isfinite(self.locality))
        values = self.locality[depth].round(3)
        if len(depth) < 3 or np.ptp(values) == 0:
            return float("nan")
        return float(stats.spearmanr(depth, values).statistic)

    @cached_property
    def locality_range(self) -> float:
        """The largest locality of a layer less the smallest, as a share of a uniform map's; NaN below two layers."""
        return _range(self.locality, self.uniform_distance)

    @cached_property
    def p_value(self) -> float:
        """The share of untrained models, this one counted with them, whose `locality_range` is as large or larger.

        With 39 untrained models it is at least 1 / 40. NaN where there are none, or no range.
        """
        if self.untrained is None or np.isnan(self.locality_range):
            return float("nan")
        as_large = (self.untrained >= self.locality_range - 1e-6).sum()  # below is the rounding of float32
        return float((1 + as_large) / (1 + len(self.untrained)))

    @property
    def verdict(self) -> str:
        """One line: how much locality differs over the layers, and whether untrained models explain it."""
        if np.isnan(self.locality_range):
            return "locality of fewer than two layers: nothing to compare"
        said = f"locality over the layers: a range of {100 * self.locality_range:.1f} % of a uniform map's"
        if self.untrained is None:
            return said
        if self.p_value >= _LEVEL:
            return f"{said}, within what untrained models show (p = {self.p_value:.2g})"
        said += f" (p = {self.p_value:.2g}, {len(self.untrained)} untrained models)"
        return said if np.isnan(self.hierarchy) else f"{said}, rank correlation with depth {self.hierarchy:+.2f}"

    def summary(self) -> list[tuple[str, ...]]:
        """Rows for a table: `COLUMNS`, the table w, every layer, and the uniform map."""
        rows: list[tuple[str, ...]] = [tuple(name.replace("patches", self.unit) for name in COLUMNS)]
        if self.initial is not None:
            numbers = locality(self.initial, self.grid), two_dimensionality(self.initial, self.grid)
            rows.append(self._row("w", "table", *numbers))
        for layer, source in enumerate(self.sources):
            numbers = self.locality[layer], self.two_dimensionality[layer]
            rows.append(self._row(str(layer + 1), source or "nothing", *numbers))
        return [*rows, self._row("uniform", "-", self.uniform_distance, float("nan"))]

    def _row(self, name: str, source: str, local: float, planar: float) -> tuple[str, ...]:
        share = 100 * local / self.uniform_distance if self.uniform_distance else float("nan")
        return name, source, _format(local, ".2f"), _format(share, ".0f", " %"), _format(planar, ".2f")

    def save(self, path: str | Path) -> Path:
        """Write all arrays and numbers to `path` as .npz, whole or not at all; returns the path."""
        arrays: dict[str, Any] = {
            "grid": np.array([self.grid.height, self.grid.width, self.grid.prefix]),
            "similarity": self.similarity,
            "sources": np.array([source or "" for source in self.sources], dtype=np.str_),
            "center_maps": self.center_maps,
            "locality": self.locality,
            "uniform_distance": self.uniform_distance,
            "two_dimensionality": self.two_dimensionality,
            "locality_range": self.locality_range,
            "p_value": self.p_value,
            "hierarchy": self.hierarchy,
        }
        for name in ("initial", "untrained"):
            if (array := getattr(self, name)) is not None:
                arrays[name] = array
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        return write_bytes(path, buffer.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Correlations:
        """Read what `save` wrote; no pickle is opened.

        Raises:
            ValueError: if the file is another one.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                height, width, prefix = (int(n) for n in arrays["grid"])
                sources = tuple(str(source) or None for source in arrays["sources"])
                further = arrays.get("initial"), arrays.get("untrained")
                return cls(Grid(height, width, prefix), arrays["similarity"], sources, *further)
        except (KeyError, AttributeError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"`path` must be a file that `Correlations.save` wrote, got {str(path)!r}.") from error


@torch.no_grad()
@checked
def position_correlations(
    model: nn.Module, img_size: int | tuple[int, int] | None = None, stage: int = 0, untrained: int = 0
) -> Correlations:
    r"""Compare what each layer's attention sees of position, place by place.

    .. math:: s_{i, j} = \frac{p_i \cdot p_j}{\|p_i\| \|p_j\|}

    with p the layer's view of position, (H * W, D), computed in float64 from the parameters as they are:

    - 'inner': what the layer adds to its normalized tokens (LaPE);
    - 'stream': LN_l(w), where w is the sum of the tables that entered the residual stream up to and including
      this layer, and LN_l the block's own `norm1`. By Eq. 6 attention sees
      :math:`\lambda_2 LN_l(w)`, :math:`\lambda_2 = \sigma_w / \sigma_{\tilde x + w}` (Eq. 7), which depends on
      the image. But it is one positive number a token, and a cosine does not feel the length of its vectors:
      it drops out. LN_l is taken whole, weight and bias: the paper splits a third term off for what beta is
      then too much, and its released code draws it so;
    - 'queries_keys': what a joining adds to the inputs of queries, and of keys, alone;
    - 'stream + inner' and so on, where a layer has several: their sum, with lambda_2 = 1, for here it would not drop
      out.

    Where a block has a norm on the residual stream itself (ViT-Lite, CVT, CCT), w passes through it. In a pyramid the
    layers of one stage are compared; what was on the residual stream before came through the patch mergings, as the
    tokens do.

    A layer that gets nothing (after eta with LaPE; encoding 'none') has no correlation, NaN. So has a
    token whose vector is zero. A conditional encoding combined with an absolute one is left out, and so is a relative
    bias, which `bias_maps` draws.

    **Untrained models.** Layers differ in locality before anything is learned, too, once their norms differ. So
    `untrained` models of the same shape are measured: learnable tables drawn as they start, and the weights and biases
    of all norms drawn about 1 and 0 with the standard deviation that those of the model have from there, one for each
    kind of norm. What patch mergings and fixed tables hold stays. Where the grid has more than 256 places, their
    localities are means over 256 drawn ones.

    A text is a grid of height 1: the places of a language model's context are compared.

    The model is left as it is, training mode included; it may be folded.

    Reference: LaPE (Yu et al., 2023), Eq. 6, 7 and 12, Figures 3 and 4.

    Args:
        model: one of our backbones, or a language model.
        img_size: pixels, a side or (height, width); by default the size that the model is built for.
        stage: counted from 0, of a pyramid.
        untrained: how many untrained models; 39 give p values down to 1 / 40.

    Raises:
        ValueError: if the model is no backbone or has no such stage, or has no absolute encoding but another, which
            gives no vectors.
    """
    if untrained < 0:
        raise ValueError(f"`untrained` must be at least 0, got {untrained}.")
    positions, grid, table = positions_of(model, img_size, stage)
    exact = copy.deepcopy(model).cpu().double().eval()
    here, seen = _seen(exact, positions, grid, stage, next(model.parameters()))
    absolute = any(seen) or any(
        p.pre is not None or p.inner is not None or p.queries_keys is not None for p in positions
    )
    if not absolute and any(value is not None for position in positions for value in position):
        raise ValueError(
            "`model` must have an absolute encoding (learnable, sinusoidal_1d or sinusoidal_2d, with any joining) "
            "to have position correlations, got one that gives its layers no vector per token; "
            "bias_maps draws a relative bias, translation_error measures any model, attention_maps shows attention, "
            "mixing_maps shows gated MLPs."
        )
    layers = np.stack([cosine_similarity(_total(parts.values(), here).numpy()) for parts in seen])
    sources = tuple(" + ".join(parts) or None for parts in seen)
    initial = None
    if table is not None and stage == 0:
        initial = cosine_similarity(_patches(table, here).numpy())
    several = sum(source is not None for source in sources) > 1
    ranges = _untrained_ranges(exact, grid, stage, untrained) if several and untrained else None
    return Correlations(here, layers, sources, initial, ranges)


def positions_of(
    model: nn.Module, img_size: int | tuple[int, int] | None, stage: int
) -> tuple[list[LayerPosition], Grid, Tensor | None]:
    """Return what each layer gets, the grid, and the one table w, if there is just one.

    Raises:
        ValueError: if the model is no backbone or has no such stage, or a language model is given an image size.
    """
    backbone: Any = model
    text = isinstance(model, LanguageModel)
    if not text and not all(hasattr(model, name) for name in ("position", "grid", "each_layer")):
        raise ValueError(f"`model` must be a backbone with a `position`, got {type(model).__name__}.")
    grid: Grid = backbone.grid
    if img_size is not None and text:
        raise ValueError(f"`img_size` must be left out with a language model, got {img_size}.")
    if img_size is not None:
        grid = backbone.grid_at((img_size, img_size) if isinstance(img_size, int) else img_size)
    stages = len(getattr(model, "depths", (1,)))
    if not 0 <= stage < stages:
        raise ValueError(f"`stage` must be from 0 to {stages - 1} in this {type(model).__name__}, got {stage}.")
    positions, table = _evaluate(backbone.position, grid)
    return positions, grid, table


def _seen(
    model: Any, positions: list[LayerPosition], grid: Grid, stage: int, like: Tensor
) -> tuple[Grid, list[dict[str, Tensor]]]:
    """Return the grid of a stage and what each of its layers sees of position, (H * W, D), by where it comes from.

    `positions` are in the dtype and on the device of `like`, and `model` is in float64 on the CPU.
    """
    stream: Tensor | None = None
    layers: list[dict[str, Tensor]] = []
    for (at, index, block, entered), position in zip(layers_of(model, grid), positions, strict=True):
        if entered is not None and stream is not None:
            stream = entered(stream)
        if position.pre is not None:
            patches = _patches(position.pre, at)
            stream = patches if stream is None else stream + patches
        if index == stage:
            here = at
            seen = {}
            if stream is not None:
                seen["stream"] = block.norm1(stream)
            if position.inner is not None:
                seen["inner"] = _patches(position.inner, at)
            if position.queries_keys is not None:
                seen["queries_keys"] = _patches(position.queries_keys, at)
            if position.inputs is not None:
                queries = _added_to_queries(position.inputs, at, like.new_zeros(1, at.tokens, len(block.norm1.weight)))
                if not torch.equal(queries, queries[:1].expand_as(queries)):  # all alike, as the bias of a PEG
                    seen["queries_keys"] = queries
            layers.append(seen)
        if stream is not None and (carried := getattr(block, "carried", None)) is not None:
            stream = carried(stream)
    return here, layers


def _added_to_queries(inputs: Callable[[Tensor], Any], grid: Grid, zeros: Tensor) -> Tensor:
    """Return what is added to the inputs of queries, (H * W, D): what they are for tokens that are zero, (1, N, D)."""
    return _patches(inputs(zeros)[0][0], grid)


def _untrained_ranges(model: Any, grid: Grid, stage: int, count: int) -> Array:
    """Return `locality_range` of `count` untrained models; `model`, in float64, is a copy that may be changed."""
    model.position = getattr(model.position, "original", model.position)  # of a folded one
    encodings = [module for module in model.position.modules() if isinstance(module, AbsoluteEncoding)]
    tables: list[Any] = [part for module in encodings for part in module.modules() if hasattr(part, "reset_parameters")]
    norms = _norms(model)
    found = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(count):
            for table in tables:
                table.reset_parameters()
            for parameter, start, deviation in norms:
                parameter.copy_(start + deviation * torch.randn_like(parameter))
            here, seen = _seen(model, model.position(grid), grid, stage, next(model.parameters()))
            everywhere = here.coordinates().double()
            places = torch.randperm(here.patches)[:_PLACES]
            distance = torch.cdist(everywhere[places], everywhere).numpy()
            units = [F.normalize(_total(parts.values(), here), dim=-1, eps=0) for parts in seen if parts]
            localities = np.array([mean_distance((unit[places] @ unit.T).numpy(), distance) for unit in units])
            found.append(_range(localities, float(distance.mean())))
    return np.array(found)


def _norms(model: nn.Module) -> list[tuple[nn.Parameter, float, Tensor]]:
    """List the parameters of norms with the value they start from and their deviation from it, by kind of norm."""
    kinds: dict[str, list[tuple[nn.Parameter, float]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm | Scale):
            for leaf, parameter in module.named_parameters(recurse=False):
                kind = re.sub(r"\d+", "*", f"{name}.{leaf}")
                kinds.setdefault(kind, []).append((parameter, 1.0 if leaf == "weight" else 0.0))
    found = []
    for members in kinds.values():
        deviation = torch.cat([parameter.flatten() - start for parameter, start in members]).square().mean().sqrt()
        found += [(parameter, start, deviation) for parameter, start in members]
    return found


def layers_of(model: Any, grid: Grid) -> Iterator[tuple[Grid, int, Any, Callable[[Tensor], Tensor] | None]]:
    """Yield the grid, stage and block of every layer, and what w goes through as it enters its stage.

    A block that pools its tokens belongs to the stage of those that enter it.
    """
    if not hasattr(model, "depths"):
        for block in model.blocks:
            yield grid, 0, block, None
        return
    grids = model.position_grids(grid)
    blocks = (model.block(stage, index) for stage, depth in enumerate(model.depths) for index in range(depth))
    before = 0
    for stage, block, at in zip(model.entered_stages(), blocks, model.layer_grids(grid), strict=True):
        patches = Grid(*grids[before].shape)  # of which w is without rows for prefix tokens
        enter = partial(model.merge_table, stage, grid=patches) if stage > before else None
        yield at, stage, block, enter
        before = stage


def seen_in(model: Any, grid: Grid, stage: int) -> Grid:
    """Return the grid within which the tokens of a stage see each other; the largest, if it differs between layers."""
    return max((at.within for at, index, _, _ in layers_of(model, grid) if index == stage), key=lambda at: at.patches)


def _evaluate(position: nn.Module, grid: Grid) -> tuple[list[LayerPosition], Tensor | None]:
    """Return what each layer gets and the one table w, if there is one, out of training mode, which is put back."""
    modes = [(module, module.training) for module in position.modules()]
    position.eval()
    try:
        encodings = [module for module in position.modules() if isinstance(module, AbsoluteEncoding)]
        return position(grid), encodings[0](grid) if len(encodings) == 1 else None
    finally:
        for module, training in modes:
            module.training = training


def _patches(table: Tensor, grid: Grid) -> Tensor:
    """Take the patches' rows of a table (N, D), in float64 on the CPU, (H * W, D)."""
    return grid.split(table.detach().cpu().double())[1]


def _total(parts: Iterable[Tensor], grid: Grid) -> Tensor:
    return sum(parts, torch.zeros(grid.patches, 1, dtype=torch.float64))


def cosine_similarity(vectors: Array) -> Array:
    """Cosine of every pair of rows, (N, D) -> (N, N); NaN for a row of zeros, which has no direction."""
    with np.errstate(invalid="ignore", divide="ignore"):
        unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    cosines: Array = np.clip(unit @ unit.T, -1, 1)
    return cosines


def locality(similarity: Array, grid: Grid) -> float:
    r"""Mean distance that a token looks over, in patches, if it looks where the cosines are positive.

    .. math:: \frac{1}{N} \sum_i \frac{\sum_j \max(s_{ij}, 0)\, \|p_i - p_j\|}{\sum_j \max(s_{ij}, 0)}

    over all j, i itself included: so it is 0 where every token is like itself alone, and the denominator is
    never below 1.

    Args:
        similarity: (H * W, H * W).
        grid: where the tokens are.
    """
    return mean_distance(similarity, grid.distances().double().numpy())


def mean_distance(similarity: Array, distance: Array) -> float:
    """Return the mean of `distance` (n, m) under the positive part of `similarity` (n, m), mean over rows."""
    weight = np.maximum(similarity, 0)
    return float(((weight * distance).sum(-1) / weight.sum(-1)).mean())


def _range(localities: Array, uniform: float) -> float:
    """The largest less the smallest, as a share of `uniform`; NaN below two."""
    finite = localities[np.isfinite(localities)]
    return float(np.ptp(finite)) / uniform if len(finite) > 1 and uniform else float("nan")


def two_dimensionality(similarity: Array, grid: Grid) -> float:
    r"""How alike the two axes are to this encoding: 1 if vertical neighbors count as much as horizontal ones.

    .. math:: \min(v, h) / \max(v, h), \quad v = \max(\bar s_{\Delta = (1, 0)} - \bar s, 0), \quad
              h = \max(\bar s_{\Delta = (0, 1)} - \bar s, 0)

    v and h say how much the mean cosine of neighbors exceeds the mean over all pairs of different tokens.
    In [0, 1]; 0 where one axis alone is known, as with a sequence in row-major order. NaN where neither
    axis has anything (all places alike, or all equally unlike), or the grid has only one axis. On a table without any
    structure, such as a learnable one before training, it is a ratio of noise.

    Args:
        similarity: (H * W, H * W).
        grid: where the tokens are.
    """
    if min(grid.shape) < 2:
        return float("nan")
    dy, dx = grid.offsets().numpy().transpose(2, 0, 1)
    mean = similarity[(dy != 0) | (dx != 0)].mean()
    vertical = max(similarity[(dy == 1) & (dx == 0)].mean() - mean, 0.0)
    horizontal = max(similarity[(dy == 0) & (dx == 1)].mean() - mean, 0.0)
    least, most = sorted((vertical, horizontal))
    return float(least / most) if most > 1e-9 else float("nan")  # below is rounding


def _format(value: float, form: str, unit: str = "") -> str:
    return "-" if np.isnan(value) else f"{value:{form}}{unit}"
