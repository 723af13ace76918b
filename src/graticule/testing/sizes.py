"""Checks of position at other sizes: to another size and back, and in a crop."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.external.images import set_input_size
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition
from graticule.position.rotation import PairRotation, Rotation
from graticule.testing.order import RIGHT, relative
from graticule.testing.subject import (
    SAME,
    Failed,
    NotApplicable,
    Size,
    Subject,
    by,
    check_same,
    from_rows,
    other_grid,
    run,
    to_rows,
)


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
        set_input_size(model, pixels)
        set_input_size(model, subject.image)
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


def transposition(subject: Subject, original: Subject) -> str:
    """A model with transposed position tables and kernels gives the same result for the transposed image."""
    rotary = [one for one in subject.model.modules() if _has_shape(getattr(one, "get_embed", None))]
    if rotary:
        return _rotary_transposition(type(rotary[0]).__name__, lambda shape: _module_cosines(rotary[0], shape))
    ours = subject.model
    if isinstance(ours, Backbone) and isinstance(_rotation(ours, ours.grid), PairRotation):
        return _rotary_transposition("the encoding", lambda shape: _own_cosines(subject, shape))
    for factor in (1, 2, 4, 8):
        try:
            square, tall = subject.at((4 * factor, 4 * factor)), subject.at((3 * factor, 5 * factor))
            mirrored = subject.at((5 * factor, 3 * factor))
            break
        except NotApplicable as error:
            reason = error
    else:
        raise reason
    if not _transposes(square, square):
        raise NotApplicable("its position cannot be transposed from outside, or its layers have a direction")
    if not _transposes(tall, mirrored):
        raise Failed(
            f"a transposed model must give the same for a transposed image, got another result on {by(tall.grid)} "
            f"patches, while it does on {by(square.grid)}"
        )
    return f"holds on {by(tall.grid)} patches"


def _transposes(subject: Subject, other: Subject) -> bool:
    """Return whether `other`, at the transposed size, with the transposed weights of `subject`, gives the same."""
    images = subject.images(2)
    expected = run(subject.model, images)
    model = _transposed(subject, other)
    found = run(model, images.transpose(-2, -1).contiguous())
    if found.shape != expected.shape:
        return False
    return float((found - expected).abs().max()) <= SAME * float(expected.abs().max())


@torch.no_grad()
def _transposed(subject: Subject, other: Subject) -> nn.Module:
    model = copy.deepcopy(other.model)
    sources = dict(subject.model.named_modules())
    held = dict([*model.named_parameters(), *model.named_buffers()])
    for name, module in model.named_modules():
        source = sources[name]
        if isinstance(module, nn.Conv2d):
            module.weight.copy_(source.weight.transpose(-2, -1))
        elif isinstance(module, nn.Linear) and module.in_features == 2:  # its input is coordinates
            module.weight.copy_(source.weight.flip(-1))
        table = getattr(module, "relative_position_bias_table", None)
        if isinstance(table, Tensor) and table.ndim == 2:
            window = getattr(source, "window_size", None)
            if not isinstance(window, tuple) or getattr(module, "window_size", None) != window[::-1]:
                raise NotApplicable("the windows of its bias cannot be transposed")
            height, width = 2 * window[0] - 1, 2 * window[1] - 1
            value = source.relative_position_bias_table
            count = height * width
            turned = value[:count].view(height, width, -1).transpose(0, 1).reshape(count, -1)
            table.copy_(torch.cat([turned, value[count:]]))
    before = dict([*subject.model.named_parameters(), *subject.model.named_buffers()])
    if subject.tables and other.home != subject.home[::-1]:
        raise NotApplicable("its tables are stored for one grid")
    for one, another in zip(subject.tables, other.tables, strict=True):
        rows = to_rows(before[one.name].detach(), one)
        ahead = len(rows) - subject.home[0] * subject.home[1]
        turned = rows[ahead:].view(*subject.home, -1).transpose(0, 1).flatten(0, 1)
        held[another.name].copy_(from_rows(held[another.name], another, torch.cat([rows[:ahead], turned])))
    return model


def _rotary_transposition(name: str, cosines: Callable[[Size], Tensor]) -> str:
    """Compare the cosines of all channels of a patch, (..., H, W, d), sorted, with those of its mirror image."""

    def mirrors(shape: Size) -> bool:
        there, back = cosines(shape), cosines((shape[1], shape[0])).transpose(-3, -2)
        return float((there.sort(-1)[0] - back.sort(-1)[0]).abs().max()) <= SAME

    if not mirrors((4, 4)):
        raise NotApplicable(f"{name} has other frequencies for rows than for columns")
    if not mirrors((3, 5)):
        raise Failed(
            f"{name} must give the transposed angles on a transposed grid, got others on 3 x 5 patches, while it does "
            "on 4 x 4"
        )
    return f"{name} gives the transposed angles on a transposed grid"


def _module_cosines(rotary: Any, shape: Size) -> Tensor:
    """Return the cosines of a rotary module with timm's interface for a grid."""
    one = copy.deepcopy(rotary)
    if getattr(one, "feat_shape", None) is not None and hasattr(one, "update_feat_shape"):
        one.update_feat_shape(list(shape))
        table = one.get_embed()
    else:
        table = one.get_embed(shape=list(shape))
    table = table[1] if isinstance(table, tuple) else table.chunk(2, -1)[1]
    if table.shape[-2] != shape[0] * shape[1]:
        raise NotApplicable(f"{type(rotary).__name__}.get_embed does not follow the shape")
    cosines: Tensor = table.detach().double().unflatten(-2, shape)
    return cosines


def _own_cosines(subject: Subject, shape: Size) -> Tensor:
    """Return the cosines by which the first layer of a model of this library rotates the patches of a grid."""
    model = subject.model
    assert isinstance(model, Backbone)
    grid = model.grid_at((shape[0] * subject.patch[0], shape[1] * subject.patch[1]))
    rotation = _rotation(model, grid)
    assert isinstance(rotation, PairRotation)
    cosines: Tensor = rotation.table.chunk(2, -1)[1].double()
    if cosines.shape[-2] != grid.tokens:
        raise NotApplicable("its tokens attend within windows")
    cosines = cosines[..., grid.prefix :, :].unflatten(-2, shape)
    return cosines


@torch.no_grad()
def _rotation(model: Backbone, grid: Grid) -> Rotation | None:
    first: LayerPosition = model.position(grid)[0]
    return first.rotary


def _has_shape(function: Any) -> bool:
    return callable(function) and "shape" in inspect.signature(function).parameters
