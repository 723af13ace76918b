"""Tables in the residual stream: their contributions to the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.backbones.mvit import PoolingAttention
from graticule.backbones.window_attention import WindowAttention
from graticule.layers.attention import Attention
from graticule.position.rotation import Rotation

#: Batch size.
_BATCH = 8
#: Maximum number of images, as their tokens are stored for each layer, and of tokens for the fit of rotations.
_IMAGES, _TOKENS = 8, 128


@dataclass(frozen=True)
class Projections:
    """Queries and keys of some tokens of some images, (B, n, 2 D) each.

    before: of the layer's input LN(x), with the table w in the residual stream.
    without: of LN(x - w).
    bias: the bias of the projections then, (2 D,); None if there is none.
    index: the tokens, (n,): the first, mostly the class token, and some others.
    """

    before: Tensor
    without: Tensor
    bias: Tensor | None
    index: Tensor

    def logits(self, attention: Any, rotation: Rotation | None, constant: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the logits before, without the table, and without it but rotated, (B, h, n, n) each.

        They have no mean over the keys of each query, to which a softmax is invariant.

        Args:
            attention: the attention of the layer.
            rotation: the rotation of the tokens of `index`.
            constant: is added to queries and keys before the rotation, (2 D,); by default the change of the bias.
        """
        if constant is None and self.bias is not None:
            constant = attention.qkv.bias[: len(self.bias)] - self.bias
        moved = self.without if constant is None else self.without + constant

        def logits(projected: Tensor, rotation: Rotation | None = None) -> Tensor:
            queries, keys = (
                each.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for each in projected.chunk(2, -1)
            )
            if rotation is not None:
                queries, keys = rotation(queries, keys)
            found: Tensor = queries @ keys.mT * attention.scale
            return found - found.mean(-1, keepdim=True)

        return logits(self.before), logits(self.without), logits(moved, rotation)


def is_plain(attention: nn.Module) -> bool:
    """Return True if logits are products of the projected queries and keys of all tokens, without further changes."""
    if not isinstance(attention, Attention) or isinstance(attention, WindowAttention | PoolingAttention):
        return False  # it attends to some pairs only, or to pooled tokens
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return attention.logit_scale is None and all(norm is None or isinstance(norm, nn.Identity) for norm in norms)


def share_kept(whole: Tensor, lost: Tensor) -> float:
    """Return 1 - lost / whole, of sums of squares; if the whole is zero, whether nothing is lost."""
    return 1 - float(lost) / float(whole) if whole else float(not lost)


@dataclass(frozen=True)
class Contribution:
    r"""Contribution of a table w in the residual stream to the input of a layer, over images.

    The layer gets :math:`LN(x)` with x = x' + w. Without w in the residual stream it would get :math:`LN(x - w)`, so w
    contributes

    .. math:: d = LN(x) - LN(x - w)

    which is the exact difference, not its linear part. The constant c per token with the least squared distance from d
    over the images is its mean. So a joining that adds c after the norm, with w removed from the residual stream, gives
    the layer the same input, up to the share of d that varies between images.

    mean: the mean of d, (N, D).
    square: the mean of the squared norm of d over all tokens and channels.
    inputs: the mean of LN(x), (N, D).
    attention: the attention of the layer.
    projections: queries and keys of some images, if logits are their products (`is_plain`).
    """

    mean: Tensor
    square: float
    inputs: Tensor
    attention: nn.Module
    projections: Projections | None = None

    def kept(self, constant: Tensor) -> float:
        """Return the share of d that is kept if the layer gets `constant`, (N, D), instead."""
        if not self.square:
            return float(not constant.any())
        lost = self.square - 2 * (self.mean * constant).sum() + constant.square().sum()
        return 1 - float(lost) / self.square


def table_contributions(model: Backbone, images: Tensor) -> list[Contribution | None]:
    """Measure the contributions of each stage's table to its layers; None if nothing is added before the stage.

    Args:
        model: a model with the joining 'default'.
        images: (B, C, height, width), of the size that the model is built for.
    """
    given = model.position(model.grid)
    layers: list[tuple[Tensor, nn.Module, nn.Module] | None] = []
    for blocks in entered_blocks(model):
        table = given[len(layers)].pre
        layers += [
            (table, block.norm1, getattr(block, "attn", block)) if table is not None and is_pre_norm(block) else None
            for block in blocks
        ]

    def run() -> None:
        for batch in images.split(_BATCH):
            model.forward_features(batch)

    return record_contributions(layers, run)


