"""Report of a change of position: the fits, the share that each layer keeps, and the drift of the features."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graticule.backbones import Backbone
from graticule.surgery.fits import Fit, Share


class Drift(NamedTuple):
    """Drift of the tokens after a layer, measured on images.

    layer: index of the layer, counted through all stages.
    error: the norm of the difference divided by the norm before, over all tokens and images together.
    cosine: the mean over tokens of the cosine between before and after.
    """

    layer: int
    error: float
    cosine: float


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
        moved = [("layer", "relative error", "cosine")]
        moved += [(str(d.layer), f"{d.error:.3e}", f"{d.cosine:.6f}") for d in self.drift]
        lines += ["", *_columns(moved)] if self.drift else []
        return "\n".join(lines)

    def summary(self) -> str:
        """Return in a few words which share of the old position the layers keep."""
        found = [share.kept for share in self.shares if share.kept is not None]
        if self.lost or not found:
            return "nothing is kept"
        low, high = f"{min(found):.3f}", f"{max(found):.3f}"
        return f"layers keep {low if low == high else f'{low} to {high}'}"

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
