"""The options of commands that draw figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class Figures:
    """The format of the figures of a command."""

    format: Literal["png", "pdf", "svg"] = "png"
    """format of the figures: png, or pdf or svg, which scale to any size"""


@dataclass(kw_only=True)
class ScaledFigures(Figures):
    """The format of figures, and the limits of their color scale."""

    scale: list[float] = field(default_factory=list)
    """limits of the color scale, LOW HIGH, so that sheets can be compared (default: those of the values)"""


def limits_of(scale: list[float]) -> tuple[float, float] | None:
    """Return the limits of a color scale; None for those of the values.

    Raises:
        ValueError: if they are not two numbers, the lower one first.
    """
    if not scale:
        return None
    if len(scale) != 2 or not scale[0] < scale[1]:
        raise ValueError(f"`scale` must be two numbers, the lower one first, got {' '.join(map(str, scale))}.")
    return scale[0], scale[1]
