"""Attention maps on demand: the score matrices that `scaled_dot_product_attention` does not return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from graticule.analysis.effect import standard_error
from graticule.analysis.similarity import Array
from graticule.external.attention_map import AttentionMap
from graticule.external.traced_model import view_of
from graticule.external.view import ModelView, Unavailable
from graticule.registry.checks import checked
from graticule.registry.fields import LayerIndex


@dataclass(frozen=True, eq=False)
class AttentionSummary:
    """Summary of the attention of patch queries, by layer and head.

    layers: counted from 0.
    distance: (layers, heads) mean, in patches of the layer's grid or window; NaN where a layer has fewer heads.
    distance_error: its standard error over images.
    entropy: in nats, mean over images; `uniform_entropy` is the largest possible, (layers,).
    prefix: the share on prefix tokens.
    uniform: the distance of a head that attends to all patches alike, (layers,).
    """

    layers: tuple[int, ...]
    distance: Array
    distance_error: Array
    entropy: Array
    prefix: Array
    uniform: Array
    uniform_entropy: Array


def attention_summary(view: ModelView, images: Tensor) -> AttentionSummary:
    """Summarize the attention weights of a few images (B, C, height, width), computed one image at a time."""
    first = view.attention(images[:1])  # all maps of all images would need too much memory
    numbers = [_numbers(first), *(_numbers(view.attention(image[None])) for image in images[1:])]
    distance, entropy, prefix = np.stack(numbers, -1)  # (layers, heads, images) each
    return AttentionSummary(
        layers=tuple(layer.layer for layer in first),
        distance=distance.mean(-1),
        distance_error=standard_error(distance),
        entropy=entropy.mean(-1),
        prefix=prefix.mean(-1),
        uniform=np.array([layer.uniform_distance for layer in first]),
        uniform_entropy=np.log([layer.keys.tokens for layer in first]),
    )


def _numbers(maps: Sequence[AttentionMap]) -> Array:
    """Return distance, entropy and share on prefix tokens of each layer and head of an image, (3, layers, heads)."""
    numbers = np.full((3, len(maps), max(layer.num_heads for layer in maps)), np.nan)
    for index, layer in enumerate(maps):
        for kind, values in enumerate((layer.distances(), layer.entropies(), layer.prefix_shares())):
            numbers[kind, index, : layer.num_heads] = values.mean(0)  # over windows
    return numbers


@checked
def attention_maps(
    model: nn.Module, images: Tensor, layers: Sequence[LayerIndex] | None = None, *, without_position: bool = False
) -> list[AttentionMap]:
    """Compute the attention weights of chosen layers of `model` on `images`.

    Training and inference still use `scaled_dot_product_attention`: each chosen layer computes its weights once more,
    in addition to its forward pass; for a timm model, a copy without the fused kernel does.

    Reference: CPVT (Chu et al., 2023), Figures 5 and 6.

    Args:
        model: one of our backbones, or another model of images, as of timm or transformers; not changed,
            and run in evaluation mode.
        images: (B, C, height, width).
        layers: counted from 0 through all stages; all by default.
        without_position: compute the weights without any position information.

    Raises:
        ValueError: if the model has no known attention, no such layers, or no position information to leave out.
    """
    view = view_of(model, (images.shape[-2], images.shape[-1]))
    if without_position:
        try:
            view = view.without_position()
        except Unavailable as error:
            raise ValueError(f"`without_position` must be False: {error}.") from None
    return view.attention(images, layers)
