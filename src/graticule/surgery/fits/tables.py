"""Fits of absolute encodings to a table, of joinings to 'default', and of parts that replace a table or nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.encodings.conditional import BetweenBlocks, Peg
from graticule.encodings.factorized import Factorized
from graticule.encodings.forms.absolute import AbsoluteEncoding, JoinedPosition
from graticule.encodings.learnable import Learnable
from graticule.position.grid import Grid
from graticule.position.joining import (
    Concatenation,
    Default,
    Joining,
    Lape,
    LapeSharing,
    QueriesKeys,
    Shared,
    TableScale,
    Unshared,
)
from graticule.position.position import NoPosition
from graticule.surgery.fits.contributions import Contribution
from graticule.surgery.fits.registry import Before, find_fit, register_fit


@register_fit(AbsoluteEncoding, Learnable)
def copy_table(old: AbsoluteEncoding, new: Learnable, before: Before) -> bool:
    """Copy the table, which is exact if the new one has rows for the prefix tokens, or the old rows are zero."""
    prefix, patches = before.grid.split(target_of(before))
    target = torch.cat([prefix[: new.grid.prefix], patches])
    if new.pos_embed.shape[1:] != target.shape:
        return False
    new.pos_embed.copy_(target)
    return True


@register_fit(AbsoluteEncoding, Factorized)
def factorize(old: AbsoluteEncoding, new: Factorized, before: Before) -> bool:
    r"""Fit the tables of rows and columns by least squares.

    For a sum, :math:`Y_y = \bar w_{y \cdot} - \bar w / 2` and :math:`X_x = \bar w_{\cdot x} - \bar w / 2`; for a
    product, the first singular vectors of each channel.
    """
    _, patches = before.grid.split(target_of(before))
    table = patches.double().unflatten(0, before.grid.shape)  # (H, W, D)
    if new.grid.shape != before.grid.shape or new.grid.ndim != 2:
        return False
    if new.product:
        if not table.any():  # with both factors at zero, none would get a gradient
            new.pos_embed_x.zero_()
            return True
        left, values, right = torch.linalg.svd(table.permute(2, 0, 1), full_matrices=False)
        root = values[:, :1].sqrt()
        y, x = (left[:, :, 0] * root).T, (right[:, 0] * root).T
    else:
        half = table.mean((0, 1)) / 2
        y, x = table.mean(1) - half, table.mean(0) - half
    new.pos_embed_y.copy_(y[None])
    new.pos_embed_x.copy_(x[None])
    return True


def target_of(before: Before) -> Tensor:
    """Return the table to fit, (N, D)."""
    assert before.target is not None
    return before.target


@register_fit(NoPosition, BetweenBlocks)
def start_as_identity(old: NoPosition, new: Any, before: Before) -> bool:
    """Set the last convolution of each PEG to zero, so that it adds nothing; exact."""
    convolutions = [module.proj[-1] for module in new.modules() if isinstance(module, Peg)]
    if not convolutions or not all(isinstance(last, nn.Conv2d | nn.Conv3d) for last in convolutions):
        return False  # several layers end with a batch norm
    for parameter in itertools.chain.from_iterable(last.parameters() for last in convolutions):
        parameter.zero_()
    return True


@register_fit(JoinedPosition, JoinedPosition)
def fit_joined(old: JoinedPosition, new: JoinedPosition, before: Before) -> bool | str:
    """Fit the tables to the targets of the new joining, then the parameters of the joining."""
    if not len(new.encodings) or not len(old.encodings):
        return False  # a later stage of a pyramid, which uses the table of the previous stage
    encodings = cast("Sequence[AbsoluteEncoding]", list(old.encodings))
    was, now = old.joining, new.joining
    same = type(now) is type(was) and now.layer_indices == was.layer_indices
    fit_function = None if same else find_fit(type(was), type(now))
    tables = [encoding(before.grid) for encoding in encodings]
    if not same and fit_function is None:  # the joining starts as initialized, with the old table
        for encoding, target in zip(cast("Any", new.encodings), tables, strict=False):
            if isinstance(encoding, Learnable):
                copy_table(encodings[0], encoding, replace(before, target=target))
        return False
    if fit_function is not None:
        result = fit_function(was, now, replace(before, target=tables[0]))
        if isinstance(result, str):
            return result
        tables = result
    fitted = len(tables) == len(new.encodings)
    for encoding, target in zip(cast("Any", new.encodings), tables, strict=False):
        fit = find_fit(type(encodings[0]), type(encoding))
        fitted = fit is not None and fit(encodings[0], encoding, replace(before, target=target)) and fitted
    fixed = not any(parameter.requires_grad for parameter in new.encodings.parameters())
    if isinstance(now, LapeSharing) and not same:
        fitted = fit_norms(now, new, before) and (fitted or fixed)
    elif isinstance(now, Concatenation) and not fitted:
        fitted = fit_projection(now, new, tables[0], before.grid)
    elif fixed and not fitted:
        return "as its table is fixed; the joinings concatenation and lape have parameters that can be fitted"
    return fitted


def fit_projection(joining: Concatenation, position: JoinedPosition, target: Tensor, grid: Grid) -> bool:
    r"""Fit the projection of a table so that it gives the target, (N, D): the least squares nearest to the identity."""
    (encoding,) = position.encodings
    table: Tensor = cast("Any", encoding)(grid).double()
    inverse = torch.linalg.pinv(table, rtol=1e-4)  # smaller singular values would need huge weights
    joining.projection.add_((inverse @ (target.double() - table)).T)
    return True


@register_fit(NoPosition, JoinedPosition)
def start_without_effect(old: NoPosition, new: JoinedPosition, before: Before) -> bool:
    """Set the tables to zero, or the norms of LaPE or the projection, whose table keeps its values; exact."""
    encodings = cast("Sequence[AbsoluteEncoding]", list(new.encodings))
    tables = [encoding(before.grid) for encoding in encodings]
    if isinstance(new.joining, LapeSharing):
        for norm in new.joining.norms if tables else ():
            fit_norm(norm, tables[0], torch.zeros_like(tables[0]))
    elif isinstance(new.joining, Concatenation):
        new.joining.projection.zero_()
    elif type(new.joining) in (Default, Shared, Unshared, QueriesKeys):
        for encoding, table in zip(encodings, tables, strict=True):
            if (fit := find_fit(type(encoding), type(encoding))) is not None:
                fit(encoding, encoding, replace(before, target=torch.zeros_like(table)))
    positions = new(before.grid) if tables else []
    return bool(positions) and not any(
        value is not None and value.any() for layer in positions for value in cast("Any", layer)
    )


@register_fit(Default, Concatenation)
@register_fit(Default, LapeSharing)
def keep(old: Default, new: Joining, before: Before) -> list[Tensor]:
    """Keep the table."""
    return [target_of(before)]


@register_fit(Concatenation, Default)
def project(old: Concatenation, new: Joining, before: Before) -> list[Tensor]:
    """Return the projected table."""
    return [target_of(before) @ old.projection.T]


@register_fit(Default, Shared)
def scale_down(old: Default, new: Joining, before: Before) -> list[Tensor]:
    r"""Scale the table by least squares over all layers.

    After n_l additions the residual stream has :math:`n_l c w` instead of w, so
    :math:`c = \sum_l n_l / \sum_l n_l^2`.
    """
    added = torch.tensor([sum(at <= layer for at in new.layer_indices) for layer in range(new.depth)]).double()
    return [target_of(before) * float(added.sum() / added.square().sum())]


@register_fit(Default, Unshared)
def first_alone(old: Default, new: Joining, before: Before) -> list[Tensor]:
    """Return the table for the first layer and zeros for the others, which is exact if the first layer is joined."""
    table = target_of(before)
    return [table if layer == 0 else torch.zeros_like(table) for layer in new.layer_indices]


@register_fit(Default, QueriesKeys)
def mean_contribution(old: Default, new: Joining, before: Before) -> list[Tensor]:
    """Return the mean of the table's contributions to the layers, the least squares for one table."""
    table, contributions = target_of(before), contributions_of(new, before)
    if contributions is None:
        return [table]
    return [torch.stack([contribution.mean for contribution in contributions]).mean(0).to(table.dtype)]


