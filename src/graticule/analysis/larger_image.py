r"""Causes of a change of accuracy at a larger image, one by one: number of tokens, content, and position values.

Logits of four forward passes; each differs from the pass before it in one respect:

- trained: the images at the training size;
- tokens: the same images, with patches repeated to fill the larger grid, each with the position of the patch that it
  repeats. Only the number of tokens has changed; without prefix tokens and with an integral factor, softmax attention
  over them and their mean are exactly those of the first pass;
- content: the larger images, whose patches show smaller parts of the content, with those positions;
- values: the larger images with the position that the encoding has for them, as the model is evaluated.

Functions of the tokens, such as a PEG, act on the tokens of each pass.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from graticule.backbones.base import Backbone
from graticule.external.backbone_view import BackboneView
from graticule.external.images import Size
from graticule.external.view import Unavailable, repeated
from graticule.position.grid import Grid

#: The passes of a larger image, each named by its change from the one before; `size_causes` of the task compares them.
PASSES = ("trained", "tokens", "content", "values")


def logits_of_passes(model: Any, images: Tensor, larger: Tensor) -> dict[str, Tensor]:
    """Return the logits of the four passes, and of 'log_n': the last pass with attention as sharp as in training.

    'log_n' multiplies the queries by ln N / ln N_0, where N and N_0 are the numbers of patches of the larger images and
    of the others; it is left out if the layers cannot multiply queries.

    Args:
        model: a backbone of one stage with a head.
        images: (B, C, height, width).
        larger: the same images at another size, with no smaller side.

    Raises:
        ValueError: for another model or a smaller image.
    """
    before, after = check_larger(model, size_of(images), size_of(larger))
    view = BackboneView(model)
    placed = view.repeated_from(size_of(images))
    found = {
        "trained": _logits(view, images),
        "tokens": _logits(placed, repeat_patches(images, before, after)),
        "content": _logits(placed, larger),
        "values": _logits(view, larger),
    }
    try:
        sharper = view.with_query_scale(math.log(max(after.patches, 2)) / math.log(max(before.patches, 2)))
    except Unavailable:
        return found
    return {**found, "log_n": _logits(sharper, larger)}


def check_larger(model: Any, size: Size, larger: Size) -> tuple[Grid, Grid]:
    """Return the grids of images of two sizes.

    Raises:
        ValueError: if the model is not a backbone of one stage with a head, or the second image is smaller.
    """
    if not isinstance(model, Backbone) or len(model.depths) != 1 or not model.num_classes:
        raise ValueError(
            "`model` must be a backbone of one stage with a head to find the causes of a difference between two sizes, "
            f"got {type(model).__name__}."
        )
    before, after = model.grid_at(size), model.grid_at(larger)
    if after.height < before.height or after.width < before.width:
        raise ValueError(
            f"`sizes` must be no smaller than the training size, {size[0]} x {size[1]}, on any side, to find the "
            f"causes of a difference, got {larger[0]} x {larger[1]}."
        )
    return before, after


def repeat_patches(images: Tensor, grid: Grid, larger: Grid) -> Tensor:
    """Repeat the patches of images (B, C, height, width) where a larger grid has more of them."""
    height, width = images.shape[-2] // grid.height, images.shape[-1] // grid.width
    patches = images.unflatten(-1, (grid.width, width)).unflatten(-3, (grid.height, height))  # (B, C, H, h, W, w)
    index = repeated(Grid(*larger.shape), Grid(*grid.shape)).to(images.device)
    patches = patches.transpose(-2, -3).flatten(2, 3)[:, :, index]  # (B, C, H' * W', h, w)
    rows = patches.unflatten(2, larger.shape).transpose(3, 4)  # (B, C, H', h, W', w)
    whole: Tensor = rows.flatten(4, 5).flatten(2, 3)
    return whole


def size_of(images: Tensor) -> Size:
    """Return (height, width) of images (..., height, width), in pixels."""
    return images.shape[-2], images.shape[-1]


def _logits(view: BackboneView, images: Tensor) -> Tensor:
    found = view.run(images).logits
    assert found is not None
    return found
