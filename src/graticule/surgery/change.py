"""Change the encoding or joining of an existing model: fit the new position to the old one, and measure the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from graticule.backbones.base import Backbone
from graticule.backbones.registry import check_mixing
from graticule.checkpoints.obstacles import check_intact
from graticule.checkpoints.transfer import transfer
from graticule.hub.config import take_position
from graticule.position.folded import Folded
from graticule.position.layer import LayerPosition
from graticule.position.position import ENCODINGS
from graticule.position.rotation import PairRotation
from graticule.registry.checks import check
from graticule.registry.specs import Spec
from graticule.surgery.fits.biases import bias_table, table_logits
from graticule.surgery.fits.contributions import share_kept, table_contributions
from graticule.surgery.fits.registry import Before, Fit, fit_position
from graticule.system.tables import format_table, report_json


class Share(NamedTuple):
    """Share of a term of the old position that a layer keeps.

    layer: index of the layer, counted through all stages.
    term: the term of the old position, and its form in the new one.
    kept: 1 - |old - new|^2 / |old|^2: 1 if nothing is lost, 0 if nothing is left, negative if the new term is farther
        from the old one than zero is. None if the two cannot be compared.
    """

    layer: int
    term: str
    kept: float | None


def measure(before: Before, after: Sequence[LayerPosition], first: int = 0) -> list[Share]:
    """Compare the new position of each layer of a stage with the old one.

    An old table in the residual stream is compared with the sum of the new tables in it up to the layer. If the new one
    is added after norms or to queries and keys, the comparison is with the contribution of the old table there
    (`Contribution`), over the images; for a bias, with the logits that the old table added (`table_logits`). Biases and
    logits are compared without the mean over the keys of each query, to which a softmax is invariant.

    `after` has the new positions of the layers of the stage; `first` is the index of the first one.
    """
    shares = []
    table = before.positions[0].added_to_stream if before.positions else None
    stream: Tensor | None = None
    for index, (old, new) in enumerate(zip(before.positions, after, strict=True)):
        layer = first + index
        if new.added_to_stream is not None:
            stream = new.added_to_stream if stream is None else stream + new.added_to_stream
        if table is not None:
            shares.append(Share(layer, *_compare_table(table, stream, new, before, index)))
        for field in ("after_norm", "queries_keys"):
            was, now = getattr(old, field), getattr(new, field)
            if was is not None and now is None and stream is not None:
                shares.append(Share(layer, f"{field}, from the stream", None))
            elif was is not None:
                shares.append(Share(layer, field, 0.0 if now is None else _compare(was, now)))
        if old.bias is not None:
            was = bias_table(old, before.grid)
            share = 0.0 if new.bias is None and was is not None else _compare_logits(was, bias_table(new, before.grid))
            shares.append(Share(layer, "bias", share))
        if old.rotary is not None:
            share = 0.0 if new.rotary is None else None
            if isinstance(old.rotary, PairRotation) and isinstance(new.rotary, PairRotation):
                share = _compare(old.rotary.table, new.rotary.table) if old.rotary[1:] == new.rotary[1:] else None
            shares.append(Share(layer, "rotation", share))
    return shares


def _compare_table(
    table: Tensor, stream: Tensor | None, new: LayerPosition, before: Before, index: int
) -> tuple[str, float | None]:
    """Return the form of an old table in the new position of a layer, and the share that is kept."""
    contribution = before.contributions[index]
    if stream is not None:
        return "table in the stream", _compare(table, stream)
    for field, where in (("after_norm", "after the norm"), ("queries_keys", "in queries and keys")):
        constant = getattr(new, field)
        if constant is not None:
            comparable = contribution is not None and constant.shape == contribution.mean.shape
            share = contribution.kept(constant.double()) if contribution is not None and comparable else None
            return f"table {where}", share
    share = _compare_logits(table_logits(contribution, before.grid), bias_table(new, before.grid))
    if share is not None:
        return "table in the logits", share
    return "table", 0.0 if new.bias is None and new.rotary is None else None


def _compare(old: Tensor, new: Tensor) -> float | None:
    """Return the share of `old` that is kept; None if the two have other shapes."""
    if old.shape[-2:] != new.shape[-2:] or old.ndim != new.ndim:
        return None
    old, new = torch.broadcast_tensors(old.double(), new.double())  # one for each head, or one for all
    return share_kept(old.square().sum(), (old - new).square().sum())


def _compare_logits(old: Tensor | None, new: Tensor | None) -> float | None:
    """Return the share of logits that is kept, without their mean over the keys; None if they are not known."""
    if old is None or new is None or old.shape != new.shape:
        return None
    return _compare(old - old.mean(-1, keepdim=True), new - new.mean(-1, keepdim=True))


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
    def kept(self) -> float | None:
        """The mean over layers of the least share that a layer keeps of a term; None if nothing was compared."""
        layers: dict[int, float] = {}
        for share in self.shares:
            if share.kept is not None:
                layers[share.layer] = min(share.kept, layers.get(share.layer, share.kept))
        return sum(layers.values()) / len(layers) if layers else None

    @property
    def harmful(self) -> list[int]:
        """The layers where a new term is farther from the old one than zero is."""
        return sorted({share.layer for share in self.shares if share.kept is not None and share.kept < 0})

    def __str__(self) -> str:
        several = len({fit.stage for fit in self.fits}) > 1
        lines = [
            f"{f'stage {fit.stage}: ' if several else ''}{fit.old} -> {fit.new}: "
            f"{'fitted' if fit.fitted else f'not fitted, {fit.why}' if fit.why else 'not fitted, as initialized'}"
            for fit in self.fits
        ]
        rows = [(str(s.layer), s.term, "-" if s.kept is None else f"{s.kept:.4f}") for s in self.shares]
        lines += ["", format_table([("layer", "term", "kept"), *rows])] if self.shares else []
        if self.harmful:
            lines += [f"warning: {_WORSE} in layer {', '.join(map(str, self.harmful))}; encoding='none' may keep more"]
        rows = [(str(d.layer), f"{d.error:.3e}", f"{d.cosine:.6f}") for d in self.drift]
        lines += ["", format_table([("layer", "relative error", "cosine"), *rows])] if self.drift else []
        return "\n".join(lines)

    def summary(self) -> str:
        """Return in a few words which share of the old position the layers keep."""
        shares = [share.kept for share in self.shares if share.kept is not None]
        worse = f"; warning: {_WORSE} in {len(self.harmful)} layers" if self.harmful else ""
        if self.lost or not shares:
            return f"nothing is kept{worse}"
        low, high = f"{min(shares):.3f}", f"{max(shares):.3f}"
        return f"layers keep {low if low == high else f'{low} to {high}'}{worse}"

    to_json = report_json


def features(model: Backbone, images: Tensor) -> list[Tensor]:
    """Return the tokens after each layer, (B, N, D) each."""
    return [tokens for tokens, _ in model.each_layer(images)]


def drift_of(before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[Drift, ...]:
    """Compare the tokens after each layer; if their numbers differ, only the last ones, which are the patches."""
    drifts = []
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        patches = min(old.shape[1], new.shape[1])
        was, now = (tokens[:, -patches:].double() for tokens in (old, new))
        norm = was.norm()
        error = float((now - was).norm() / norm) if norm else float(bool(now.any()))
        drifts.append(Drift(layer, error, float(torch.cosine_similarity(was, now, dim=-1).mean())))
    return tuple(drifts)


Model = TypeVar("Model", bound=Backbone)


@torch.no_grad()
def change_position(
    model: Model,
    encoding: str | Spec,
    joining: str | Spec = "default",
    images: Tensor | None = None,
    least: float | None = None,
) -> Model:
    """Replace the position encoding of `model`, in place, and return the model.

    All other weights are unchanged. Parameters that the old and the new encoding have in common, such as an absolute
    table, are kept, and stay frozen if they were frozen. The others are fitted to the old position by least squares if
    there is a fit (`graticule.surgery.fits`), and are otherwise new. `model.certificate` reports the fits, the share of
    the old position that each layer keeps, and, with `images`, the drift of the features.

    The contribution of a table to a layer is measured on `images`, or else on the mean image, all zeros.

    Args:
        model: one of our backbones, not folded.
        encoding: as in `create_model`.
        joining: as in `create_model`.
        images: preprocessed images (B, C, height, width), of the size that the model is built for.
        least: the share of the old position that the layers must keep in the mean (`Certificate.kept`), such as 0 to
            refuse a position that is farther from the old one than none is; by default any.

    Raises:
        ValueError: if the model cannot use them, the images are of another size, or less is kept than `least`. The
            model is then unchanged.
    """
    images = _check(model, images)
    check_mixing(type(model), encoding)
    blank = torch.zeros(1, model.in_chans, *model.img_size).to(next(model.parameters()))
    old, modes = model.position, [(part, part.training) for part in model.modules()]
    attributes = {name: getattr(model, name) for name in ("position", "created", "converted_from")}
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    model.eval()
    try:
        weights = model.state_dict()
        before = _record(model, blank if images is None else images)
        tokens = [] if images is None else features(model, images)
        model.replace_position(
            take_position({"encoding": encoding, "joining": joining}, defaults=model.encoding_options)
        )
        transfer(model, weights)
        for name, value in model.named_parameters():
            value.requires_grad_(value.requires_grad and name not in frozen)
        fits = fit_position(model.position, old, before)
        layers, shares, first = iter(model.position(model.grid)), [], 0
        for stage in before:
            shares += measure(stage, [*islice(layers, len(stage.positions))], first)
            first += len(stage.positions)
        drift = () if images is None else drift_of(tokens, features(model, images))
        certificate = Certificate(tuple(fits), tuple(shares), drift)
        if least is not None and certificate.kept is not None and certificate.kept < least:
            raise ValueError(
                f"`encoding` must keep at least {least} of the old position, got "
                f"{' + '.join(map(str, ENCODINGS.specs(encoding)))}, which keeps {certificate.kept:.3f} in the mean of "
                f"the layers; {certificate.summary()}. Give another, or lower `least` (graticule adapt has --anyway)."
            )
    except ValueError:
        for name, value in attributes.items():
            setattr(model, name, value)
        raise
    finally:
        model.position.train(modes[0][1])
        for part, training in modes:
            part.training = training
    model.certificate = certificate
    return model


def _check(model: Backbone, images: Tensor | None) -> Tensor | None:
    """Check the arguments of `change_position`, and return the images on the device of the model."""
    if not isinstance(model, Backbone):
        raise ValueError(
            f"`model` must be one of our backbones, got {type(model).__name__}; graticule.convert makes one of a "
            "model of timm, with another position if you name it."
        )
    check_intact(model, "quantized")
    if isinstance(model.position, Folded):
        raise ValueError("`model` must not be folded, to get another position; call graticule.unfold(model) first.")
    if images is None:
        return None
    check("images", images, Tensor)
    sizes = (model.in_chans, *model.img_size)
    if images.ndim != 1 + len(sizes) or not len(images) or images.shape[1:] != sizes:
        raise ValueError(
            f"`images` must be (B, {', '.join(map(str, sizes))}), of the size of the model, got {tuple(images.shape)}."
        )
    if not images.is_floating_point():
        raise ValueError(f"`images` must be preprocessed as for the model, in floating point, got {images.dtype}.")
    if not images.isfinite().all():
        raise ValueError("`images` must be finite, got NaN or infinity.")
    return images.to(next(model.parameters()))


def _record(model: Backbone, images: Tensor) -> list[Before]:
    """Record the state of each stage, and measure the contributions of its table to its layers."""
    layers = zip(model.position(model.grid), table_contributions(model, images), strict=True)
    states = []
    for grid, depth in zip(model.position_grids(model.grid), model.depths, strict=True):
        positions, contributions = zip(*islice(layers, depth), strict=True)
        states.append(Before(grid, positions, contributions))
    return states
