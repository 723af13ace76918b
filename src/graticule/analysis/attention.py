"""Attention maps on demand: the score matrices that `scaled_dot_product_attention` does not return."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from graticule.analysis.any_view import view_of
from graticule.analysis.attention_map import AttentionMap
from graticule.analysis.view import Unavailable
from graticule.checks import checked


@checked
def attention_maps(
    model: nn.Module, images: Tensor, layers: Sequence[int] | None = None, *, without_position: bool = False
) -> list[AttentionMap]:
    """Compute the attention weights of chosen layers of `model` on `images`.

    Training and inference still use `scaled_dot_product_attention`: each chosen layer computes its weights once more,
    in addition to its forward pass; for a timm model, a copy without the fused kernel does.

    Reference: CPVT (Chu et al., 2023), Figures 5 and 6.

    Args:
        model: one of our backbones, or another model whose blocks are found by structure, as in timm; not changed,
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
