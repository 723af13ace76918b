"""Check of position on a transposed image."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graticule.backbones import Backbone
from graticule.grid import Grid
from graticule.layer_position import LayerPosition
from graticule.model_checks.outputs import SAME, by, run
from graticule.model_checks.subject import Failed, NotApplicable, Size, Subject, from_rows, to_rows
from graticule.rotation import PairRotation, Rotation


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
    for one, another in zip(subject.tables, other.tables, strict=True):
        rows = to_rows(before[one.name].detach(), one)
        ahead = len(rows) - subject.patches
        turned = rows[ahead:].view(*subject.grid, -1).transpose(0, 1).flatten(0, 1)
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
