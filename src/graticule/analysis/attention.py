"""Attention maps: the score matrices that `scaled_dot_product_attention` never writes down, on demand."""

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

    Training and inference go through `scaled_dot_product_attention` all the same: each chosen layer computes
    its weights once more, beside its forward pass; of a model of timm a copy does without the fused kernel.

    Reference: CPVT (Chu et al., 2023), Figures 5 and 6.

    Args:
        model: one of our backbones, or another model whose blocks are found by structure, as timm's; it is left as it
            is, and looked at in evaluation mode.
        images: (B, C, height, width).
        layers: counted from 0 through all stages; all by default.
        without_position: look at the same weights without any position information.

    Raises:
        ValueError: if the model has no attention that is known, no such layers, or no position information to leave
            out.
    """
    view = view_of(model, (images.shape[-2], images.shape[-1]))
    if without_position:
        try:
            view = view.without_position()
        except Unavailable as error:
            raise ValueError(f"`without_position` must be False: {error}.") from None
    return view.attention(images, layers)
