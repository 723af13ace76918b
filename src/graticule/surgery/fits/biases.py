"""Fits of tables of displacements to any bias, or to the logits of an absolute table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graticule.encodings.forms.absolute import JoinedPosition
from graticule.encodings.forms.bias import BiasPosition, SharedBiasPosition
from graticule.encodings.mirrored_bias import MirroredBias
from graticule.encodings.relative_bias import RelativeBias
from graticule.position.bias import Bias
from graticule.position.grid import Grid
from graticule.position.joining import Default
from graticule.position.layer import LayerPosition
from graticule.position.places import ravel
from graticule.position.position import NoPosition
from graticule.surgery.fits.contributions import Contribution
from graticule.surgery.fits.registry import Before, register_fit


@register_fit(BiasPosition, BiasPosition)
@register_fit(SharedBiasPosition, BiasPosition)
@register_fit(BiasPosition, SharedBiasPosition)
@register_fit(SharedBiasPosition, SharedBiasPosition)
def project_bias(old: Any, new: Any, before: Before) -> bool | str:
    """Set each table of displacements to the mean over the pairs of patches of each displacement (least squares).

    A shared bias gets the mean over its layers. It is exact if the old bias depends on the displacement alone.
    """
    return _project(new, before, [bias_table(layer, before.grid) for layer in before.positions])


@register_fit(JoinedPosition, BiasPosition)
@register_fit(JoinedPosition, SharedBiasPosition)
def project_logits(old: JoinedPosition, new: Any, before: Before) -> bool | str:
    """Set each table of displacements to the mean of the logits that an absolute table adds in a layer.

    The means are over the pairs of patches of each displacement (`table_logits`), which is least squares.
    """
    if not isinstance(old.joining, Default):
        return False
    return _project(new, before, [table_logits(contribution, before.grid) for contribution in before.contributions])


@register_fit(NoPosition, BiasPosition)
@register_fit(NoPosition, SharedBiasPosition)
def start_at_zero(old: NoPosition, new: Any, before: Before) -> bool:
    """Set tables of displacements to zero, so that they have no effect."""
    encodings = _encodings(new)
    tables = [table for encoding in encodings if (table := _table_of(getattr(encoding, "bias", encoding))) is not None]
    for table in tables:
        table.zero_()
    return len(tables) == len(encodings)


def _table_of(encoding: Any) -> Tensor | None:
    """Return the table of displacements of an encoding, (displacements, heads), a view; None if it has none."""
    if isinstance(encoding, MirroredBias):
        return encoding.attention_biases.T
    return encoding.relative_position_bias_table if isinstance(encoding, RelativeBias) else None


def _encodings(position: Any) -> list[Any]:
    return [position.encoding] if isinstance(position, SharedBiasPosition) else list(position.encodings)


def _project(new: Any, before: Before, logits: Sequence[Tensor | None]) -> bool | str:
    if not any(parameter.requires_grad for parameter in new.parameters()):
        return "as it has no parameters to fit"
    groups = [new.layer_indices] if isinstance(new, SharedBiasPosition) else [[layer] for layer in new.layer_indices]
    fitted = True
    for encoding, layers in zip(_encodings(new), groups, strict=True):
        terms = [term for layer in layers if (term := logits[layer]) is not None]
        table = _table_of(encoding) if encoding.grid.shape == before.grid.within.shape else None
        if len(terms) < len(layers) or table is None or len(terms[0]) != encoding.num_heads:
            fitted = False
            continue
        means = displacement_means(torch.stack(terms).mean(0), encoding.grid, isinstance(encoding, MirroredBias))
        table[: len(means)] = means.to(table.dtype)
    return fitted


def displacement_means(bias: Tensor, grid: Grid, mirrored: bool = False) -> Tensor:
    """Return the mean of a bias of the patches, (h, N, N), over the pairs of each displacement, (displacements, h).

    With `mirrored` over the pairs of each absolute displacement, (N, h).
    """
    offsets = grid.offsets(bias.device).abs().unbind(-1)
    index = (ravel(offsets, grid.shape) if mirrored else grid.offset_index(bias.device)).flatten()
    values = bias.flatten(1).T  # (N * N, h)
    count = index.bincount()[:, None]
    return values.new_zeros(len(count), len(bias)).index_add(0, index, values) / count


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
    if contribution is None or contribution.projection is None:
        return None
    project, num_heads, scale = contribution.projection
    queries, keys = project(contribution.inputs).double().chunk(2, -1)
    _, less = project(contribution.inputs - contribution.mean).double().chunk(2, -1)
    queries, keys = (  # a bias of the projection cancels in the keys
        values[-grid.patches :].unflatten(-1, (num_heads, -1)).transpose(0, 1) for values in (queries, keys - less)
    )
    return queries @ keys.mT * scale
