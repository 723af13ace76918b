"""Black-box checks of the position code of any model: axes, pairs of channels, prefix tokens, caches, sizes, crops."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.external.images import check_takes_images, error_line, set_input_size
from graticule.external.recorder import record
from graticule.external.structure import added_tensors
from graticule.position.grid import Grid
from graticule.position.places import by
from graticule.position.rotation import PairRotation
from graticule.registry.checks import checked, known_name
from graticule.registry.fields import Side
from graticule.testing import order
from graticule.testing.model_under_test import (
    EXACT,
    SAME,
    Failed,
    ModelUnderTest,
    NotApplicable,
    Size,
    are_alike,
    check_same,
    from_rows,
    other_grid,
    run,
    tensors_of,
)
from graticule.testing.order import RIGHT, relative


def sizes(subject: ModelUnderTest, original: ModelUnderTest) -> str:
    """Another size works or is refused, also by `set_input_size`, and the first size then gives the same result."""
    images = subject.images(2)
    before = run(subject.model, images)
    new = other_grid(subject)
    reached = subject.at(new)
    if not bool(run(reached.model, reached.images(1)).isfinite().all()):
        raise Failed(f"outputs must be finite on {by(new)} patches")
    model = copy.deepcopy(subject.model)
    other = reached.images(1)
    try:
        dynamic = run(model, other)
    except Exception:  # any error of another library means that it refuses the size
        notes = ["other sizes only through set_input_size"]
    else:
        notes = ["other sizes in a forward pass"]
        check_same(run(model, images), before, "another size in between must not change the result")
        if hasattr(model, "set_input_size"):
            logits = [record(resized, other).logits for resized in (model, reached.model)]
            if len({None if values is None else values.shape for values in logits}) > 1:
                notes.append("with other windows by set_input_size")
            else:
                law = f"set_input_size must give the same as a forward pass on {by(new)} patches"
                check_same(run(reached.model, other), dynamic, law)
    if hasattr(model, "set_input_size"):
        set_input_size(model, subject.pixels(new))
        set_input_size(model, subject.image)
        old, now = subject.model.state_dict(), model.state_dict()
        changed = [name for name, value in old.items() if name not in now or now[name].shape != value.shape]
        changed += [name for name in now if name not in old]
        if changed:
            raise Failed(
                f"set_input_size there and back must keep every shape, got another one of {', '.join(changed)}"
            )
        moved = [name for name, value in old.items() if not torch.equal(now[name], value)]
        model.load_state_dict(old)
        check_same(run(model, images), before, "set_input_size there and back must restore the result")
        notes.append("there and back" + (f" (resamples {', '.join(moved[:2])} twice)" if moved else ""))
    return ", ".join(notes)


def crop(subject: ModelUnderTest, original: ModelUnderTest) -> str:
    """The position of a crop is the crop of the position, along both axes or along none."""
    promised = [
        type(module).__name__
        for module in subject.model.modules()
        if getattr(module, "grid_type", "") == "index" and getattr(module, "ref_feat_shape", None) is None
    ]
    models = subject.at_first((3, 3), (5, 3), (3, 5), factors=(1, 4, 8))
    square, tall, wide = map(_signature, models)
    largest = max(float(value.abs().max()) for value in square.values())
    kept_along = {
        axis: all(
            float((value - larger[place]).abs().max()) <= SAME * largest
            for place, value in square.items()
            if place in larger
        )
        for axis, larger in (("width", tall), ("height", wide))
    }
    if all(kept_along.values()):
        return "positions of a crop are the crop of the positions"
    shapes = [{name: value.shape for name, value in resized.model.named_parameters()} for resized in models]
    if shapes[0] != shapes[1] or shapes[0] != shapes[2]:
        raise NotApplicable("its parameters are resampled for the size of the image")
    for axis, is_kept in kept_along.items():
        if is_kept:
            raise Failed(f"positions must depend on both sides of the image or on none, got only its {axis}")
    if promised and not added_tensors(subject.model, subject.constant()):  # a table may be resampled in each pass
        raise Failed(f"{promised[0]} counts positions in patches, which must not depend on the size, got that they do")
    raise NotApplicable("position is relative to the size of the image, or resampled for it")


def _signature(subject: ModelUnderTest) -> dict[Size, Tensor]:
    """Return position by displacement if it is relative, and by patch if it is absolute."""
    try:
        relation = relative(subject)
        if relation.reading() != RIGHT:
            raise NotApplicable("attention is not a function of the displacement")
        return relation.by_displacement()
    except NotApplicable:
        tokens = subject.tokens()
        if are_alike(tokens):
            raise
        width = subject.grid[1]
        return {(rank // width, rank % width): value for rank, value in enumerate(tokens)}


def transposition(subject: ModelUnderTest, original: ModelUnderTest) -> str:
    """A model with transposed position tables and kernels gives the same result for the transposed image."""
    for module in subject.model.modules():
        if _has_shape(getattr(module, "get_embed", None)):
            return _rotary_transposition(type(module).__name__, partial(_module_cosines, module))
    if isinstance(subject.model, Backbone) and _rotation(subject.model, subject.model.grid) is not None:
        return _rotary_transposition("the encoding", partial(_own_cosines, subject))
    square, tall, mirrored = subject.at_first((4, 4), (3, 5), (5, 3))
    if not _transposes(square, square):
        raise NotApplicable("its position cannot be transposed from outside, or its layers have a direction")
    if not _transposes(tall, mirrored):
        raise Failed(
            f"a transposed model must give the same for a transposed image, got another result on {by(tall.grid)} "
            f"patches, while it does on {by(square.grid)}"
        )
    return f"holds on {by(tall.grid)} patches"


def _transposes(subject: ModelUnderTest, other: ModelUnderTest) -> bool:
    """Return whether `other`, at the transposed size, with the transposed weights of `subject`, gives the same."""
    images = subject.images(2)
    expected = run(subject.model, images)
    outputs = run(_transposed(subject, other), images.transpose(-2, -1).contiguous())
    return outputs.shape == expected.shape and (
        float((outputs - expected).abs().max()) <= SAME * float(expected.abs().max())
    )


@torch.no_grad()
def _transposed(subject: ModelUnderTest, other: ModelUnderTest) -> nn.Module:
    model = copy.deepcopy(other.model)
    sources = dict(subject.model.named_modules())
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
            sides = 2 * window[0] - 1, 2 * window[1] - 1
            rows, count = source.relative_position_bias_table, math.prod(sides)
            table.copy_(torch.cat([_transposed_rows(rows[:count], sides), rows[count:]]))
    if subject.tables and other.home != subject.home[::-1]:
        raise NotApplicable("its tables are stored for one grid")
    values, tensors = subject.values(), tensors_of(model)
    for before, (name, axes) in zip(subject.tables, other.tables.items(), strict=True):
        ahead, patches = subject.split(values[before])
        rows = torch.cat([ahead, _transposed_rows(patches, subject.home)])
        tensors[name].copy_(from_rows(tensors[name], axes, rows))
    return model


def _transposed_rows(rows: Tensor, grid: Size) -> Tensor:
    """Return (N, D), row by row of a grid, column by column."""
    return rows.unflatten(0, grid).transpose(0, 1).flatten(0, 1)


def _rotary_transposition(name: str, cosines: Callable[[Size], Tensor]) -> str:
    """Compare the cosines of all channels of a patch, (..., H, W, d), sorted, with its mirror image."""

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
    resized = copy.deepcopy(rotary)
    if getattr(resized, "feat_shape", None) is not None and hasattr(resized, "update_feat_shape"):
        resized.update_feat_shape(list(shape))
        table = resized.get_embed()
    else:
        table = resized.get_embed(shape=list(shape))
    table = table[1] if isinstance(table, tuple) else table.chunk(2, -1)[1]
    if table.shape[-2] != shape[0] * shape[1]:
        raise NotApplicable(f"{type(rotary).__name__}.get_embed does not follow the shape")
    return table.detach().double().unflatten(-2, shape)


def _own_cosines(subject: ModelUnderTest, shape: Size) -> Tensor:
    """Return the cosines by which the first layer of a model of this library rotates the patches of a grid."""
    model: Any = subject.model
    grid = model.grid_at(subject.pixels(shape))
    rotation = _rotation(model, grid)
    assert rotation is not None
    cosines: Tensor = rotation.table.chunk(2, -1)[1].double()
    if cosines.shape[-2] != grid.tokens:
        raise NotApplicable("its tokens attend within windows")
    return cosines[..., grid.prefix :, :].unflatten(-2, shape)


@torch.no_grad()
def _rotation(model: Any, grid: Grid) -> PairRotation | None:
    rotary = model.position(grid)[0].rotary
    return rotary if isinstance(rotary, PairRotation) else None


def _has_shape(function: Any) -> bool:
    return callable(function) and "shape" in inspect.signature(function).parameters


def batch(subject: ModelUnderTest, original: ModelUnderTest) -> str:
    """A batch gives the same result as each of its images alone."""
    images = subject.images(3)
    together, alone = run(subject.model, images), [run(subject.model, image[None]) for image in images]
    check_same(together, torch.cat(alone), "a batch must give the same as its images alone")
    return "3 images give the same together and alone"


#: Names of parameters of position.
_POSITION = re.compile("pos|rel|rope|freq")


def caches(subject: ModelUnderTest, original: ModelUnderTest) -> str:
    """Alternating sizes, dtypes, devices and instances gives the same results as each alone."""
    images = subject.images(2)
    first = run(copy.deepcopy(subject.model), images)
    model = copy.deepcopy(subject.model)
    check_same(run(model, images), first, "a copy must give the same")
    turns = []
    for grid in dict.fromkeys((other_grid(subject), subject.grid[::-1])):
        there = replace(subject, image=subject.pixels(grid)).images(2)
        try:
            alone = run(copy.deepcopy(subject.model), there)
        except Exception:  # any error of another library means that it refuses the size
            continue
        try:
            after = run(model, there)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise Failed(f"a size must work after another, got on {by(grid)} patches: {reason}") from error
        check_same(after, alone, f"{by(grid)} patches must give the same after another size")
        check_same(run(model, images), first, "the first size must give the same after another")
        turns.append("sizes")
    _after_turn(subject)
    for dtype, tolerance in ((torch.float32, 1e-2), (torch.float64, EXACT)):
        try:
            outputs = run(copy.deepcopy(subject.model).to(dtype), images.to(dtype))
        except Exception as error:
            raise Failed(f"{dtype} must work after another dtype, got {error_line(error)}") from error
        if outputs.dtype != dtype:
            raise Failed(f"outputs of a {dtype} model must be {dtype} after another dtype, got {outputs.dtype}")
        check_same(outputs.double(), first, f"{dtype} must give the same after another dtype", tolerance)
    turns.append("dtypes")
    if torch.cuda.is_available():
        moved = run(copy.deepcopy(subject.model).cuda(), images.cuda())
        check_same(moved.cpu(), first, "a GPU must give the same", 1e-6)
        check_same(run(subject.model, images), first, "the CPU must give the same after a GPU")
        turns.append("devices")
    second = copy.deepcopy(subject.model)
    drawn = {n: p for n, p in second.named_parameters() if p.requires_grad and _POSITION.search(n.lower())}
    with torch.no_grad():
        for parameter in drawn.values():
            parameter.add_(torch.randn_like(parameter))
    if drawn and torch.equal(run(second, images), first):
        raise Failed(f"two instances with other values of {next(iter(drawn))} must differ, got the same")
    if torch.equal(run(subject.drawn().model, images), first):
        raise Failed("two instances with other weights must differ, got the same")
    check_same(run(subject.model, images), first, "a second instance must not change the first")
    turns.append("instances")
    return f"{', '.join(dict.fromkeys(turns))} in turn"


def _after_turn(subject: ModelUnderTest) -> None:
    """Check that attention depends on the displacement at another grid of as many patches, after the first."""
    try:
        first = relative(subject)
        right = first.reading() == RIGHT
        turned = relative(subject.at(subject.grid[::-1]))
    except NotApplicable:
        return
    if right and turned.reading() != RIGHT:
        raise Failed(
            f"attention on {by(turned.shape)} patches must depend on their displacement after {by(first.shape)}, got "
            "the position of the other size"
        )


def export(subject: ModelUnderTest, original: ModelUnderTest) -> str:
    """A model exported with any batch size gives the same result (`torch.export`)."""
    model = copy.deepcopy(subject.model).float()
    images = subject.images(2).float()
    try:
        with torch.no_grad():
            program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        outputs = run(program.module(), subject.images(3).float())
    except Exception as error:  # torch.export raises errors of many kinds
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise Failed(f"torch.export must take the model, got {type(error).__name__}: {reason[:160]}") from error
    if len(outputs) != 3:
        raise Failed(f"an exported model must take any batch size, got {len(outputs)} outputs for 3 images")
    images = subject.images(3).float()
    check_same(run(program.module(), images), run(model, images), "an exported model must compute the same", 1e-4)
    return "exported with a dynamic batch"


def autocast(subject: ModelUnderTest, original: ModelUnderTest) -> str:
    """Under autocast to bfloat16 each patch keeps its position of float32."""
    wide = subject
    for height in (2, 8):
        with suppress(NotApplicable):
            wide = subject.at((height, 160))
            break
    single = copy.deepcopy(wide.model).float()
    rows = wide.rows()
    images = wide.constant().float()
    exact = record(single, images)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = record(single, images)
    pairs = [(exact.inputs[exact.tokens][0, rows], rounded.inputs[rounded.tokens][0, rows])]
    for tensors in ((exact.queries, rounded.queries), (exact.logits, rounded.logits)):
        flat = [x[0].transpose(1, 2).flatten(0, 1).flatten(1) for x in tensors if x is not None]  # (windows * n, ...)
        if len(flat) == 2 and flat[0].shape == flat[1].shape:
            pairs.append((flat[0][rows], flat[1][rows]))
    differ = False
    for pair in pairs:
        single_values, rounded_values = (values.double() for values in pair)
        if are_alike(single_values, 1e-4):
            continue
        if differ and single_values.shape[1] >= 320:
            break  # logits accumulate the rounding errors of queries, which were compared
        differ = True
        scale = float(single_values.abs().max())
        error = float((rounded_values - single_values).abs().max())
        if not error <= 0.04 * scale:
            collapsed = len(rounded_values) - len(rounded_values.unique(dim=0))
            shared = f"; {collapsed} patches share the value of another" if collapsed else ""
            raise Failed(
                f"position under bfloat16 autocast must be near that in float32 on {by(wide.grid)} patches, got a "
                f"difference of {error:.2g} with values up to {scale:.2g}{shared}"
            )
        # a row that clearly differs from the others must not become equal to one of them
        distances = [torch.cdist(values, values, p=float("inf")) for values in (single_values, rounded_values)]
        if bool(((distances[0] > 0.05 * scale) & (distances[1] == 0)).any()):
            raise Failed(f"positions must be distinct under bfloat16 autocast, got equal ones on {by(wide.grid)}")
    if not differ:
        raise NotApplicable("patches of a constant image are all the same up to the first attention")
    return f"positions on {by(wide.grid)} patches are the same as in float32"


#: Name of each check -> its function; the docstring states the law.
CHECKS = {
    "axes": order.axes,
    "pair layout": order.pair_layout,
    "prefix": order.prefix,
    "autocast": autocast,
    "transposition": transposition,
    "crop": crop,
    "batch": batch,
    "sizes": sizes,
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

    @classmethod
    def of(cls, name: str, check: Callable[..., str], *args: object) -> Finding:
        try:
            return cls(name, "passed", check(*args))
        except Failed as error:
            return cls(name, "failed", str(error))
        except NotApplicable as error:
            return cls(name, "not applicable", str(error))
        except Exception as error:  # the model raises an error that the check does not expect
            if isinstance(error, MemoryError) or re.search("out of memory|allocate", str(error)):
                raise
            return cls(name, "failed", f"the check could not be run, got {error_line(error)}")


@checked
def inspect_model(
    model: nn.Module,
    img_size: tuple[Side, Side] | None = None,
    patch_size: tuple[Side, Side] | None = None,
    skip: Collection[str] = (),
) -> list[Finding]:
    """Check the position code of any model of images as a black box; the model is not changed.

    The checks run on copies in float64 with new random weights, at a small non-square grid of patches if the model
    accepts one. The inputs of each attention are compared for an image whose patches are all the same, so that only
    position distinguishes them.

    Takes the arguments of `graticule.testing.check_model`; there is a finding per check, in the order of `CHECKS`.
    """
    for name in skip:
        known_name("skip", name, CHECKS)
    check_takes_images(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        original = ModelUnderTest.of(model, img_size, patch_size)
        subject = original.small().drawn()
        run(subject.model, subject.images(1))  # an error of the unchanged model is raised to the user
        return [Finding.of(name, check, subject, original) for name, check in CHECKS.items() if name not in skip]
