"""Fits of absolute encodings to a given table: by copy, by factorization, or by the last layer of an MLP."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from graticule.encodings.conditional import Peg
from graticule.encodings.coordinate_mlp import CoordinateMlp
from graticule.encodings.factorized import Factorized
from graticule.encodings.forms.absolute import AbsoluteEncoding, JoinedPosition
from graticule.encodings.forms.between import BetweenBlocks
from graticule.encodings.forms.rotary import PlaneRotary, RotaryPosition
from graticule.encodings.fourier import Fourier
from graticule.encodings.learnable import Learnable
from graticule.encodings.rope_mixed import MixedRope
from graticule.position.grid import Grid
from graticule.position.position import NoPosition
from graticule.surgery.fits.registry import Before, register_fit


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
    table = patches_of(target_of(before), before.grid).unflatten(0, before.grid.shape)  # (H, W, D)
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


@register_fit(JoinedPosition, RotaryPosition)
def refuse_table(old: Any, new: Any, before: Before) -> str:
    """Return the reason for which a rotation cannot replace a table.

    It multiplies queries and keys, so its effect on the logits depends on their content and on the biases of their
    projections. The report measures it for the mean tokens.
    """
    return "as a rotation adds no term to the logits"


@register_fit(RotaryPosition, RotaryPosition)
def copy_directions(old: Any, new: Any, before: Before) -> bool:
    """Set the frequency vectors of 'rope_mixed' in each layer and head to those of the old encoding, which is exact.

    Both must rotate the same pairs of channels by the same coordinates.
    """
    was, now = old.encoding, new.encoding
    if not isinstance(now, MixedRope) or not isinstance(was, PlaneRotary) or was.layout != now.layout:
        return False
    if was.coordinates != now.coordinates or was.scaling != now.scaling or old.joined != new.joined:
        return False
    vectors = was.vectors(now.freqs.device).flip(-1)  # (d / 2, 2), or one for each layer and head; x before y
    if vectors.ndim not in (2, 4) or vectors.shape[-2] != now.freqs.shape[-1]:
        return False
    found = vectors.T[:, None, None] if vectors.ndim == 2 else vectors.movedim(-1, 0)
    now.freqs.copy_(found.expand_as(now.freqs))
    return True


@register_fit(NoPosition, BetweenBlocks)
def start_as_identity(old: NoPosition, new: Any, before: Before) -> bool:
    """Set the last convolution of each PEG to zero, so that it adds nothing; exact."""
    pegs = [module for module in new.modules() if isinstance(module, Peg)]
    convolutions = [peg.proj[-1] for peg in pegs]
    if not pegs or not all(isinstance(convolution, nn.Conv2d) for convolution in convolutions):
        return False  # several layers end with a batch norm
    for convolution in cast("list[nn.Conv2d]", convolutions):
        convolution.weight.zero_()
        if convolution.bias is not None:
            convolution.bias.zero_()
    return True
