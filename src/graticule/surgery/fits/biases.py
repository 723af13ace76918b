"""Fits of bias tables to any bias, or to the logits of an absolute table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from graticule.encodings.fire import Fire
from graticule.encodings.forms.absolute import JoinedPosition
from graticule.encodings.forms.bias import BiasPosition, SharedBiasPosition
from graticule.encodings.relative_bias import RelativeBias
from graticule.layers.attention import Attention
from graticule.position.bias import Bias
from graticule.position.grid import Grid
from graticule.position.joining import Default
from graticule.position.layer import LayerPosition
from graticule.position.position import NoPosition
from graticule.surgery.fits.contributions import Contribution, is_plain
from graticule.surgery.fits.registry import Before, register_fit
from graticule.surgery.fits.tables import fit_last

#: Steps of L-BFGS.
_STEPS = 60


def fit_fire(fire: Fire, logits: Tensor) -> bool:
    """Fit the network of FIRE to logits (h, N, N) by least squares over all pairs of patches; return True on success.

    With 'distance', the hidden units are ramps that begin at the distances of the grid. With enough units, they and a
    constant represent every function of the distance; otherwise the ramps begin at quantiles of the distances over the
    pairs. With 'axes', the hidden units keep their random initialization. The last layer is solved for. Scale and
    threshold are unchanged.
    """
    if fire.causal:
        return False
    first = cast("nn.Linear", fire.mlp[0])
    of_pairs = fire.shares(fire.grid)[fire.grid.offset_index(logits.device).flatten()]  # (N * N, 1 or 2)
    shares, index, count = of_pairs.double().unique(dim=0, return_inverse=True, return_counts=True)
    values = logits.double().flatten(1).T  # (N * N, h)
    means = values.new_zeros(len(shares), values.shape[1]).index_add(0, index, values) / count[:, None]
    if fire.form == "distance":
        first.weight.fill_(1.0)
        first.bias.copy_(-_starts(shares[:, 0], count, first.out_features))
    return fit_last(fire.mlp, shares.to(first.weight.dtype), means, count.double().sqrt()[:, None])  # of all pairs


def _starts(shares: Tensor, count: Tensor, units: int) -> Tensor:
    """Return the distances where the ramps of the hidden units begin, from sorted distances and their pair counts."""
    if len(shares) <= units:
        return torch.cat([shares, shares[-1:].expand(units - len(shares))])
    quantiles = torch.linspace(0, float(count.sum()), units + 1, dtype=torch.float64)[:-1]
    return shares[torch.searchsorted(count.cumsum(0).double(), quantiles.to(count.device))]


@register_fit(BiasPosition, BiasPosition)
@register_fit(SharedBiasPosition, BiasPosition)
@register_fit(BiasPosition, SharedBiasPosition)
@register_fit(SharedBiasPosition, SharedBiasPosition)
def project_bias(old: Any, new: Any, before: Before) -> bool | str:
    """Set each table of displacements to the mean over the pairs of patches of each displacement (least squares).

    A shared bias gets the mean over its layers. It is exact if the old bias depends on the displacement alone.
    """
    return _project(new, before, [bias_table(layer, before.grid) for layer in before.given])


@register_fit(JoinedPosition, BiasPosition)
@register_fit(JoinedPosition, SharedBiasPosition)
def project_logits(old: JoinedPosition, new: Any, before: Before) -> bool | str:
    """Set each table of displacements to the mean of the logits that an absolute table adds in a layer.

    The means are over the pairs of patches of each displacement (`table_logits`), which is least squares.
    """
    if not isinstance(old.joining, Default):
        return False
    return _project(new, before, [table_logits(one, before.grid) for one in before.contributions])


@register_fit(NoPosition, BiasPosition)
@register_fit(NoPosition, SharedBiasPosition)
def start_at_zero(old: NoPosition, new: Any, before: Before) -> bool:
    """Set tables of displacements to zero, so that they have no effect."""
    encodings = [new.encoding] if isinstance(new, SharedBiasPosition) else list(new.encodings)
    tables = [bias for one in encodings if isinstance(bias := getattr(one, "bias", one), RelativeBias)]
    for encoding in tables:
        encoding.relative_position_bias_table.zero_()
    return len(tables) == len(encodings)


def _project(new: Any, before: Before, logits: Sequence[Tensor | None]) -> bool | str:
    encodings = [new.encoding] if isinstance(new, SharedBiasPosition) else list(new.encodings)
    groups = [list(new.joined)] if isinstance(new, SharedBiasPosition) else [[layer] for layer in new.joined]
    if not any(parameter.requires_grad for parameter in new.parameters()):
        return "as it has no parameters to fit"
    fitted = True
    for encoding, layers in zip(encodings, groups, strict=True):
        found = [made for layer in layers if (made := logits[layer]) is not None]
        if len(found) < len(layers):
            fitted = False
            continue
        mean = torch.stack(found).mean(0)
        within = isinstance(encoding, RelativeBias | Fire) and encoding.grid.shape == before.grid.within.shape
        if len(mean) != getattr(encoding, "num_heads", len(mean)):
            fitted = False
        elif within and isinstance(encoding, Fire):
            fitted = fit_fire(encoding, mean) and fitted
        elif within:
            by_displacement = displacement_means(mean, encoding.grid)
            encoding.relative_position_bias_table[: len(by_displacement)] = by_displacement.to(mean.dtype)
        else:
            fitted = fit_parameters(encoding, mean, before.grid) and fitted
    return fitted


def fit_parameters(encoding: Any, logits: Tensor, grid: Grid) -> bool:
    """Fit the parameters of a bias to logits (h, N, N), up to a constant per query, by L-BFGS; return True on success.

    It begins at the initial values, which may be far off: a local minimum.
    """
    with torch.enable_grad():
        made = bias_table(encoding.layer(grid.within), grid)
    if made is None or made.shape != logits.shape or not made.requires_grad:
        return False
    target = logits - logits.mean(-1, keepdim=True)
    whole = max(float(target.square().sum()), 1e-300)

    def loss() -> Tensor:
        made = cast("Tensor", bias_table(encoding.layer(grid.within), grid))
        return (made - made.mean(-1, keepdim=True) - target).square().sum() / whole

    minimize(loss, [one for one in encoding.parameters() if one.requires_grad], _STEPS)
    return True


def displacement_means(bias: Tensor, grid: Grid) -> Tensor:
    """Return the mean of a bias of the patches, (h, N, N), over the pairs of each displacement, (displacements, h)."""
    index = grid.offset_index(bias.device).flatten()
    values = bias.flatten(1).T  # (N * N, h)
    count = index.bincount()[:, None]
    return values.new_zeros(len(count), len(bias)).index_add(0, index, values) / count


@torch.enable_grad()
def minimize(loss: Callable[[], Tensor], parameters: Sequence[Tensor], steps: int) -> None:
    """Minimize a loss by L-BFGS, from the values that the parameters have."""
    search = torch.optim.LBFGS(
        parameters, max_iter=steps, tolerance_grad=0, tolerance_change=0, history_size=50, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        search.zero_grad()
        found = loss()
        found.backward()
        return found

    search.step(closure)
    search.zero_grad()


def bias_table(layer: LayerPosition, grid: Grid) -> Tensor | None:
    """Return the bias of a layer between patches, (h, N, N), in float64; None if it depends on tokens.

    A pair that is masked by minus infinity has -1e4, so that biases can be compared.
    """
    bias = None if layer.bias is None else Bias.of(layer.bias)
    if bias is None or bias.function:
        return None
    patches = grid.within.patches
    return bias.table()[:, -patches:, -patches:].double().clamp(min=-1e4)


def table_logits(contribution: Contribution | None, grid: Grid) -> Tensor | None:
    r"""Return the logits that a table adds between patches in a layer, (h, N, N), up to a constant per query.

    .. math:: b_{h, ij} = (W_Q \bar x_i)_h \cdot (W_K \bar d_j)_h / \sqrt d

    where :math:`\bar x` is the mean input of the layer, and :math:`\bar d` the mean contribution of the table to it.
    It is None for attention that changes queries and keys further.
    """
    attention = None if contribution is None else contribution.attention
    if contribution is None or not isinstance(attention, Attention) or not is_plain(attention):
        return None
    weight = next(attention.qkv.parameters())
    x, without = (each.to(weight.dtype) for each in (contribution.inputs, contribution.inputs - contribution.mean))
    projected, less = (attention.qkv(each).double() for each in (x, without))
    queries = projected.chunk(3, -1)[0]
    keys = (projected - less).chunk(3, -1)[1]  # a bias of the projection cancels
    queries, keys = (
        each[-grid.patches :].unflatten(-1, (attention.num_heads, -1)).transpose(0, 1) for each in (queries, keys)
    )
    logits: Tensor = queries @ keys.mT * attention.scale
    return logits
