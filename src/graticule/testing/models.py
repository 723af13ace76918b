"""Black-box checks of the position code of any model: axes, pairs of channels, prefix tokens, caches, sizes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from graticule.external.images import check_pictures
from graticule.registry.checks import known_name
from graticule.testing import order, sizes
from graticule.testing import order as pairs
from graticule.testing import outputs as execution
from graticule.testing import outputs as precision
from graticule.testing import sizes as transposition
from graticule.testing.outputs import run
from graticule.testing.subject import Failed, NotApplicable, Subject

__all__ = ["CHECKS", "Finding", "inspect_model"]

#: Name of each check -> its function; the docstring states the law.
CHECKS = {
    "axes": order.axes,
    "pair layout": pairs.pair_layout,
    "prefix": order.prefix,
    "autocast": precision.autocast,
    "transposition": transposition.transposition,
    "crop": sizes.crop,
    "batch": execution.batch,
    "sizes": sizes.sizes,
    "caches": execution.caches,
    "export": execution.export,
}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    check: its name.
    outcome: passed, failed, or not applicable.
    detail: the comparison, the failure, or the reason why it does not apply.
    """

    check: str
    outcome: Literal["passed", "failed", "not applicable"]
    detail: str


def inspect_model(
    model: nn.Module,
    img_size: tuple[int, int] | None = None,
    patch_size: tuple[int, int] | None = None,
    skip: Collection[str] = (),
) -> list[Finding]:
    """Check the position code of any model of images as a black box; the model is not changed.

    The checks run on copies in float64 with new random weights, at a small non-square grid of patches if the model
    accepts one. The inputs of each attention are compared for an image whose patches are all the same, so that only
    position distinguishes them.

    Args:
        model: a model of images (B, C, height, width).
        img_size: (height, width) in pixels; by default the model's own.
        patch_size: (height, width) of a patch; by default the model's own.
        skip: names of checks to leave out.

    Returns:
        One finding per check, in the order of `CHECKS`.

    Raises:
        ValueError: for a model of films or packed patches, a size that is not given and cannot be inferred, or an
            unknown name in `skip`.
    """
    for name in skip:
        known_name("skip", name, CHECKS)
    check_pictures(model)
    found = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        original = Subject.of(model, img_size, patch_size)
        subject = original.small().drawn()
        run(subject.model, subject.images(1))  # an error of the unchanged model is raised to the user
        for name, check in CHECKS.items():
            if name in skip:
                continue
            try:
                found.append(Finding(name, "passed", check(subject, original)))
            except Failed as error:
                found.append(Finding(name, "failed", str(error)))
            except NotApplicable as error:
                found.append(Finding(name, "not applicable", str(error)))
            except Exception as error:  # the model raises an error that the check does not expect
                said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                found.append(Finding(name, "failed", f"the check could not be run, got {said}"))
    return found
