"""Change the encoding or joining of an existing model, and fit the new position to the old one."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from graticule.backbones import Backbone
from graticule.backbones.arguments import take_position
from graticule.checkpoints import transfer
from graticule.encodings import Folded
from graticule.specs import Spec
from graticule.surgery.certificate import Certificate, drift_of, features
from graticule.surgery.fits import fit_position, measure, table_contributions
from graticule.surgery.fits.contributions import entered_blocks
from graticule.surgery.fits.registry import Before
from graticule.surgery.fits.streams import inner_streams

Model = TypeVar("Model", bound=Backbone)


@torch.no_grad()
def change_position(
    model: Model, encoding: str | Spec, joining: str | Spec = "default", images: Tensor | None = None
) -> Model:
    """Replace the position of `model` by a new one, in place, and return the model.

    All weights outside of the position are unchanged. Parameters that both positions have are kept, such as the table
    of an absolute encoding. The others are fitted to the old position by least squares if there is a fit
    (`graticule.surgery.fits`), and are otherwise new. `model.certificate` reports the fits, the share of the old
    position that each layer keeps, and, with `images`, the drift of the features.

    The contribution of a table to a layer is measured on `images`, or else on the mean image, all zeros.

    Args:
        model: one of our backbones, not folded.
        encoding: as in `create_model`.
        joining: as in `create_model`.
        images: preprocessed images (B, C, height, width), of the size that the model is built for.

    Raises:
        ValueError: if the model cannot use them, or the images are of another size. The model is then unchanged.
    """
    if not isinstance(model, Backbone):
        raise ValueError(
            f"`model` must be one of our backbones, got {type(model).__name__}; graticule.convert makes one of a "
            "model of timm, with another position if you name it."
        )
    if isinstance(model.position, Folded):
        raise ValueError("`model` must not be folded, to get another position; call graticule.unfold(model) first.")
    blank = _blank(model)
    if images is not None and (images.ndim != 4 or not len(images) or images.shape[1:] != blank.shape[1:]):
        channels, height, width = blank.shape[1:]
        raise ValueError(
            f"`images` must be (B, {channels}, {height}, {width}), of the size of the model, got {tuple(images.shape)}."
        )
    if images is not None and not images.is_floating_point():
        raise ValueError(f"`images` must be preprocessed as for the model, in floating point, got {images.dtype}.")
    if images is not None and not images.isfinite().all():
        raise ValueError("`images` must be finite, got NaN or infinity.")
    given = {"encoding": encoding, "joining": joining}
    weights, old, training = model.state_dict(), model.position, model.training
    model.eval()
    try:
        seen = blank if images is None else images.to(blank)
        before = _before(model, seen)
        was = [] if images is None else features(model, seen)
        model.replace_position(take_position(given, defaults=model.encoding_options))
        transfer(model, weights)
        fits = fit_position(model.position, old, before)
        shares, first = [], 0
        after = model.position(model.grid)
        for stage in before:
            depth = len(stage.given)
            shares += measure(stage, after[first : first + depth], first)
            first += depth
        drift = drift_of(was, features(model, seen)) if was else ()
    finally:
        model.train(training)
    model.certificate = Certificate(tuple(fits), tuple(shares), drift)
    return model


def _blank(model: Backbone) -> Tensor:
    weight = next(model.parameters())
    return torch.zeros(1, model.in_chans, *model.img_size, dtype=weight.dtype, device=weight.device)


def _before(model: Backbone, images: Tensor) -> list[Before]:
    """Record the state of each stage, and measure the contributions of its table to its layers."""
    contributions = table_contributions(model, images)
    given, first, found = model.position(model.grid), 0, []
    streams = inner_streams(model, images, given)
    for grid, blocks, stream in zip(model.position_grids(model.grid), entered_blocks(model), streams, strict=True):
        last = first + len(blocks)
        found.append(Before(grid, given[first:last], contributions[first:last], streams=stream))
        first = last
    return found
