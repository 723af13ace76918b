"""Tables in the residual stream: their contributions to the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.backbones.window_attention import WindowAttention
from graticule.layers.attention import Attention

#: Batch size.
_BATCH = 8
#: A table in the residual stream, the norm before attention, and the projection of that.
Layer = tuple[Tensor, nn.Module, "Projection | None"]


class Projection(NamedTuple):
    """Attention whose logits are products of queries and keys without further changes.

    project: from normalized tokens, (N, D), to their queries and keys side by side, (N, 2 D).
    num_heads: h.
    scale: of the products.
    """

    project: Callable[[Tensor], Tensor]
    num_heads: int
    scale: float


def projection_of(attention: Any, parts: Sequence[Any], dim: int, num_heads: int) -> Projection | None:
    """Return the projection of an attention, by modules whose outputs start with queries and keys when joined.

    It is None if there are no such modules, or if the attention changes queries or keys further.
    """
    changes = (getattr(attention, name, None) for name in ("q_norm", "k_norm", "q_bias", "logit_scale"))
    if not parts or not num_heads or dim % num_heads or any(not isinstance(x, nn.Identity | None) for x in changes):
        return None
    dtype = next(attention.parameters()).dtype

    def project(x: Tensor) -> Tensor:
        return torch.cat([part(x.to(dtype)) for part in parts], -1)[..., : 2 * dim]

    return Projection(project, num_heads, (dim / num_heads) ** -0.5)


def share_kept(total: Tensor | float, lost: Tensor) -> float:
    """Return 1 - lost / total, of sums of squares; if the total is zero, whether nothing is lost."""
    return 1 - float(lost) / float(total) if total else float(not lost)


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
    projection: the projection of the layer's attention to queries and keys; None if its logits are others.
    """

    mean: Tensor
    square: float
    inputs: Tensor
    projection: Projection | None

    def kept(self, constant: Tensor) -> float:
        """Return the share of d that is kept if the layer gets `constant`, (N, D), instead."""
        lost = self.square - 2 * (self.mean * constant).sum() + constant.square().sum()
        return share_kept(self.square, lost)


def table_contributions(model: Backbone, images: Tensor) -> list[Contribution | None]:
    """Measure the contributions of each stage's table to its layers; None if nothing is added before the stage.

    Args:
        model: a model with the joining 'default'.
        images: (B, C, height, width), of the size that the model is built for.
    """
    positions = model.position(model.grid)
    layers: list[Layer | None] = []
    for stage, depth in enumerate(model.depths):
        table = positions[len(layers)].added_to_stream
        for index in range(depth):
            block: Any = model.block(stage, index)
            if table is None or not is_pre_norm(block):
                layers.append(None)
                continue
            attention: Any = getattr(block, "attn", None)
            is_plain = isinstance(attention, Attention) and not isinstance(attention, WindowAttention)  # of all pairs
            projection = None
            if is_plain:
                projection = projection_of(attention, [attention.qkv], table.shape[-1], attention.num_heads)
                projection = projection and projection._replace(scale=attention.scale)
            layers.append((table, block.norm1, projection))

    def run() -> None:
        for batch in images.split(_BATCH):
            model.forward_features(batch)

    return record_contributions(layers, run)


def record_contributions(
    layers: Sequence[Layer | None], run: Callable[[], object], batch_axis: int = 0
) -> list[Contribution | None]:
    """Measure the contributions of tables to layers while `run` calls the model, once or several times.

    Of each layer with a table in the residual stream, (N, D), `layers` has the table, the norm of its input, (B, N, D)
    or with `batch_axis=1` (N, B, D), and the projection of its attention.
    """
    sums = [None if layer is None else _Sums(layer[0], layer[2], batch_axis) for layer in layers]
    pairs = [(layer[1], total) for layer, total in zip(layers, sums, strict=True) if layer and total]
    hooks = [norm.register_forward_hook(total.add) for norm, total in pairs]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return [None if total is None else total.contribution() for total in sums]


def is_pre_norm(block: nn.Module) -> bool:
    """Return True if a block adds its position after a norm of the residual stream (`Block.pre_norm`)."""
    return getattr(block, "pre_norm", False)


class _Sums:
    """Sums, over the images, of the inputs and contributions of a layer."""

    def __init__(self, table: Tensor, projection: Projection | None, batch_axis: int) -> None:
        self.table, self.projection, self.batch_axis = table, projection, batch_axis
        self.count, self.square = 0, 0.0
        self.mean: Tensor = torch.zeros((), dtype=torch.float64, device=table.device)
        self.inputs = self.mean

    def add(self, norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Add the images of a forward pass, as a hook of the norm of the layer."""
        x, output = (tokens.transpose(0, self.batch_axis) for tokens in (args[0], output))
        prefix = x.shape[1] - len(self.table)  # tokens that joined later and have no row
        without = norm.forward(x - F.pad(self.table, (0, 0, prefix, 0)))  # not called, so that no hook sees it
        with_it = output[:, prefix:].double()
        difference = with_it - without[:, prefix:].double()
        self.count += len(x)
        self.mean = self.mean + difference.sum(0)
        self.inputs = self.inputs + with_it.sum(0)
        self.square += float(difference.square().sum())

    def contribution(self) -> Contribution:
        """Return the means."""
        return Contribution(self.mean / self.count, self.square / self.count, self.inputs / self.count, self.projection)
