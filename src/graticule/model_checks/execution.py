"""Checks of execution: the same result in a batch, after other sizes and dtypes, and exported."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from graticule.model_checks.outputs import EXACT, by, check_same, other_grid, run
from graticule.model_checks.readings import RIGHT, relative
from graticule.model_checks.subject import Failed, NotApplicable, Subject


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
