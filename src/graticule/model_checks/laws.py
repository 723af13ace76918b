"""The laws that position code must keep, each a function that returns what it found."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from graticule.model_checks.readings import (
    COLUMNS,
    OPPOSITE,
    RIGHT,
    Relative,
    relative,
    resampled_reading,
    roughness,
)
from graticule.model_checks.recording import record
from graticule.model_checks.subject import Failed, NotApplicable, Size, Subject, from_rows, set_size, to_rows

#: Of outputs in float64, relative to the largest; buffers that a model keeps in float32 are not exact.
_SAME = 1e-5
_EXACT = 1e-9


def axes(subject: Subject, original: Subject) -> str:
    """Position runs over the patches row by row, as the patches do, at a grid that is not square."""
    return _any(
        lambda: _relative_axes(subject), lambda: _table_axes(subject, original), lambda: _resampled_axes(subject)
    )


def _relative_axes(subject: Subject) -> str:
    seen = relative(subject)
    if seen.shape[0] == seen.shape[1]:
        raise NotApplicable(f"attention is within a square of {seen.shape[0]} x {seen.shape[1]} patches")
    reading = seen.reading()
    if reading in (COLUMNS, OPPOSITE):
        raise Failed(f"relative position must run row by row over {_by(seen.shape)} patches, got {reading}")
    if reading is None:
        if _non_commuting(subject.model):
            raise NotApplicable("its rotations do not commute: attention is no function of the displacement")
        if (share := _norms(seen)) is not None and share > _SAME:
            raise NotApplicable("the rotation of queries does not keep their length: see pair layout")
        raise Failed(
            f"attention between equal patches must depend on their displacement alone, got differences on a grid "
            f"of {_by(seen.shape)}"
        )
    if reading != RIGHT:
        raise NotApplicable(f"position is {reading}: see prefix")
    return f"attention depends on the displacement in {_by(seen.shape)} patches"


def _table_axes(subject: Subject, original: Subject) -> str:
    """Compare how smooth position in the tokens is along the patches, and along a grid with swapped axes."""
    if original.grid[0] == original.grid[1]:
        original = original.small()
    if original.grid[0] == original.grid[1]:
        raise NotApplicable("the grid is square")
    rows = original.rows()
    tokens = original.base.inputs[original.base.tokens][0, rows]
    values = tokens - tokens.mean(0)
    if float(values.abs().max()) <= 1e-6 * float(tokens.abs().max()):
        raise NotApplicable("no absolute position in the tokens")
    ratio = roughness(values, original.grid)
    if ratio > 1.25:
        raise Failed(
            f"absolute position must be smooth row by row over {_by(original.grid)} patches, got steps "
            f"{ratio:.1f} times as large as column by column"
        )
    if ratio > 0.8:
        raise NotApplicable("its table is noise, in which no order shows")
    return f"absolute position is smooth over {_by(original.grid)} patches"


def _resampled_axes(subject: Subject) -> str:
    reading, error, new = _resampled(subject)
    if reading == COLUMNS:
        raise Failed(
            f"a table resampled for {_by(new)} patches must run row by row, got {COLUMNS}, {error:.1f} patches off"
        )
    if reading != RIGHT:
        raise NotApplicable(f"a resampled table is {reading}: see prefix")
    return f"a table keeps its axes when it is resampled for {_by(new)} patches"


def _resampled(subject: Subject) -> tuple[str, float, Size]:
    """Put the coordinates of patches in the table, and read where they come out at another grid."""
    if not subject.tables:
        raise NotApplicable("no absolute position table (a parameter or buffer named pos...)")
    if subject.grid[0] == subject.grid[1]:
        raise NotApplicable("the table is of a square grid and refuses others")
    plain = subject.without_tables()
    width = subject.grid[1]
    rank = torch.arange(subject.patches)
    coordinates = torch.stack([rank // width, rank % width], -1).double()
    held = {}
    for name, value in subject.values().items():
        ahead = len(value) - subject.patches
        row = torch.cat([torch.full((ahead, 2), 50.0, dtype=value.dtype), coordinates])
        held[name] = row.repeat(1, math.ceil(value.shape[1] / 2))[:, : value.shape[1]]
    filled = subject.with_tables(held)
    if (error := _off(filled, plain, coordinates)) > 1e-6:
        raise NotApplicable(f"the table does not enter the tokens as it is ({error:.1f} off)")
    new = _other(subject)
    rows, values = _entered(filled.at(new), plain.at(new))
    reading, error = resampled_reading(values[rows][:, :2], subject.grid, new)
    return reading, error, new


def _off(filled: Subject, plain: Subject, expected: Tensor) -> float:
    rows, values = _entered(filled, plain)
    return float((values[rows][:, :2] - expected).abs().max())


def _entered(filled: Subject, plain: Subject) -> tuple[Tensor, Tensor]:
    """Return the row of each patch, and what the table adds to each row, (rows, D)."""
    for at, (one, other) in enumerate(zip(filled.base.inputs, plain.base.inputs, strict=False)):
        if one.shape == other.shape and one.shape[1] >= plain.patches and not torch.equal(one, other):
            return plain.rows(at), one[0] - other[0]
    raise NotApplicable("the table does not enter the tokens")


def pair_layout(subject: Subject, original: Subject) -> str:
    """A rotation of queries keeps their length, which it does not if its table is of another layout of pairs."""
    seen = relative(subject)
    share = _norms(seen)
    if share is None:
        raise NotApplicable("the queries of its attention were not seen")
    queries = seen.queries
    assert queries is not None
    if float((queries - queries.mean(1, keepdim=True)).abs().max()) <= 1e-6 * float(queries.abs().max()):
        raise NotApplicable("queries are not rotated")
    other = relative(subject, -2.0).queries
    if other is not None:
        added = (queries - queries[:, :1]) - (other - other[:, :1])
        if float(added.abs().max()) <= 1e-6 * float(queries.abs().max()):
            raise NotApplicable("position is added to queries, which are not rotated")
    if share > _SAME:
        raise Failed(
            f"a rotation must keep the length of queries, got lengths that differ by {100 * share:.0f} %: the table "
            "and its use disagree on which channels form a pair (neighbors, or i and i + d / 2)"
        )
    return "rotations keep the length of queries"


def _norms(seen: Relative) -> float | None:
    if seen.queries is None:
        return None
    lengths = seen.queries.norm(dim=-1)
    return float(((lengths.amax(1) - lengths.amin(1)) / lengths.amax(1).clamp_min(1e-30)).max())


def prefix(subject: Subject, original: Subject) -> str:
    """Class and register tokens are not counted among the positions of patches."""
    try:
        rows = subject.rows()
        outside = subject.base.inputs[subject.base.tokens].shape[1] - len(rows)
    except NotApplicable:
        outside = 0
    tables = [len(value) - subject.patches for value in subject.values().values()]
    if outside <= 0 and not any(tables):
        raise NotApplicable("no tokens besides the patches")
    return _any(lambda: _relative_prefix(subject), lambda: _resampled_prefix(subject))


def _relative_prefix(subject: Subject) -> str:
    seen = relative(subject)
    reading = seen.reading()
    if reading is not None and reading.startswith("shifted"):
        raise Failed(f"the first patch must be at the first position, got positions {reading} of {_by(seen.shape)}")
    if reading != RIGHT:
        raise NotApplicable("attention is no function of the displacement: see axes and pair layout")
    return f"attention of the patches is right beside {_tokens(seen.outside)}"


def _resampled_prefix(subject: Subject) -> str:
    reading, error, new = _resampled(subject)
    if reading not in (RIGHT, COLUMNS):
        raise Failed(
            f"rows of tokens that are no patches must not be resampled, got a table that is {reading} for {_by(new)} "
            f"patches, up to {error:.0f} patches off"
        )
    if reading == COLUMNS:
        raise NotApplicable("a resampled table has other axes: see axes")
    return f"their rows stay out of a table resampled for {_by(new)} patches"


def autocast(subject: Subject, original: Subject) -> str:
    """Under autocast to bfloat16 each patch keeps the position that it has in float32."""
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
            break  # logits add up the rounding of queries that were compared
        differ = True
        error = float((other - one).abs().max())
        if not error <= 0.04 * scale:
            collapsed = len(one) - len(other.unique(dim=0))
            shared = f"; {collapsed} patches share the value of another" if collapsed else ""
            raise Failed(
                f"position under bfloat16 autocast must be near that in float32 on {_by(wide.grid)} patches, got a "
                f"difference of {error:.2g} with values up to {scale:.2g}{shared}"
            )
        # a row that differs from the others by far must not become equal to one of them
        first = torch.cdist(one, one, p=float("inf")) > 0.05 * scale
        if bool((first & (torch.cdist(other, other, p=float("inf")) == 0)).any()):
            raise Failed(f"positions must be distinct under bfloat16 autocast, got equal ones on {_by(wide.grid)}")
    if not differ:
        raise NotApplicable("patches of a constant image are all the same up to the first attention")
    return f"positions on {_by(wide.grid)} patches are those of float32"


def batch(subject: Subject, original: Subject) -> str:
    """A batch gives what each of its images gives alone."""
    images = subject.images(3)
    together, alone = run(subject.model, images), [run(subject.model, image[None]) for image in images]
    _same(together, torch.cat(alone), "a batch must give what its images give alone")
    return "3 images together and alone are the same"


def sizes(subject: Subject, original: Subject) -> str:
    """Another size works or is refused, also through `set_input_size`, and the way back restores the result."""
    images = subject.images(2)
    before = run(subject.model, images)
    new = _other(subject)
    reached = subject.at(new)
    found = run(reached.model, reached.images(1))
    if not bool(found.isfinite().all()):
        raise Failed(f"outputs must be finite on {_by(new)} patches")
    notes = []
    model: Any = copy.deepcopy(subject.model)
    pixels = new[0] * subject.patch[0], new[1] * subject.patch[1]
    other = reached.images(1)
    try:
        dynamic = run(model, other)
    except Exception:  # whatever code of others raises is its way to refuse the size
        notes.append("other sizes only through set_input_size")
    else:
        notes.append("other sizes in a forward pass")
        _same(run(model, images), before, "another size in between must not change the result")
        if hasattr(model, "set_input_size"):
            law = f"set_input_size must compute what a forward pass computes on {_by(new)} patches"
            _same(run(reached.model, other), dynamic, law)
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
        _same(run(model, images), before, "set_input_size there and back must restore the result")
        notes.append("there and back" + (f" (resamples {', '.join(moved[:2])} twice)" if moved else ""))
    return ", ".join(notes)


def crop(subject: Subject, original: Subject) -> str:
    """Position of a crop is the crop of the position, along both axes or along none."""
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
        kept.append(all(float((square[p] - larger[p]).abs().max()) <= _SAME * scale for p in common))
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
    """Return what position gives, by displacement if it is relative and by place if it is absolute."""
    try:
        seen = relative(subject)
        if seen.reading() != RIGHT:
            raise NotApplicable("attention is no function of the displacement")
        return seen.by_displacement()
    except NotApplicable:
        rows = subject.rows()
        tokens = subject.base.inputs[subject.base.tokens][0, rows]
        if float((tokens - tokens.mean(0)).abs().max()) <= 1e-6 * float(tokens.abs().max()):
            raise
        width = subject.grid[1]
        return {(rank // width, rank % width): value for rank, value in enumerate(tokens)}


def transposition(subject: Subject, original: Subject) -> str:
    """A model with transposed position tables and kernels gives for the transposed image what it gave before."""
    rotary = [one for one in subject.model.modules() if _has_shape(getattr(one, "get_embed", None))]
    if rotary:
        return _rotary_transposition(rotary[0])
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
            f"a transposed model must give the same for a transposed image, got another result on {_by(tall.grid)} "
            f"patches, while it does on {_by(square.grid)}"
        )
    return f"holds on {_by(tall.grid)} patches"


def _transposes(subject: Subject, other: Subject) -> bool:
    """Return whether `other`, at the transposed size, with the transposed weights of `subject`, gives the same."""
    images = subject.images(2)
    expected = run(subject.model, images)
    model = _transposed(subject, other)
    found = run(model, images.transpose(-2, -1).contiguous())
    if found.shape != expected.shape:
        return False
    return float((found - expected).abs().max()) <= _SAME * float(expected.abs().max())


@torch.no_grad()
def _transposed(subject: Subject, other: Subject) -> nn.Module:
    model = copy.deepcopy(other.model)
    sources = dict(subject.model.named_modules())
    held = dict([*model.named_parameters(), *model.named_buffers()])
    for name, module in model.named_modules():
        source: Any = sources[name]
        if isinstance(module, nn.Conv2d):
            module.weight.copy_(source.weight.transpose(-2, -1))
        elif isinstance(module, nn.Linear) and module.in_features == 2:  # of coordinates
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


def _rotary_transposition(rotary: Any) -> str:
    """Compare the cosines of all channels of a patch, sorted, with those of its mirror image."""

    def cosines(shape: Size) -> Tensor:
        one = copy.deepcopy(rotary)
        if getattr(one, "feat_shape", None) is not None and hasattr(one, "update_feat_shape"):
            one.update_feat_shape(list(shape))
            table = one.get_embed()
        else:
            table = one.get_embed(shape=list(shape))
        table = table[1] if isinstance(table, tuple) else table.chunk(2, -1)[1]
        if table.shape[-2] != shape[0] * shape[1]:
            raise NotApplicable(f"{type(rotary).__name__}.get_embed does not follow the shape")
        values: Tensor = table.detach().double().unflatten(-2, shape).sort(-1)[0]
        return values

    def mirrors(shape: Size) -> bool:
        there, back = cosines(shape), cosines((shape[1], shape[0])).transpose(-3, -2)
        return float((there - back).abs().max()) <= _SAME

    if not mirrors((4, 4)):
        raise NotApplicable(f"{type(rotary).__name__} has other frequencies for rows than for columns")
    if not mirrors((3, 5)):
        raise Failed(
            f"{type(rotary).__name__} must give the transposed angles on a transposed grid, got others on 3 x 5 "
            "patches, while it does on 4 x 4"
        )
    return f"{type(rotary).__name__} gives the transposed angles on a transposed grid"


def caches(subject: Subject, original: Subject) -> str:
    """Sizes, dtypes, devices and instances in turn give what each gives on its own."""
    images = subject.images(2)
    first = run(copy.deepcopy(subject.model), images)
    model = copy.deepcopy(subject.model)
    _same(run(model, images), first, "a copy must give the same")
    turns = []
    for grid in dict.fromkeys((_other(subject), subject.grid[::-1])):
        pixels = grid[0] * subject.patch[0], grid[1] * subject.patch[1]
        there = replace(subject, image=pixels).images(2)
        try:
            alone = run(copy.deepcopy(subject.model), there)
        except Exception:  # whatever code of others raises is its way to refuse the size
            continue
        try:
            after = run(model, there)
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise Failed(f"a size must work after another, got on {_by(grid)} patches: {said}") from error
        _same(after, alone, f"{_by(grid)} patches must give the same after another size")
        _same(run(model, images), first, "the first size must give the same after another")
        turns.append("sizes")
    _after_turn(subject)
    for dtype, tolerance in ((torch.float32, 1e-2), (torch.float64, _EXACT)):
        try:
            found = run(copy.deepcopy(subject.model).to(dtype), images.to(dtype))
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise Failed(f"{dtype} must work after another dtype, got {type(error).__name__}: {said}") from error
        if found.dtype != dtype:
            raise Failed(f"outputs of a {dtype} model must be {dtype} after another dtype, got {found.dtype}")
        _same(found.double(), first, f"{dtype} must give the same after another dtype", tolerance)
    turns.append("dtypes")
    if torch.cuda.is_available():
        moved = run(copy.deepcopy(subject.model).cuda(), images.cuda())
        _same(moved.cpu(), first, "a GPU must give the same", 1e-6)
        _same(run(subject.model, images), first, "the CPU must give the same after a GPU")
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
    _same(run(subject.model, images), first, "a second instance must not change the first")
    turns.append("instances")
    return f"{', '.join(dict.fromkeys(turns))} in turn"


def _after_turn(subject: Subject) -> None:
    """Check that attention still depends on the displacement at a grid of as many patches, after the first."""
    try:
        first = relative(subject)
        right = first.reading() == RIGHT
        turned = relative(subject.at((subject.grid[1], subject.grid[0])))
    except NotApplicable:
        return
    if right and turned.reading() != RIGHT:
        raise Failed(
            f"attention on {_by(turned.shape)} patches must depend on their displacement after {_by(first.shape)}, got "
            "the position of the other size"
        )


def export(subject: Subject, original: Subject) -> str:
    """`torch.export` with any batch size gives the same."""
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
        raise Failed(f"an exported model must take any batch, got {len(found)} outputs for 3 images")
    images = subject.images(3).float()
    _same(run(program.module(), images), run(model, images), "an exported model must compute the same", 1e-4)
    return "exported with a dynamic batch"


@torch.no_grad()
def run(model: nn.Module, images: Tensor) -> Tensor:
    """Return the outputs of a model as one tensor, (B, ...)."""
    found = model(images)
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, tuple | list):
        found = torch.cat([one.flatten(1) for one in found if isinstance(one, Tensor)], 1)
    if not isinstance(found, Tensor):
        raise TypeError(f"a model must return tensors, got {type(found).__name__}.")
    return found


def _same(found: Tensor, expected: Tensor, law: str, tolerance: float = _EXACT) -> None:
    if found.shape != expected.shape:
        raise Failed(f"{law}, got a shape of {tuple(found.shape)} instead of {tuple(expected.shape)}")
    error = float((found - expected).abs().max())
    if not error <= tolerance * max(float(expected.abs().max()), 1e-3):
        raise Failed(f"{law}, got a difference of {error:.1e}")


def _any(*laws: Callable[[], str]) -> str:
    """Check several laws: the first that fails decides; not applicable if none of them applies."""
    passed, reasons = [], []
    for law in laws:
        try:
            passed.append(law())
        except NotApplicable as error:
            reasons.append(str(error))
    if not passed:
        raise NotApplicable("; ".join(dict.fromkeys(reasons)))
    return "; ".join(passed)


def _other(subject: Subject) -> Size:
    """Return another grid, with sides that grow differently."""
    height, width = subject.grid
    step = math.gcd(height, width)
    return height + 4 * step, width + step


def _of_position(name: str) -> bool:
    return any(part in name.lower() for part in ("pos", "rel", "rope", "freq"))


def _has_shape(function: Any) -> bool:
    return callable(function) and "shape" in inspect.signature(function).parameters


def _non_commuting(model: Any) -> bool:
    """Return whether a model of ours rotates blocks of channels, in an order."""
    position = getattr(model, "position", None)
    return (
        any(type(one).__name__ == "LieRe" for one in position.modules()) if isinstance(position, nn.Module) else False
    )


def _tokens(count: int) -> str:
    return f"{count} other token{'s' * (count != 1)}"


def _by(shape: Size) -> str:
    return f"{shape[0]} x {shape[1]}"