def contributions_of(joining: Joining, before: Before) -> list[Contribution] | None:
    """Return the contributions of the table to the joined layers; None if they were not measured in all."""
    contributions = [before.contributions[layer] for layer in joining.layer_indices]
    measured = [contribution for contribution in contributions if contribution is not None]
    return measured if len(measured) == len(contributions) else None


def fit_norms(joining: LapeSharing, position: JoinedPosition, before: Before) -> bool:
    r"""Fit the norms of LaPE so that each layer gets the contribution of the table, by least squares.

    With d_l the contribution of the table to layer l (`Contribution`) and :math:`\hat w_l` the normalized table in
    the norm of the layer, weight and bias of channel k are the regression of :math:`\bar d_{l,k}` on
    :math:`\hat w_{l,k}` over the tokens. In the progressive form the input of each norm is the output of the previous.
    """
    contributions = contributions_of(joining, before)
    if contributions is None:
        return False
    (encoding,) = position.encodings
    stored: Tensor = cast("Any", encoding)(before.grid)
    table = stored.double()
    for norm, contribution in zip(joining.norms, contributions, strict=True):
        fit_norm(norm.double(), table, contribution.mean)
        if isinstance(joining, Lape):
            table = norm(table)
        norm.to(stored.dtype)
    return True


def fit_norm(norm: nn.Module, table: Tensor, target: Tensor) -> None:
    """Fit the parameters of a norm, or of its replacement, so that it maps the table to the target, both (N, D)."""
    scale = norm
    if isinstance(norm, nn.Sequential):
        table, scale = norm[0](table), norm[1]
    if isinstance(scale, nn.LayerNorm):
        if scale.elementwise_affine:
            normed = F.layer_norm(table, scale.normalized_shape, eps=scale.eps)
            _regress(normed, target, scale.weight, scale.bias)
    elif isinstance(scale, TableScale):
        _regress(table, target, scale.weight, scale.bias)


def _regress(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Set weight and bias to the regression of y on x, (N, D), per channel or, with one weight, over all."""
    if len(weight) == 1:
        x, y = x.reshape(-1, 1), y.reshape(-1, 1)
    center_x, center_y = (x.mean(0), y.mean(0)) if bias is not None else (0.0, 0.0)
    variance = (x - center_x).square().sum(0)
    covariance = ((x - center_x) * (y - center_y)).sum(0)
    slope = torch.where(variance > 0, covariance / variance.clamp(min=torch.finfo(x.dtype).tiny), 0.0)
    weight.copy_(slope)
    if bias is not None:
        bias.copy_(center_y - slope * center_x)
