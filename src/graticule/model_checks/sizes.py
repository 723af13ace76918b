"""Checks of position at other sizes: to another size and back, and in a crop."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from graticule.model_checks.outputs import SAME, by, check_same, other_grid, run
from graticule.model_checks.readings import RIGHT, relative
from graticule.model_checks.subject import Failed, NotApplicable, Size, Subject, set_size


def sizes(subject: Subject, original: Subject) -> str:
    """Another size works or is refused, also by `set_input_size`, and the first size then gives the same result."""
    images = subject.images(2)
    before = run(subject.model, images)
    new = other_grid(subject)
    reached = subject.at(new)
    found = run(reached.model, reached.images(1))
    if not bool(found.isfinite().all()):
        raise Failed(f"outputs must be finite on {by(new)} patches")
    notes = []
    model = copy.deepcopy(subject.model)
    pixels = new[0] * subject.patch[0], new[1] * subject.patch[1]
    other = reached.images(1)
    try:
        dynamic = run(model, other)
    except Exception:  # any error of another library means that it refuses the size
        notes.append("other sizes only through set_input_size")
    else:
        notes.append("other sizes in a forward pass")
        check_same(run(model, images), before, "another size in between must not change the result")
        if hasattr(model, "set_input_size"):
            law = f"set_input_size must give the same as a forward pass on {by(new)} patches"
            check_same(run(reached.model, other), dynamic, law)
    if hasattr(model, "set_input_size"):
        set_size(model, pixels)
        set_size(model, subject.image)
        old, now = subject.model.state_dict(), model.state_dict()
        changed = [name for name, value in old.items() if name not in now or now[name].shape != value.shape]
        changed += [name for name in now if name not in old]
        if changed:
            raise Failed(f"set_input_size there and back must keep every shape, not that of {', '.join(changed)}")
        moved = [name for name, value in old.items() if not torch.equal(now[name], value)]
        model.load_state_dict(old)
        check_same(run(model, images), before, "set_input_size there and back must restore the result")
        notes.append("there and back" + (f" (resamples {', '.join(moved[:2])} twice)" if moved else ""))
    return ", ".join(notes)


def crop(subject: Subject, original: Subject) -> str:
    """The position of a crop is the crop of the position, along both axes or along none."""
    promised = [
        type(one).__name__
        for one in subject.model.modules()
        if getattr(one, "grid_type", "") == "index" and getattr(one, "ref_feat_shape", None) is None
    ]
    for factor in (1, 4, 8):
        try:
            grids = [(3 * factor, 3 * factor), (5 * factor, 3 * factor), (3 * factor, 5 * factor)]
            models = [subject.at(grid) for grid in grids]
            square, tall, wide = (_signature(one) for one in models)
            break
        except NotApplicable as error:
            reason = error
    else:
        raise reason
    kept = []
    for larger in (tall, wide):
        scale = max(float(value.abs().max()) for value in square.values())
        common = [place for place in square if place in larger]
        kept.append(all(float((square[p] - larger[p]).abs().max()) <= SAME * scale for p in common))
    if all(kept):
        return "positions of a crop are the crop of the positions"
    shapes = [{name: value.shape for name, value in one.model.named_parameters()} for one in models]
    if shapes[0] != shapes[1] or shapes[0] != shapes[2]:
        raise NotApplicable("its parameters are resampled for the size of the image")
    if any(kept):
        axis = "height" if kept[1] else "width"
        raise Failed(f"positions must depend on both sides of the image or on none, got only its {axis}")
    if promised:
        raise Failed(f"{promised[0]} counts positions in patches, which must not depend on the size, got that they do")
    raise NotApplicable("position is relative to the size of the image, or resampled for it")


def _signature(subject: Subject) -> dict[Size, Tensor]:
    """Return position by displacement if it is relative, and by patch if it is absolute."""
    try:
        seen = relative(subject)
        if seen.reading() != RIGHT:
            raise NotApplicable("attention is not a function of the displacement")
        return seen.by_displacement()
    except NotApplicable:
        rows = subject.rows()
        tokens = subject.base.inputs[subject.base.tokens][0, rows]
        if float((tokens - tokens.mean(0)).abs().max()) <= 1e-6 * float(tokens.abs().max()):
            raise
        width = subject.grid[1]
        return {(rank // width, rank % width): value for rank, value in enumerate(tokens)}
