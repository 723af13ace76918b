"""Fit of a table in the residual stream to the tables that layers get after their norms, such as from LaPE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.position.layer import LayerPosition
from graticule.surgery.fits.contributions import entered_blocks, is_pre_norm

#: Maximum number of images, as their tokens are stored for each layer.
_IMAGES = 8
#: Gauss-Newton steps, steps of conjugate gradients within each, and halvings of a step that is too long.
_STEPS, _PRODUCTS, _HALVINGS = 60, 200, 12
#: Maximum norm of a fitted table, as a multiple of the norm of the tokens: 1 % of the variance of x + w is then that of
#: x. Without a limit the best table can be infinite, as on one image.
_LARGEST = 10.0
#: Remaining share of a sum of squares up to which a fit counts as exact.
_EXACT = 1e-16


@dataclass(frozen=True)
class Stream:
    r"""Residual stream before the norm of a layer on some images, and the table that is added after the norm.

    tokens: x, (B, N, D), in float64.
    norm: LN, the norm before attention.
    inner: c, (N, D): the layer gets LN(x) + c; zeros if nothing is added.
    """

    tokens: Tensor
    norm: nn.LayerNorm
    inner: Tensor

    def normalized(self, table: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        """Return LN(x + w) without scale and shift, and the root of the variance that it divided by, (B, N, 1)."""
        x = self.tokens + table
        x = x - x.mean(-1, keepdim=True)
        root = (x.square().mean(-1, keepdim=True) + self.norm.eps).sqrt()
        return x / root, root

    @property
    def scale(self) -> Tensor | float:
        """Return the scale of the norm, (D,)."""
        return self.norm.weight.double() if self.norm.elementwise_affine else 1.0

    def residual(self, table: Tensor | float) -> Tensor:
        """Return LN(x + w) - LN(x) - c, (B, N, D)."""
        return self.scale * (self.normalized(table)[0] - self.normalized()[0]) - self.inner

    def kept(self, table: Tensor) -> float:
        """Return the share of c that a table in the residual stream gives the layer, over the images."""
        whole = float(self.inner.square().sum()) * len(self.tokens)
        lost = float(self.residual(table).square().sum())
        return float(not lost) if not whole else 1 - lost / whole


@dataclass(frozen=True)
class Streams:
    """Residual streams of a stage, for fitting a table that is added to them.

    attention: the stream before the attention of each layer; None if there is no LayerNorm.
    others: the streams before the MLPs, which get nothing after their norms, but would also get the table.
    """

    attention: list[Stream | None]
    others: list[Stream]

    def fit(self) -> Tensor | None:
        """Return the table (N, D) that best replaces the tables after the norms; None if none can be fitted.

        If a table gives each attention its old input exactly, it is that one. Otherwise it is the best for attention
        and MLPs together, where the MLPs got no table, within `_LARGEST`: for attention alone, the best table can be
        unbounded, so that the image does not matter.
        """
        known = [one for one in self.attention if one is not None]
        if not known or len(known) < len(self.attention):
            return None
        table = fit_stream(known)
        whole = sum(float(one.inner.square().sum()) for one in known)
        if float(_loss(known, table).sum()) <= _EXACT * max(whole, 1e-300):
            return table
        return fit_stream([*known, *self.others], _LARGEST)


def inner_streams(model: Backbone, images: Tensor, given: Sequence[LayerPosition]) -> list[Streams | None]:
    """Record the residual streams of each stage of a model whose layers get `inner`; None for a stage without it.

    Args:
        model: a model in evaluation mode.
        images: (B, C, height, width); only the first ones are used.
        given: the position of each layer.
    """
    found: list[Streams | None] = []
    handles, first = [], 0
    for blocks in entered_blocks(model):
        depth = len(blocks)
        table = next((one.inner for one in given[first : first + depth] if one.inner is not None), None)
        if table is None:
            found.append(None)
            first += depth
            continue
        streams = Streams([None] * depth, [])
        for index, block in enumerate(blocks):
            if not (is_pre_norm(block) and isinstance(block.norm1, nn.LayerNorm)):
                continue
            zeros, inner = torch.zeros_like(table), given[first + index].inner
            inner = zeros if inner is None else inner
            handles.append(block.norm1.register_forward_hook(partial(_record, streams, index, inner)))
            if isinstance(block.norm2, nn.LayerNorm):
                handles.append(block.norm2.register_forward_hook(partial(_record, streams, None, zeros)))
        found.append(streams)
        first += depth
    try:
        if handles:
            model.forward_features(images[:_IMAGES])
    finally:
        for handle in handles:
            handle.remove()
    return found


def _record(
    streams: Streams, layer: int | None, inner: Tensor, norm: nn.LayerNorm, args: tuple[Tensor, ...], output: Tensor
) -> None:
    stream = Stream(args[0][:, -len(inner) :].double(), norm, inner.double())
    if layer is not None:
        streams.attention[layer] = stream
    elif stream.tokens.shape[1:] == inner.shape:  # not after attention that changed the grid or the channels
        streams.others.append(stream)


def fit_stream(streams: Sequence[Stream], largest: float = float("inf")) -> Tensor:
    r"""Fit the table w, (N, D), in the residual stream that replaces the tables after the norms, by least squares.

    .. math:: \min_w \sum_l \sum_x |LN_l(x + w) - LN_l(x) - c_l|^2

    over layers and images, separately for each token: Gauss-Newton steps, halved until they help, whose normal
    equations are solved by conjugate gradients. A norm is invariant to the mean of w and to the scale of x + w; so the
    mean is set to zero, and the layers together determine the scale, up to `largest` times the norm of the tokens.
    """
    sizes = torch.stack([one.normalized()[1].square().mean(0) for one in streams]).mean(0)
    limit = largest * (sizes * streams[0].inner.shape[-1]).sqrt()
    top = bottom = torch.zeros_like(streams[0].inner)
    for one in streams:  # as if the roots of the variances did not change
        slope = one.scale / one.normalized()[1]
        top, bottom = top + (slope * one.inner).sum(0), bottom + slope.square().sum(0)
    table = top / bottom.clamp(min=1e-30)
    table = _within(_centered(table), limit)
    loss = _loss(streams, table)
    for _ in range(_STEPS):
        step = _step(streams, table)
        share = torch.ones_like(loss)
        for _ in range(_HALVINGS):
            tried = _loss(streams, _within(table + share * step, limit))
            worse = tried > loss
            if not worse.any():
                break
            share = torch.where(worse, share / 2, share)
        stepped = _within(table + share * step, limit)
        better = _loss(streams, stepped) < loss
        table = torch.where(better, stepped, table)
        before, loss = loss, _loss(streams, table)
        if float((before - loss).max()) <= 1e-15 * float(before.max()) or not better.any():
            break
    return table


def _loss(streams: Sequence[Stream], table: Tensor) -> Tensor:
    """Return the sum of squares of each token, (N, 1)."""
    return torch.stack([one.residual(table).square().sum((0, -1)) for one in streams]).sum(0)[:, None]


def _step(streams: Sequence[Stream], table: Tensor) -> Tensor:
    """Return the Gauss-Newton step of each token, (N, D)."""
    parts = [(one.scale, *one.normalized(table)) for one in streams]
    gradient = torch.zeros_like(table)
    for one, (scale, z, root) in zip(streams, parts, strict=True):
        gradient -= (_tangent(scale * one.residual(table), z) / root).sum(0)

    def product(v: Tensor) -> Tensor:
        found = torch.zeros_like(v)
        for scale, z, root in parts:
            found += (_tangent(scale * scale * _tangent(v[None], z), z) / root.square()).sum(0)
        return _centered(found)

    return _centered(_conjugate_gradients(product, _centered(gradient)))


def _centered(v: Tensor) -> Tensor:
    """Return v without its mean over the channels, to which norms are invariant; rounding would let it grow."""
    return v - v.mean(-1, keepdim=True)


def _within(v: Tensor, limit: Tensor) -> Tensor:
    """Shorten each token's row to at most its limit, (N, 1)."""
    share: Tensor = limit / v.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    return v * share.clamp(max=1)


def _tangent(v: Tensor, z: Tensor) -> Tensor:
    """Return the part of v that changes a normalized z, up to the division: v without its mean and its part along z."""
    return v - v.mean(-1, keepdim=True) - z * (z * v).mean(-1, keepdim=True)


def _conjugate_gradients(product: Callable[[Tensor], Tensor], target: Tensor) -> Tensor:
    """Solve product(x) = target, a symmetric positive system for each token, (N, D)."""
    found, rest = torch.zeros_like(target), target
    direction, size = rest, rest.square().sum(-1, keepdim=True)
    start = size.clamp(min=1e-300)
    for _ in range(min(_PRODUCTS, 2 * target.shape[-1])):
        image = product(direction)
        curvature = (direction * image).sum(-1, keepdim=True)
        length = torch.where(curvature > 0, size / curvature.clamp(min=1e-300), 0.0)
        found, rest = found + length * direction, rest - length * image
        before, size = size, rest.square().sum(-1, keepdim=True)
        if bool((size <= 1e-30 * start).all()):
            break
        direction = rest + size / before.clamp(min=1e-300) * direction
    return found