def record_contributions(
    layers: Sequence[tuple[Tensor, nn.Module, nn.Module] | None], run: Callable[[], object], batch_axis: int = 0
) -> list[Contribution | None]:
    """Measure the contributions of tables to layers while `run` calls the model.

    Args:
        layers: of each layer the table in the residual stream, (N, D), the norm of its input, and its attention; None
            if there is no table.
        run: calls the model, once or several times.
        batch_axis: axis of the images in the input of the norms, 0 for (B, N, D) and 1 for (N, B, D).
    """
    sums = [None if layer is None else _Sums(layer[0], layer[2], batch_axis) for layer in layers]
    hooks = [
        layer[1].register_forward_hook(partial(_record, one))
        for layer, one in zip(layers, sums, strict=True)
        if layer is not None and one is not None
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return [None if one is None else one.contribution() for one in sums]


def entered_blocks(model: Backbone) -> list[list[Any]]:
    """Return the blocks of each stage of the position: those whose input tokens have the same grid."""
    blocks = [model.block(stage, index) for stage, depth in enumerate(model.depths) for index in range(depth)]
    entered = model.entered_stages()
    return [[block for at, block in zip(entered, blocks, strict=True) if at == stage] for stage in sorted(set(entered))]


def is_pre_norm(block: nn.Module) -> bool:
    """Return True if a block adds its position after a norm of the residual stream (`Block.pre_norm`)."""
    return getattr(block, "pre_norm", False)


class _Sums:
    """Sums, over the images, of the inputs and contributions of a layer."""

    def __init__(self, table: Tensor, attention: nn.Module, batch_axis: int) -> None:
        self.table, self.attention, self.batch_axis = table, attention, batch_axis
        self.count = 0
        self.projected: list[Tensor] = []
        self.index = torch.zeros(0)
        self.square = 0.0
        self.mean: Tensor = torch.zeros((), dtype=torch.float64, device=table.device)
        self.inputs = self.mean

    def contribution(self) -> Contribution:
        """Return the means."""
        found = None
        if self.projected:
            attention: Any = self.attention
            before, without = torch.cat(self.projected, 1)
            bias = getattr(attention.qkv, "bias", None)
            bias = None if bias is None else bias.detach()[: before.shape[-1]].clone()
            found = Projections(before, without, bias, self.index)
        means = (self.mean / self.count, self.square / self.count, self.inputs / self.count)
        return Contribution(*means, self.attention, found)

    def project(self, output: Tensor, without: Tensor) -> None:
        """Keep the queries and keys of some tokens of the first images."""
        attention: Any = self.attention
        left = _IMAGES - sum(one.shape[1] for one in self.projected)
        if left <= 0 or not is_plain(attention):
            return
        if not self.projected:
            drawn = torch.randperm(output.shape[1] - 1, generator=torch.Generator().manual_seed(0))[:_TOKENS]
            self.index = torch.cat([torch.zeros(1, dtype=torch.long), 1 + drawn.sort().values]).to(output.device)
        pair = torch.stack([one[:left, self.index] for one in (output, without)])
        projected = attention.qkv(pair)
        self.projected.append(projected[..., : projected.shape[-1] // 3 * 2])


def _record(sums: _Sums, norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    x, output = (each.transpose(0, sums.batch_axis) for each in (args[0], output))
    prefix = x.shape[1] - len(sums.table)  # tokens that joined later and have no row
    without = norm.forward(x - F.pad(sums.table, (0, 0, prefix, 0)))  # not called, so that no hook sees it
    with_it = output[:, prefix:].double()
    difference = with_it - without[:, prefix:].double()
    sums.project(output[:, prefix:], without[:, prefix:])
    sums.count += len(x)
    sums.mean = sums.mean + difference.sum(0)
    sums.inputs = sums.inputs + with_it.sum(0)
    sums.square += float(difference.square().sum())
