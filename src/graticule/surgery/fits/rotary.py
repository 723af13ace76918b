"""Fits of rotary encodings with learned directions to those of a formula."""

from __future__ import annotations

from typing import Any

from graticule.encodings import JoinedPosition, RotaryPosition
from graticule.encodings.rope_mixed import MixedRope
from graticule.encodings.rotary import PlaneRotary
from graticule.surgery.fits.registry import Before, register_fit


@register_fit(JoinedPosition, RotaryPosition)
def refuse_table(old: Any, new: Any, before: Before) -> str:
    """Return the reason for which a rotation cannot replace a table.

    It multiplies queries and keys, so its effect on the logits depends on their content and on the biases of their
    projections. The report measures it for the mean tokens.
    """
    return "as a rotation adds no term to the logits"


@register_fit(RotaryPosition, RotaryPosition)
def copy_directions(old: Any, new: Any, before: Before) -> bool:
    """Set the frequency vectors of 'rope_mixed' in each layer and head to those of the old encoding, which is exact.

    Both must rotate the same pairs of channels by the same coordinates.
    """
    was, now = old.encoding, new.encoding
    if not isinstance(now, MixedRope) or not isinstance(was, PlaneRotary) or was.layout != now.layout:
        return False
    if was.coordinates != now.coordinates or was.scaling != now.scaling or old.joined != new.joined:
        return False
    vectors = was.vectors(now.freqs.device).flip(-1)  # (d / 2, 2), or one for each layer and head; x before y
    if vectors.ndim not in (2, 4) or vectors.shape[-2] != now.freqs.shape[-1]:
        return False
    found = vectors.T[:, None, None] if vectors.ndim == 2 else vectors.movedim(-1, 0)
    now.freqs.copy_(found.expand_as(now.freqs))
    return True
