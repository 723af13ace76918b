"""Fits of absolute encodings to a given table: by copy, by factorization, or by the last layer of an MLP."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from graticule.encodings import AbsoluteEncoding
from graticule.encodings.coordinate_mlp import CoordinateMlp
from graticule.encodings.factorized import Factorized
from graticule.encodings.fourier import Fourier
from graticule.encodings.learnable import Learnable
from graticule.grid import Grid
from graticule.surgery.fits.registry import Before, register_fit


@register_fit(AbsoluteEncoding, Learnable)
def copy_table(old: AbsoluteEncoding, new: Learnable, before: Before) -> bool:
    """Copy the table, which is exact if the new one has rows for the prefix tokens, or the old rows are zero."""
    target = target_of(before)
    target = target if new.prefix_rows else patches_of(target, before.grid)
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
    table = patches_of(target_of(before), before.grid).unflatten(0, before.grid.shape)  # (H, W, D)
    if new.grid.shape != before.grid.shape:
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


@register_fit(AbsoluteEncoding, Fourier)
def fit_fourier(old: AbsoluteEncoding, new: Fourier, before: Before) -> bool:
    """Fit the last layer of the MLP by least squares; directions and hidden layer keep their random initialization."""
    features = new.features(before.grid).to(new.directions.dtype)
    return fit_last(new.mlp, features, patches_of(target_of(before), before.grid))


@register_fit(AbsoluteEncoding, CoordinateMlp)
def fit_coordinates(old: AbsoluteEncoding, new: CoordinateMlp, before: Before) -> bool:
    """Fit the last layer of the MLP by least squares, for coordinates without augmentation."""
    weight = next(new.mlp.parameters())
    places = new.coordinates(before.grid, weight.device, new.grid).to(weight.dtype)
    return fit_last(new.mlp, places, patches_of(target_of(before), before.grid))


def fit_last(mlp: nn.Sequential, inputs: Tensor, target: Tensor) -> bool:
    """Fit the last linear layer of an MLP to map inputs (N, F) to the target (N, D), by least squares."""
    hidden = mlp[:-1](inputs).double()
    last = cast("nn.Linear", mlp[-1])
    design = torch.cat([hidden, torch.ones_like(hidden[:, :1])], -1)
    solved = torch.linalg.lstsq(design, target.double(), driver="gelsd" if design.device.type == "cpu" else None)
    solution = solved.solution  # (F + 1, D)
    last.weight.copy_(solution[:-1].T)
    last.bias.copy_(solution[-1])
    return True


def target_of(before: Before) -> Tensor:
    """Return the table to fit, (N, D)."""
    assert before.target is not None
    return before.target


def patches_of(table: Tensor, grid: Grid) -> Tensor:
    """Return the rows of the patches, (H * W, D), in float64."""
    return table[len(table) - grid.patches :].double()
