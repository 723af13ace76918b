"""Position as each layer of a model sees it: the similarity of any two positions, and its share in a layer's norm."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.analysis.similarity import Array, Correlations, cosine_similarity, mean_distance, range_of
from graticule.backbones.base import Backbone
from graticule.backbones.language import LanguageModel
from graticule.backbones.token_model import TokenModel
from graticule.encodings.forms.absolute import AbsoluteEncoding
from graticule.external.images import evaluating
from graticule.position.grid import Grid
from graticule.position.joining import TableScale
from graticule.position.layer import LayerPosition
from graticule.registry.checks import checked
from graticule.surgery.fits.contributions import is_pre_norm

#: Maximum number of positions that the reach of an untrained model is averaged over.
_PLACES = 256


@torch.no_grad()
@checked
def position_correlations(
    model: nn.Module, img_size: int | tuple[int, ...] | None = None, stage: int = 0, untrained: int = 0
) -> Correlations:
    r"""Compare all pairs of positions as each layer's attention sees them.

    .. math:: s_{i, j} = \frac{p_i \cdot p_j}{\|p_i\| \|p_j\|}

    with p the position as the layer sees it, (H * W, D), computed in float64 from the current parameters:

    - 'after_norm': what the layer adds to its normalized tokens (LaPE);
    - 'stream': LN_l(w), where w is the sum of the tables that entered the residual stream up to and including
      this layer, and LN_l the block's own `norm1`. By Eq. 6 attention sees
      :math:`\lambda_2 LN_l(w)`, :math:`\lambda_2 = \sigma_w / \sigma_{\tilde x + w}` (Eq. 7), which depends on
      the image (`norm_coefficients`). But it is one positive number per token, and a cosine does not depend on the
      length of its vectors: it drops out. LN_l includes its weight and bias, as in the paper's
      released code; the paper splits the excess of beta off as a third term;
    - 'queries_keys': what a joining adds to the inputs of queries and keys alone;
    - 'stream + after_norm' and so on, for a layer with several of them: their sum, with lambda_2 = 1, which would not
      drop out here.

    If a block has a norm on the residual stream itself (ViT-Lite, CVT, CCT), w passes through it. In a pyramid the
    layers of one stage are compared; the tables of earlier stages pass through the patch mergings, as the tokens do.

    A layer that receives no position (after eta with LaPE; encoding 'none') has no correlation, NaN, and neither has a
    token whose vector is zero. A conditional encoding combined with an absolute one is left out, and so is a relative
    bias, which `bias_maps` draws.

    **Untrained models.** The reaches of layers differ even before training, once their norms differ. So
    `untrained` models of the same shape are measured: learnable tables are initialized anew, and the weights and biases
    of all norms are drawn around 1 and 0, with the root mean square deviation that the model's values have from these
    values, one for each kind of norm. Patch mergings and fixed tables are not changed. If the grid has more than 256
    positions, these reaches are means over 256 random ones.

    A text is drawn as one row: the positions of a language model's context are compared.

    The model is not changed, including its training mode; it may be folded.

    Reference: LaPE (Yu et al., 2023), Eq. 6, 7 and 12, Figures 3 and 4.

    Args:
        model: one of our backbones, or a language model.
        img_size: pixels, a side, (height, width) or (depth, height, width); by default the size that the model
            is built for.
        stage: of a pyramid, counted from 0.
        untrained: number of untrained models; 39 give p values down to 1 / 40.

    Raises:
        ValueError: if the model is not a backbone or has no such stage, or has no absolute encoding but another one
            without a vector per token.
    """
    if untrained < 0:
        raise ValueError(f"`untrained` must be at least 0, got {untrained}.")
    positions, grid, table = positions_of(model, img_size, stage)
    # attention and MLPs have most of the weights, and are not needed
    parts = [getattr(module, name, None) for module in model.modules() for name in ("attn", "mlp")]
    left_out = {id(part): nn.Identity() for part in parts if isinstance(part, nn.Module)}
    exact = copy.deepcopy(model, left_out).cpu().double().eval()
    here, outputs = _seen(exact, positions, grid, stage, next(model.parameters()))
    absolute = any(outputs) or any(
        p.added_to_stream is not None or p.after_norm is not None or p.queries_keys is not None for p in positions
    )
    if not absolute and any(value is not None for position in positions for value in position):
        raise ValueError(
            "`model` must have an absolute encoding (learnable, sinusoidal_1d or sinusoidal_2d, with any joining) "
            "to have position correlations, got one that gives its layers no vector per token; "
            "bias_maps draws a relative bias, translation_error measures any model, attention_maps shows attention, "
            "mixing_maps shows gated MLPs."
        )
    layers = np.stack([cosine_similarity(_total(parts.values(), here).numpy()) for parts in outputs])
    sources = tuple(" + ".join(parts) or None for parts in outputs)
    initial = None
    if table is not None and stage == 0:
        initial = cosine_similarity(_patches(table, here).numpy())
    several = sum(source is not None for source in sources) > 1
    ranges = _untrained_ranges(exact, grid, stage, untrained) if several and untrained else None
    return Correlations(here.plane, layers, sources, initial, ranges)


def positions_of(
    model: nn.Module, img_size: int | tuple[int, ...] | None, stage: int
) -> tuple[list[LayerPosition], Grid, Tensor | None]:
    """Return the position of each layer, the grid, and the table w if there is exactly one."""
    if not isinstance(model, TokenModel):
        raise ValueError(f"`model` must be a backbone with a `position`, got {type(model).__name__}.")
    grid = model.grid
    if img_size is not None:
        if not isinstance(model, Backbone):
            raise ValueError(f"`img_size` must be left out with a language model, got {img_size}.")
        grid = model.grid_at((img_size, img_size) if isinstance(img_size, int) else img_size)
    stages = len(model.depths) if isinstance(model, Backbone) else 1
    if not 0 <= stage < stages:
        raise ValueError(f"`stage` must be from 0 to {stages - 1} in this {type(model).__name__}, got {stage}.")
    with evaluating(model.position):
        encodings = [module for module in model.position.modules() if isinstance(module, AbsoluteEncoding)]
        return model.position(grid), grid, encodings[0](grid) if len(encodings) == 1 else None


def _seen(
    model: nn.Module, positions: list[LayerPosition], grid: Grid, stage: int, like: Tensor
) -> tuple[Grid, list[dict[str, Tensor]]]:
    """Return the grid of a stage, and the position that each of its layers sees, (H * W, D), by its source.

    `positions` are in the dtype and on the device of `like`, and `model` is in float64 on the CPU.
    """
    stream: Tensor | None = None
    layers: list[dict[str, Tensor]] = []
    for (at, index, block, entered), position in zip(layers_of(model, grid), positions, strict=True):
        if entered is not None and stream is not None:
            stream = entered(stream)
        if position.added_to_stream is not None:
            patches = _patches(position.added_to_stream, at)
            stream = patches if stream is None else stream + patches
        if index == stage:
            here = at
            outputs = {} if stream is None else {"stream": block.norm1(stream)}
            for name in ("after_norm", "queries_keys"):
                if (table := getattr(position, name)) is not None:
                    outputs[name] = _patches(table, at)
            if position.inputs is not None:  # the addition to the inputs of queries: their inputs for tokens of zeros
                zeros = like.new_zeros(1, at.tokens, len(block.norm1.weight))
                queries = _patches(position.inputs(zeros)[0][0], at)
                if not torch.equal(queries, queries[:1].expand_as(queries)):  # the bias of a PEG is the same everywhere
                    outputs["queries_keys"] = queries
            layers.append(outputs)
        if stream is not None and (carried := getattr(block, "carried", None)) is not None:
            stream = carried(stream)
    return here, layers


def _untrained_ranges(model: Any, grid: Grid, stage: int, count: int) -> Array:
    """Return `reach_range` of `count` untrained models; `model`, in float64, is a copy that may be changed."""
    model.position = getattr(model.position, "original", model.position)  # of a folded one
    encodings = [module for module in model.position.modules() if isinstance(module, AbsoluteEncoding)]
    tables: list[Any] = [part for module in encodings for part in module.modules() if hasattr(part, "reset_parameters")]
    norms = _norms(model)
    ranges = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(count):
            for table in tables:
                table.reset_parameters()
            for parameter, start, deviation in norms:
                parameter.copy_(start + deviation * torch.randn_like(parameter))
            here, outputs = _seen(model, model.position(grid), grid, stage, next(model.parameters()))
            everywhere = here.coordinates().double()
            places = torch.randperm(here.patches)[:_PLACES]
            distance = torch.cdist(everywhere[places], everywhere).numpy()
            units = [F.normalize(_total(parts.values(), here), dim=-1, eps=0) for parts in outputs if parts]
            reaches = np.array([mean_distance((unit[places] @ unit.T).numpy(), distance) for unit in units])
            ranges.append(range_of(reaches, float(distance.mean())))
    return np.array(ranges)


def _norms(model: nn.Module) -> list[tuple[nn.Parameter, float, Tensor]]:
    """List the parameters of norms with their initial value and their deviation from it, one for each kind of norm."""
    kinds: dict[str, list[tuple[nn.Parameter, float]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm | TableScale):
            for leaf, parameter in module.named_parameters(recurse=False):
                kind = re.sub(r"\d+", "*", f"{name}.{leaf}")
                kinds.setdefault(kind, []).append((parameter, 1.0 if leaf == "weight" else 0.0))
    norms = []
    for members in kinds.values():
        deviation = torch.cat([parameter.flatten() - start for parameter, start in members]).square().mean().sqrt()
        norms += [(parameter, start, deviation) for parameter, start in members]
    return norms


def layers_of(model: Any, grid: Grid) -> Iterator[tuple[Grid, int, Any, Callable[[Tensor], Tensor] | None]]:
    """Yield the grid, stage and block of every layer, and the function that w passes through before its stage."""
    if isinstance(model, LanguageModel):
        for block in model.blocks:
            yield grid, 0, block, None
        return
    grids = model.position_grids(grid)
    layers = iter(model.layer_grids(grid))
    for stage, depth in enumerate(model.depths):
        for index in range(depth):
            enter = None
            if stage and not index:  # w has no rows for prefix tokens here
                enter = partial(model.merge_table, stage, grid=Grid(*grids[stage - 1].shape))
            yield next(layers), stage, model.block(stage, index), enter


def layers_of_stage(
    model: nn.Module, img_size: int | tuple[int, ...] | None, stage: int
) -> tuple[Grid, list[tuple[Any, LayerPosition]]]:
    """Return the block and the position of each layer of a stage, with the grid within which its tokens see each other.

    That is the largest one if it differs between layers; the others have no position.
    """
    positions, grid, _ = positions_of(model, img_size, stage)
    layers = [
        (at.within, block, position)
        for (at, index, block, _), position in zip(layers_of(model, grid), positions, strict=True)
        if index == stage
    ]
    largest = max((within for within, _, _ in layers), key=lambda within: within.patches)
    return largest, [(block, position if within == largest else LayerPosition()) for within, block, position in layers]


def _patches(table: Tensor, grid: Grid) -> Tensor:
    """Return the rows of the patches in a table (N, D), in float64 on the CPU, (H * W, D)."""
    return grid.split(table.detach().cpu().double())[1]


def _total(parts: Iterable[Tensor], grid: Grid) -> Tensor:
    return sum(parts, torch.zeros(grid.patches, 1, dtype=torch.float64))


class NormCoefficients(NamedTuple):
    """The weights of tokens, position information and bias in a norm, which `norm_coefficients` measures."""

    tokens: Tensor
    position: Tensor
    bias: Tensor


@checked
def norm_coefficients(model: nn.Module, images: Tensor) -> NormCoefficients:
    r"""Measure how each layer's norm weighs tokens and position information, for each image and token.

    .. math:: LN(\tilde x + w) = \lambda_1 LN(\tilde x) + \lambda_2 LN(w) + \lambda_3 \beta, \quad
        \lambda_1 = \frac{\sigma_{\tilde x}}{\sigma_{\tilde x + w}}, \quad
        \lambda_2 = \frac{\sigma_w}{\sigma_{\tilde x + w}}, \quad
        \lambda_3 = \frac{\sigma_{\tilde x + w} - \sigma_{\tilde x} - \sigma_w}{\sigma_{\tilde x + w}}

    :math:`\tilde x` is the residual stream without w, :math:`\sigma` the standard deviation over the channels of a
    token, without the norm's epsilon, and :math:`\beta` the bias of the norm.

    Reference: LaPE (Yu et al., 2023), Eq. 6 and 7.

    Args:
        model: one of our backbones, with one stage and the joining 'default' of an absolute encoding.
        images: (B, C, height, width).

    Returns:
        :math:`\lambda_1`, :math:`\lambda_2` and :math:`\lambda_3` of each layer, (L, B, N) each.

    Raises:
        ValueError: if the model does not add one table w to the embedded tokens and nothing else, or a norm changes
            the residual stream itself (ViT-Lite, CVT, CCT, CLIP).
    """
    if not isinstance(model, Backbone) or len(model.depths) != 1:
        raise ValueError(f"`model` must be a backbone of one stage, got {type(model).__name__}.")
    with evaluating(model):
        first, *others = model.position(model.grid_of(images))
        w = first.added_to_stream
        fields = [name for name, value in zip(first._fields, first, strict=True) if value is not None]
        if w is None or fields[1:] or any(value is not None for layer in others for value in layer):
            raise ValueError(
                "`model` must add one table to the embedded tokens and have no other position information (joining "
                f"'default' of an absolute encoding), got {', '.join(fields) or 'none'} in the first layer."
            )
        if not is_pre_norm(model.block(0, 0)) or not isinstance(getattr(model, "norm_pre", nn.Identity()), nn.Identity):
            raise ValueError("`model` must have blocks x + f(LN(x)) and no norm before the first, got another kind.")
        inputs = [model.embed(images) + w, *(tokens for tokens, _ in model.each_layer(images))][:-1]
        both = torch.stack(inputs)  # (L, B, N, D)
        total, tokens, position = (x.std(-1, unbiased=False) for x in (both, both - w, w.expand_as(both)))
        return NormCoefficients(tokens / total, position / total, (total - tokens - position) / total)
