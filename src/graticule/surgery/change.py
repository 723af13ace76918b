"""Change the encoding or joining of an existing model, and fit the new position to the old one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from graticule.backbones.base import Backbone
from graticule.checkpoints.transfer import transfer
from graticule.hub.config import take_position
from graticule.position.folded import Folded
from graticule.registry.specs import Spec
from graticule.surgery.fits.contributions import entered_blocks, table_contributions
from graticule.surgery.fits.measure import Share, measure
from graticule.surgery.fits.registry import Before, Fit, fit_position
from graticule.surgery.fits.streams import inner_streams


class Drift(NamedTuple):
    """Drift of the tokens after a layer, measured on images.

    layer: index of the layer, counted through all stages.
    error: the norm of the difference divided by the norm before, over all tokens and images together.
    cosine: the mean over tokens of the cosine between before and after.
    """

    layer: int
    error: float
    cosine: float


_WORSE = "the new position is farther from the old one than none is"


@dataclass(frozen=True)
class Certificate:
    """Report of a change of position.

    fits: for each part of the new position, whether it was fitted to the old one.
    shares: the share of the old position that each layer keeps.
    drift: the drift of the features; empty if no images were given.
    """

    fits: tuple[Fit, ...]
    shares: tuple[Share, ...]
    drift: tuple[Drift, ...] = ()

    @property
    def lost(self) -> bool:
        """Return True if there was a position, and no layer keeps anything of it."""
        return bool(self.shares) and not any(share.kept is not None and share.kept > 0 for share in self.shares)

    @property
    def harmful(self) -> list[int]:
        """The layers of which some new term is farther from the old one than zero is."""
        return sorted({share.layer for share in self.shares if share.kept is not None and share.kept < 0})

    def __str__(self) -> str:
        """Return the report as tables of text."""
        several = len({fit.stage for fit in self.fits}) > 1
        lines = [
            f"{f'stage {fit.stage}: ' if several else ''}{fit.old} -> {fit.new}: "
            f"{'fitted' if fit.fitted else f'not fitted, {fit.why}' if fit.why else 'not fitted, as initialized'}"
            for fit in self.fits
        ]
        rows = [("layer", "term", "kept")]
        rows += [(str(s.layer), s.term, "-" if s.kept is None else f"{s.kept:.4f}") for s in self.shares]
        lines += ["", *_columns(rows)] if self.shares else []
        if self.harmful:
            lines += [f"warning: {_WORSE} in layer {', '.join(map(str, self.harmful))}; encoding='none' may keep more"]
        moved = [("layer", "relative error", "cosine")]
        moved += [(str(d.layer), f"{d.error:.3e}", f"{d.cosine:.6f}") for d in self.drift]
        lines += ["", *_columns(moved)] if self.drift else []
        return "\n".join(lines)

    def summary(self) -> str:
        """Return in a few words which share of the old position the layers keep."""
        found = [share.kept for share in self.shares if share.kept is not None]
        worse = f"; warning: {_WORSE} in {len(self.harmful)} layers" if self.harmful else ""
        if self.lost or not found:
            return f"nothing is kept{worse}"
        low, high = f"{min(found):.3f}", f"{max(found):.3f}"
        return f"layers keep {low if low == high else f'{low} to {high}'}{worse}"

    def to_json(self) -> str:
        """Return the report as JSON."""
        found = {
            "fits": [asdict(fit) for fit in self.fits],
            "shares": [share._asdict() for share in self.shares],
            "drift": [drift._asdict() for drift in self.drift],
        }
        return json.dumps(found, indent=1)


def _columns(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    first, second, third = (max(len(row[i]) for row in rows) for i in range(3))
    return [f"{a:>{first}}  {b:<{second}}  {c:>{third}}" for a, b, c in rows]


def features(model: Backbone, images: Tensor) -> list[Tensor]:
    """Return the tokens after each layer, (B, N, D) each."""
    return [tokens for tokens, _ in model.each_layer(images)]


def drift_of(before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[Drift, ...]:
    """Compare the tokens after each layer; if their numbers differ, only the last ones, which are the patches."""
    found = []
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        patches = min(old.shape[1], new.shape[1])
        a, b = (each[:, -patches:].double() for each in (old, new))
        norm = a.norm()
        error = float((b - a).norm() / norm) if norm else float(bool(b.any()))
        found.append(Drift(layer, error, float(torch.cosine_similarity(a, b, dim=-1).mean())))
    return tuple(found)


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
