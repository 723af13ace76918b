"""Black-box checks of the position code of any model: axes, pairs of channels, prefix tokens, caches, sizes."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from graticule.external.images import check_pictures
from graticule.external.recorder import record
from graticule.registry.checks import known_name
from graticule.testing import order, sizes
from graticule.testing.order import RIGHT, relative
from graticule.testing.subject import EXACT, Failed, NotApplicable, Subject, by, check_same, other_grid, run


def batch(subject: Subject, original: Subject) -> str:
    """A batch gives the same result as each of its images alone."""
    images = subject.images(3)
    together, alone = run(subject.model, images), [run(subject.model, image[None]) for image in images]
    check_same(together, torch.cat(alone), "a batch must give the same as its images alone")
    return "3 images give the same together and alone"


def caches(subject: Subject, original: Subject) -> str:
    """Alternating sizes, dtypes, devices and instances gives the same results as each alone."""
    images = subject.images(2)
    first = run(copy.deepcopy(subject.model), images)
    model = copy.deepcopy(subject.model)
    check_same(run(model, images), first, "a copy must give the same")
    turns = []
    for grid in dict.fromkeys((other_grid(subject), subject.grid[::-1])):
        pixels = grid[0] * subject.patch[0], grid[1] * subject.patch[1]
        there = replace(subject, image=pixels).images(2)
        try:
            alone = run(copy.deepcopy(subject.model), there)
        except Exception:  # any error of another library means that it refuses the size
            continue
        try:
            after = run(model, there)
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise Failed(f"a size must work after another, got on {by(grid)} patches: {said}") from error
        check_same(after, alone, f"{by(grid)} patches must give the same after another size")
        check_same(run(model, images), first, "the first size must give the same after another")
        turns.append("sizes")
    _after_turn(subject)
    for dtype, tolerance in ((torch.float32, 1e-2), (torch.float64, EXACT)):
        try:
            found = run(copy.deepcopy(subject.model).to(dtype), images.to(dtype))
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise Failed(f"{dtype} must work after another dtype, got {type(error).__name__}: {said}") from error
        if found.dtype != dtype:
            raise Failed(f"outputs of a {dtype} model must be {dtype} after another dtype, got {found.dtype}")
        check_same(found.double(), first, f"{dtype} must give the same after another dtype", tolerance)
    turns.append("dtypes")
    if torch.cuda.is_available():
        moved = run(copy.deepcopy(subject.model).cuda(), images.cuda())
        check_same(moved.cpu(), first, "a GPU must give the same", 1e-6)
        check_same(run(subject.model, images), first, "the CPU must give the same after a GPU")
        turns.append("devices")
    second = copy.deepcopy(subject.model)
    names = [name for name, p in second.named_parameters() if p.requires_grad and _of_position(name)]
    if names:
        with torch.no_grad():
            for name, parameter in second.named_parameters():
                if name in names:
                    parameter.add_(torch.randn_like(parameter))
        if torch.equal(run(second, images), first):
            raise Failed(f"two instances with other values of {names[0]} must differ, got the same")
    fresh = run(subject.drawn().model, images)
    if torch.equal(fresh, first):
        raise Failed("two instances with other weights must differ, got the same")
    check_same(run(subject.model, images), first, "a second instance must not change the first")
    turns.append("instances")
    return f"{', '.join(dict.fromkeys(turns))} in turn"


def _after_turn(subject: Subject) -> None:
    """Check that attention depends on the displacement at another grid of as many patches, after the first."""
    try:
        first = relative(subject)
        right = first.reading() == RIGHT
        turned = relative(subject.at((subject.grid[1], subject.grid[0])))
    except NotApplicable:
        return
    if right and turned.reading() != RIGHT:
        raise Failed(
            f"attention on {by(turned.shape)} patches must depend on their displacement after {by(first.shape)}, got "
            "the position of the other size"
        )


def export(subject: Subject, original: Subject) -> str:
    """A model exported with any batch size gives the same result (`torch.export`)."""
    model = copy.deepcopy(subject.model).float()
    images = subject.images(2).float()
    try:
        with torch.no_grad():
            program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        found = run(program.module(), subject.images(3).float())
    except Exception as error:  # torch.export raises errors of many kinds
        said = next((line for line in str(error).splitlines() if line.strip()), "")
        raise Failed(f"torch.export must take the model, got {type(error).__name__}: {said.strip()[:160]}") from error
    if len(found) != 3:
        raise Failed(f"an exported model must take any batch size, got {len(found)} outputs for 3 images")
    images = subject.images(3).float()
    check_same(run(program.module(), images), run(model, images), "an exported model must compute the same", 1e-4)
    return "exported with a dynamic batch"


def _of_position(name: str) -> bool:
    return any(part in name.lower() for part in ("pos", "rel", "rope", "freq"))


def autocast(subject: Subject, original: Subject) -> str:
    """Under autocast to bfloat16 each patch keeps its position of float32."""
    wide = subject
    for grid in ((2, 160), (8, 160)):
        try:
            wide = subject.at(grid)
            break
        except NotApplicable:
            continue
    single = copy.deepcopy(wide.model).float()
    rows = wide.rows()
    images = wide.constant().float()
    exact = record(single, images)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = record(single, images)
    pairs = [(exact.inputs[exact.tokens][0, rows], rounded.inputs[rounded.tokens][0, rows])]
    for one, other in ((exact.queries, rounded.queries), (exact.logits, rounded.logits)):
        if one is not None and other is not None and one.shape == other.shape:
            flat = [x[0].transpose(1, 2).flatten(0, 1).flatten(1) for x in (one, other)]  # (windows * n, ...)
            pairs.append((flat[0][rows], flat[1][rows]))
    differ = False
    for one, other in pairs:
        one, other = one.double(), other.double()
        spread = float((one - one.mean(0)).abs().max())
        scale = float(one.abs().max())
        if spread <= 1e-4 * scale:
            continue
        if differ and one.shape[1] >= 320:
            break  # logits accumulate the rounding errors of queries, which were compared
        differ = True
        error = float((other - one).abs().max())
        if not error <= 0.04 * scale:
            collapsed = len(one) - len(other.unique(dim=0))
            shared = f"; {collapsed} patches share the value of another" if collapsed else ""
            raise Failed(
                f"position under bfloat16 autocast must be near that in float32 on {by(wide.grid)} patches, got a "
                f"difference of {error:.2g} with values up to {scale:.2g}{shared}"
            )
        # a row that clearly differs from the others must not become equal to one of them
        first = torch.cdist(one, one, p=float("inf")) > 0.05 * scale
        if bool((first & (torch.cdist(other, other, p=float("inf")) == 0)).any()):
            raise Failed(f"positions must be distinct under bfloat16 autocast, got equal ones on {by(wide.grid)}")
    if not differ:
        raise NotApplicable("patches of a constant image are all the same up to the first attention")
    return f"positions on {by(wide.grid)} patches are those of float32"


#: Name of each check -> its function; the docstring states the law.
CHECKS = {
    "axes": order.axes,
    "pair layout": order.pair_layout,
    "prefix": order.prefix,
    "autocast": autocast,
    "transposition": sizes.transposition,
    "crop": sizes.crop,
    "batch": batch,
    "sizes": sizes.sizes,
    "caches": caches,
    "export": export,
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
                if isinstance(error, MemoryError) or re.search("out of memory|allocate", str(error)):
                    raise
                said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                found.append(Finding(name, "failed", f"the check could not be run, got {said}"))
    return found
