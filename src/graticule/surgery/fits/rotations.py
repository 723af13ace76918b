"""Fits of rotary encodings to a table in the residual stream, and to other rotations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graticule.encodings.forms.absolute import JoinedPosition
from graticule.encodings.forms.coordinates import linear
from graticule.encodings.forms.rotary import PlaneRotary, RotaryPosition, waves
from graticule.encodings.rope_directions import MixedRope
from graticule.position.grid import Grid
from graticule.position.joining import Default
from graticule.position.rotation import PairRotation, Rotation
from graticule.surgery.fits.contributions import Contribution, share_kept
from graticule.surgery.fits.registry import Before, register_fit

#: Steps of Adam, its rate in radians over the longest side of the grid, and that of constants.
_STEPS, _RATE, _CONSTANT_RATE = 150, 0.16, 0.05
#: Standard deviation of the initial frequencies, in radians over the longest side of the grid: nearly no rotation.
_START = 0.25


@register_fit(JoinedPosition, RotaryPosition)
def fit_frequencies(old: Any, new: Any, before: Before) -> bool | str:
    r"""Fit the frequencies of 'rope_mixed', and constants in queries and keys, to the logits with the table.

    With the table w, the logits of a layer are products of projections of LN(x), x = x' + w, with terms of content and
    content, content and position, and position and position (TUPE's decomposition). Without it, the layer gets
    LN(x - w), and the rotation R has to bring back what is missing:

    .. math:: \min_{f, b_Q, b_K} \sum_{i, j} |q_i^w \cdot k_j^w - R_i (q_i + b_Q) \cdot R_j (k_j + b_K)|^2

    over pairs of tokens of the images, without the mean over the keys of each query. The constants give logits of the
    displacement alone; they are added to the biases of the projections, so a model without biases gets none. It begins
    with nearly no rotation, since fast rotations destroy the logits of content, and takes a fixed number of Adam's
    steps per layer.

    Reference: the decomposition is that of Rethinking Positional Encoding in Language Pre-training (Ke et al., 2021).
    """
    encoding = new.encoding
    if not isinstance(encoding, MixedRope):
        return "as only the frequencies of rope_mixed are fitted"
    if not isinstance(getattr(old, "joining", None), Default):
        return "as its table is not added once to the residual stream"
    places = encoding.coordinates(before.grid, encoding.freqs.device, encoding.grid)
    fitted = False
    for index, layer in enumerate(new.joined):
        contribution = before.contributions[layer]
        if contribution is None or contribution.projections is None:
            return "as its layers project no plain queries and keys"
        vectors, constant = _fit_layer(contribution, encoding, before.grid, places)
        encoding.freqs[:, index] = vectors.movedim(-1, 0).flip(0)
        bias = getattr(contribution.attention.qkv, "bias", None)
        if bias is not None:
            bias[: len(constant)] += constant
        fitted = True
    return fitted


@torch.enable_grad()
def _fit_layer(contribution: Contribution, encoding: MixedRope, grid: Grid, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the frequency vectors of the heads of a layer, (h, d / 2, axes), and the constant, (2 D,)."""
    projections, attention = contribution.projections, contribution.attention
    assert projections is not None
    projections = type(projections)(projections.before.detach(), projections.without.detach(), None, projections.index)
    reach = max(float(places.max() - places.min()), 1.0)
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(encoding.freqs.shape[2], encoding.head_dim // 2, len(grid.shape), generator=draw)
    vectors = (start * _START / reach).to(projections.before).requires_grad_()
    constant = torch.zeros_like(projections.before[0, 0]).requires_grad_()
    groups = [{"params": [vectors], "lr": _RATE / reach}]
    if getattr(attention.qkv, "bias", None) is not None:
        groups.append({"params": [constant], "lr": _CONSTANT_RATE})
    optimizer = torch.optim.Adam(groups)
    for _ in range(_STEPS):
        angles = linear(places.to(vectors), vectors[..., None, :, :])  # (h, H * W, d / 2)
        rotation = PairRotation(waves(angles, grid, encoding.layout)).take(projections.index)
        target, plain, found = projections.logits(attention, rotation, constant)
        missing = (target - plain).square().sum((0, 2, 3)).clamp(min=1e-12)
        loss = ((found - target).square().sum((0, 2, 3)) / missing).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return vectors.detach(), constant.detach()


def rotation_kept(contribution: Contribution, rotation: Rotation) -> float:
    """Return the share of the table's effect on the logits that a rotation keeps instead of it.

    The effect is the difference of the logits with and without the table, over images: 0 if the rotation does no more
    than no position, negative if the logits are farther from the old ones than those without position.
    """
    assert contribution.projections is not None
    index = contribution.projections.index
    target, plain, found = contribution.projections.logits(contribution.attention, rotation.take(index))
    return share_kept(*((one - target).double().square().sum() for one in (plain, found)))


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
