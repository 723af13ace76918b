"""Outputs of a model, their comparison, and other grids, used by all checks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from graticule.model_checks.subject import Failed, NotApplicable, Size, Subject

#: Tolerance of outputs in float64, relative to the largest; float32 buffers of a model are not exact.
SAME = 1e-5
EXACT = 1e-9


@torch.no_grad()
def run(model: nn.Module, images: Tensor) -> Tensor:
    """Return the outputs of a model as one tensor, (B, ...)."""
    found = model(images)
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, tuple | list):
        found = torch.cat([one.flatten(1) for one in found if isinstance(one, Tensor)], 1)
    if not isinstance(found, Tensor):
        raise TypeError(f"`model` must return tensors, got {type(found).__name__}.")
    return found


def check_same(found: Tensor, expected: Tensor, law: str, tolerance: float = EXACT) -> None:
    """Raise `Failed` with `law` unless two outputs are the same, up to `tolerance` of the largest."""
    if found.shape != expected.shape:
        raise Failed(f"{law}, got a shape of {tuple(found.shape)} instead of {tuple(expected.shape)}")
    error = float((found - expected).abs().max())
    if not error <= tolerance * max(float(expected.abs().max()), 1e-3):
        raise Failed(f"{law}, got a difference of {error:.1e}")


def any_of(*laws: Callable[[], str]) -> str:
    """Check several laws: fails with the first that fails; not applicable if none applies."""
    passed, reasons = [], []
    for law in laws:
        try:
            passed.append(law())
        except NotApplicable as error:
            reasons.append(str(error))
    if not passed:
        raise NotApplicable("; ".join(dict.fromkeys(reasons)))
    return "; ".join(passed)


def other_grid(subject: Subject) -> Size:
    """Return another grid, whose sides grow by different factors."""
    height, width = subject.grid
    step = math.gcd(height, width)
    return height + 4 * step, width + step


def by(shape: Size) -> str:
    """Format a grid as 3 x 5."""
    return f"{shape[0]} x {shape[1]}"
