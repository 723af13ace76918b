"""The explorer: a page that shows, for a chosen token of an image, the maps of its position in each layer."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor, nn

from graticule.analysis.any_view import view_of
from graticule.analysis.explorer_data import Explored
from graticule.analysis.explorer_maps import explorer_maps
from graticule.analysis.pixels import pixels_of
from graticule.checks import checked

#: Smaller pictures are enlarged to about this many pixels, without smoothing.
_SIDE = 224


@checked
def explored(
    model: nn.Module,
    images: Sequence[Tensor],
    mean: Sequence[float],
    std: Sequence[float],
    label: str,
    title: str = "",
) -> Explored:
    """Compute the maps and images of a model for the explorer; `write_explorer` makes a page of one or two models.

    Args:
        model: one of our backbones, or another model whose blocks are found by structure, as in timm; not changed.
        images: for each size of the images, (B, C, height, width), normalized; the same images in each. The first size
            is shown first.
        mean: of each channel, as used to normalize the images.
        std: of each channel.
        label: a short name.
        title: description of the model.

    Raises:
        ValueError: if there are no images, the model refuses a size, or it has no maps of position or attention.
    """
    if not images or any(len(one) != len(images[0]) or not len(one) for one in images):
        counts = [len(one) for one in images]
        raise ValueError(f"`images` must have the same number at each size, at least one, got {counts or 'no sizes'}.")
    sizes = [explorer_maps(view_of(model, (one.shape[-2], one.shape[-1])), one) for one in images]
    return Explored(label, title, sizes, [[_png(image, mean, std) for image in one] for one in images])


def _png(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> bytes:
    """Return an image (C, height, width) as a PNG file, in gray unless it has three channels."""
    drawn = Image.fromarray((pixels_of(image, mean, std) * 255).round().astype(np.uint8))
    factor = max(1, _SIDE // min(drawn.size))
    enlarged = drawn.resize((drawn.width * factor, drawn.height * factor), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    enlarged.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
