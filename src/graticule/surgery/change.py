"""Change the encoding or joining of an existing model: fit the new position to the old one, and measure the loss."""

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
from graticule.position.layer import LayerPosition
from graticule.position.position import ENCODINGS
from graticule.position.rotation import PairRotation
from graticule.registry.specs import Spec
from graticule.surgery.fits.biases import bias_table, table_logits
from graticule.surgery.fits.contributions import entered_blocks, share_kept, table_contributions
from graticule.surgery.fits.registry import Before, Fit, fit_position
from graticule.surgery.freeze import check_floating


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

    Args:
        before: the state of the stage with the old position.
        after: the new positions of its layers.
        first: index of the first layer of the stage.
    """
    shares = []
    table = before.given[0].pre if before.given else None
    stream: Tensor | None = None
    for index, (old, new) in enumerate(zip(before.given, after, strict=True)):
        layer = first + index
        if new.pre is not None:
            stream = new.pre if stream is None else stream + new.pre
        if table is not None:
            shares.append(Share(layer, *_of_table(table, stream, new, before, index)))
        for field in ("inner", "queries_keys"):
            a, b = getattr(old, field), getattr(new, field)
            if a is not None and b is None and stream is not None:
                shares.append(Share(layer, f"{field}, from the stream", None))
            elif a is not None:
                shares.append(Share(layer, field, 0.0 if b is None else _kept(a, b)))
        if old.bias is not None:
            was, now = bias_table(old, before.grid), bias_table(new, before.grid)
            kept = None if was is None else 0.0 if new.bias is None else None
            if was is not None and now is not None and was.shape == now.shape:
                kept = _kept(_centered(was), _centered(now))
            shares.append(Share(layer, "bias", kept))
        if old.rotary is not None:
            shares.append(Share(layer, "rotation", _of_rotation(old, new)))
    return shares


def _of_table(
    table: Tensor, stream: Tensor | None, new: LayerPosition, before: Before, index: int
) -> tuple[str, float | None]:
    """Return the form of an old table in the new position of a layer, and the share that is kept."""
    contribution = before.contributions[index]
    if stream is not None:
        return "table in the stream", _kept(table, stream) if stream.shape == table.shape else None
    for field, where in (("inner", "after the norm"), ("queries_keys", "in queries and keys")):
        given = getattr(new, field)
        if given is not None:
            fits = contribution is not None and given.shape == contribution.mean.shape
            return f"table {where}", contribution.kept(given.double()) if contribution is not None and fits else None
    logits, bias = table_logits(contribution, before.grid), bias_table(new, before.grid)
    if logits is not None and bias is not None and logits.shape == bias.shape:
        return "table in the logits", _kept(_centered(logits), _centered(bias))
    return "table", 0.0 if new.bias is None and new.rotary is None else None


def _of_rotation(old: LayerPosition, new: LayerPosition) -> float | None:
    """Return the kept share of sines and cosines; None if the two rotate different pairs."""
    a, b = old.rotary, new.rotary
    if b is None:
        return 0.0
    if not isinstance(a, PairRotation) or not isinstance(b, PairRotation) or a.half != b.half:
        return None
    if a.table.shape[-2:] != b.table.shape[-2:]:
        return None
    was, now = torch.broadcast_tensors(a.table, b.table)  # one for each head, or one for all
    return _kept(was, now)


def _centered(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


def _kept(old: Tensor, new: Tensor) -> float:
    return share_kept(old.double().square().sum(), (old.double() - new.double()).square().sum())


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
    new: the parts of the model that its images did not have, if it was made to take films.
    """

    fits: tuple[Fit, ...]
    shares: tuple[Share, ...]
    drift: tuple[Drift, ...] = ()
    new: tuple[str, ...] = ()

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
        lines += [f"new: {part}" for part in self.new]
        return "\n".join(lines)

    def summary(self) -> str:
        """Return in a few words which share of the old position the layers keep."""
        if self.new:
            return f"all is kept; new: {'; '.join(self.new)}"
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
            "new": self.new,
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
    model: Model,
    encoding: str | Spec,
    joining: str | Spec = "default",
    images: Tensor | None = None,
    least: float | None = None,
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
        least: the share of the old position that the layers must keep in the mean (`Certificate.kept`), such as 0 to
            refuse a position that is farther from the old one than none is; by default any.

    Raises:
        ValueError: if the model cannot use them, the images are of another size, or less is kept than `least`. The
            model is then unchanged.
    """
    if not isinstance(model, Backbone):
        raise ValueError(
            f"`model` must be one of our backbones, got {type(model).__name__}; graticule.convert makes one of a "
            "model of timm, with another position if you name it."
        )
    check_floating(model)
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
    held = {name: getattr(model, name) for name in ("position", "created", "converted_from")}
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
        found = Certificate(tuple(fits), tuple(shares), drift)
        if least is not None and found.kept is not None and found.kept < least:
            raise ValueError(
                f"`encoding` must keep at least {least} of the old position, got "
                f"{' + '.join(map(str, ENCODINGS.specs(encoding)))}, which keeps {found.kept:.3f} in the mean of the "
                f"layers; {found.summary()}. Give another, or lower `least` (graticule adapt has --anyway)."
            )
    except ValueError:
        for name, value in held.items():
            setattr(model, name, value)
        raise
    finally:
        model.train(training)
    model.certificate = found
    return model


def _blank(model: Backbone) -> Tensor:
    weight = next(model.parameters())
    return torch.zeros(1, model.in_chans, *model.img_size, dtype=weight.dtype, device=weight.device)


def _before(model: Backbone, images: Tensor) -> list[Before]:
    """Record the state of each stage, and measure the contributions of its table to its layers."""
    contributions = table_contributions(model, images)
    given, first, found = model.position(model.grid), 0, []
    for grid, blocks in zip(model.position_grids(model.grid), entered_blocks(model), strict=True):
        last = first + len(blocks)
        found.append(Before(grid, given[first:last], contributions[first:last]))
        first = last
    return found
