"""Name the encoding that equals position code: candidates are read from its values, and certified on several grids."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from graticule.encodings.alibi import Distance
from graticule.encodings.build import build_position
from graticule.encodings.rope import Rope
from graticule.encodings.sinusoidal import Order
from graticule.external.rotary import rotation_of
from graticule.position.grid import Grid
from graticule.position.places import by
from graticule.position.position import Position
from graticule.position.rotation import PairRotation
from graticule.registry.specs import Spec
from graticule.system.tables import PrintedTable
from graticule.testing.dialects import NEAR, ROUGH, Candidate, candidates, nice, pairs, read_angles
from graticule.testing.model_under_test import Failed, ModelUnderTest, NotApplicable
from graticule.testing.pairs import GRIDS, BiasCode, RotationCode
from graticule.testing.tables import PositionCode, TableCode, resampling

#: Grids on which the name of a rotation is certified, and those whose angles are read: small, large, and between.
CERTIFIED, LARGE = ((6, 6), (5, 12), (24, 3), (3, 40)), (70, 90)
READ = (4, 3), LARGE, (30, 44)


@dataclass(frozen=True, repr=False)
class Identity(PrintedTable):
    """The encoding that equals position code, or the nearest one.

    encoding: its spec for `build_position`; None if no encoding is equal.
    grid: the grid that it, or the nearest one, is for, such as 'Grid(1, H, W)' for an image as a video of one frame.
    difference: the largest difference from the code in float64; of a rotation, for normal random queries.
    grids: the grids on which they were compared.
    nearest: the spec of the nearest encoding, if none is equal.
    presets: the presets with the same values.
    notes: what the code does besides, such as to change the length of queries.
    """

    encoding: str | None
    grid: str
    difference: float
    grids: tuple[tuple[int, ...], ...]
    nearest: str | None = None
    presets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left = 2

    def summary(self) -> list[tuple[str, ...]]:
        """Return a header, then what is known, a row each."""
        grids = ", ".join(map(by, self.grids))
        return [
            ("encoding with the same values", self.encoding or "none"),
            *(("nearest", name) for name in [self.nearest] if name),
            ("for", self.grid),
            ("largest difference in float64", f"{self.difference:.1e}, on {grids} patches"),
            *(("preset with the same values", preset) for preset in self.presets),
            *(("note", note) for note in self.notes),
        ]


def identify(code: PositionCode | nn.Module | Callable[..., Tensor], channels: int = 64) -> Identity:
    """Name the encoding of this library that equals a rotation, a table or an attention bias, or the nearest encoding.

    It is named only if all differences are within the rounding to float32, on all grids.

    Args:
        code: position code as for `inspect_code`; a model of timm, diffusers or transformers, whose rotation is found;
            or a function `rotate(queries, grid)`, as of a `RotationCode`, or one that maps a grid to a table or a bias.
        channels: d, of a head, for a function that rotates.

    Raises:
        ValueError: if the code fails on a small grid, or returns another shape, or values that are not finite.
    """
    try:
        known = _code_of(code, channels)
        if isinstance(known, RotationCode):
            notes = _faults(known)
            grids = CERTIFIED if known.grids == GRIDS else known.grids
            return _search(known, grids, () if notes else _of_rotation(known, notes), notes)
        tries = [*(_of_table if isinstance(known, TableCode) else _of_bias)(known)]
        grids = (known.native, *known.other_grids) if isinstance(known, TableCode) else known.grids
        identity = _search(known, grids, tries, [])
        alone = _search(known, grids[:1], tries, [f"at other grids than {by(grids[0])} it has other values"])
        return alone if identity.encoding is None and alone.encoding is not None else identity
    except Failed as error:
        raise ValueError(f"`code` must give finite positions of the right shape: {error}.") from error


def _code_of(code: Any, channels: int) -> Any:
    """Return the position code of a model or a function."""
    if isinstance(code, PositionCode):
        return code
    if isinstance(code, nn.Module):
        return _code_in(code)
    if not callable(code):
        raise ValueError(f"`code` must be position code, a model or a function, got {code!r}.")
    required = sum(argument.default is argument.empty for argument in inspect.signature(code).parameters.values())
    if required not in (0, 1, 2):
        raise ValueError(f"`code` must be a function of (queries, grid), or of a grid, got {required} arguments.")
    if required != 1:
        return RotationCode(code, channels) if required else _code_of(code(), channels)
    values = PositionCode.run(code, GRIDS[0], GRIDS[0])
    is_bias = values.shape[-2:] == (math.prod(GRIDS[0]),) * 2
    return BiasCode(code) if is_bias else TableCode(code, values, GRIDS[0])


def _code_in(model: nn.Module) -> RotationCode:
    """Return the rotation in the first layer of a model of this library, timm, diffusers or transformers."""
    parts: list[Any] = [*model.modules()]
    position: Any = next((part for part in parts if isinstance(part, Position) and part.form == "rotation"), None)
    rope: Any = next((part for part in parts if hasattr(part, "get_embed")), None)
    position, rope = copy.deepcopy((position, rope))
    half = any(getattr(part, "rotate_half", False) for part in parts)

    def rotation(grid: tuple[int, int]) -> Any:
        if position is not None:
            return position.double().eval()(Grid(*grid))[0].rotary
        if hasattr(rope, "update_feat_shape"):  # it has the rotation of one grid
            rope.update_feat_shape(list(grid))
        table = rope.get_embed(list(grid)).detach()
        return PairRotation(table[0] if table.ndim > 3 else table, half)

    first: Any = rotation(GRIDS[0]) if position is not None or rope is not None else None
    if hasattr(first, "table"):
        *heads, _, waves = first.table.shape
        return RotationCode(lambda x, grid: rotation(grid)(x, x)[0], waves // 2, heads[-1] if heads else 1)
    with suppress(ValueError):
        return RotationCode(*rotation_of(model))
    tables: Any = ()
    with suppress(Exception):  # of the forward pass of any model
        tables = ModelUnderTest.of(model, None, None).tables
    raise ValueError(
        f"`code` must have a rotation of a known class, or be a function of (queries, grid), got {type(model).__name__}"
        + (f" with the table {' and '.join(tables)} instead." if tables else ".")
    )


def _search(code: Any, grids: Any, tries: Iterable[Candidate], notes: list[str]) -> Identity:
    """Return the first candidate that equals the code, with the presets that do, or else the nearest one."""
    values = {grid: _values(code, grid) for grid in grids}
    best, nearest, equal, presets = Candidate(Spec("none")), math.inf, False, []
    for candidate in tries:
        off, equal = _compare(code, candidate, values, nearest)
        equal = equal and not candidate.rough
        if equal or off < nearest:
            best, nearest = candidate, off
        if equal:
            break
    for name, options in Rope.presets.items() if isinstance(code, RotationCode) else ():
        shape = {3: "1, H, W", 4: "1, H, W, 1"}.get(len(options.get("split", ())), "H, W")
        preset = Candidate(Spec("rope", {"preset": name}), shape)
        off, same = _compare(code, preset, values, nearest)
        same = same and not best.rough
        presets += [str(preset.spec)] * same
        if off < nearest and not equal:
            best, nearest, equal = preset, off, same
    with suppress(Failed):  # it has no positions for large grids
        if equal and grids == CERTIFIED and not _compare(code, best, {LARGE: _values(code, LARGE)})[1]:
            notes = [*notes, f"at {by(LARGE)} patches it has other values"]
    if best.values is not None:
        notes = [*notes, "its parameters are learned: with the code's values the encoding gives the same"]
    if not equal and nearest < math.inf and isinstance(code, RotationCode) and tries:  # else it has no frequencies
        notes = [*notes, *_differing(code, best)]
    names = (str(best.spec), None) if equal else (None, str(best.spec) if nearest < math.inf else None)
    return Identity(names[0], f"Grid({best.shape})", nearest, tuple(grids), names[1], tuple(presets), tuple(notes))


def _values(code: Any, grid: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the values of code on a grid; for a rotation, the random queries that it rotated."""
    if not isinstance(code, RotationCode):
        values: Tensor = code.at(grid).double()
        return values
    shape = 1, code.heads, code.prefix + math.prod(grid), code.channels
    return code.rotated(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype), grid).double()


def _compare(code: Any, candidate: Candidate, values: dict[Any, Tensor], most: float = 0.1) -> tuple[float, bool]:
    """Return the largest difference of an encoding from values of code by grid, and whether all are of rounding.

    Above `most`, other grids are left out: the encoding is not the nearest one.
    """
    worst, equal, position = 0.0, True, None
    for grid, known in values.items():
        place = _place(code, candidate, grid)
        try:
            if position is None:
                position = _build(code, candidate, place, known)
            layer = position(place)[0]
        except ValueError:  # its options do not fit such a head or grid
            return math.inf, False
        if isinstance(code, RotationCode):
            other = _values(replace(code, rotate=partial(_rotated, layer.rotary)), grid)
            reach = float(position.encoding.angles(place).detach().abs().max())
        else:
            other, reach = layer.bias if isinstance(code, BiasCode) else layer.added_to_stream, max(grid)
        error = float((other.detach() - known).abs().max())
        rounding = 2 * torch.finfo(torch.float32).eps * (1 + reach) * float(known.abs().max())
        worst, equal = max(worst, error), equal and error <= rounding
        if error > max(most, rounding):
            break
    return worst, equal


def _differing(code: RotationCode, best: Candidate) -> list[str]:
    """Name the frequencies of code that differ from the nearest encoding, if their pairs are the same."""
    position = _build(code, best, _place(code, best, LARGE), torch.empty(0))

    def rotate(queries: Tensor, grid: Any) -> Tensor:
        return _rotated(position(_place(code, best, grid))[0].rotary, queries, grid)

    lines: list[str] = []
    with suppress(Failed, ValueError):  # it has no positions for large grids
        _, pair = next(pairs(_partners(code)))
        ours, its = (read_angles(rotation, LARGE, pair).steps[0] for rotation in (replace(code, rotate=rotate), code))
        index = ((its - ours).abs() > 1e-5 * ours.abs().clamp_min(1e-9)).any(-1).nonzero().flatten().tolist()
        ratios = (its.norm(dim=-1) / ours.norm(dim=-1)).tolist()
        lines = [
            f"frequency {at} of {len(pair)} is {ratios[at]:.6g} times the frequency of the nearest" for at in index[:3]
        ]
        lines += [f"{len(index)} of {len(pair)} frequencies differ"] * (len(index) > 3)
    return lines


def _partners(code: RotationCode) -> Tensor:
    """Return the other channel of the pair of each channel, (d,); itself if it is not rotated."""
    coupled = code.at(code.grids[0]).abs().amax((0, 1)).fill_diagonal_(0) > 1e-12
    return torch.where(coupled.any(-1), coupled.int().argmax(-1), torch.arange(code.channels))


def _place(code: Any, candidate: Candidate, grid: Any) -> Grid:
    """Return the grid of a candidate for (H, W)."""
    sides = {"1": 1, "H": grid[0], "W": grid[1], "H * W": math.prod(grid)}
    return Grid(*(sides[side] for side in candidate.shape.split(", ")), prefix=code.prefix)


def _rotated(rotary: Any, queries: Tensor, _: Any) -> Tensor:
    rotated: Tensor = rotary(queries, queries)[0]
    return rotated


def _build(code: Any, candidate: Candidate, place: Grid, known: Tensor) -> Any:
    """Build the position of a candidate for code that has these values on a grid."""
    heads = len(known) if isinstance(code, BiasCode) else getattr(code, "heads", 1)
    dim = known.shape[-1] if isinstance(code, TableCode) else getattr(code, "channels", 4) * heads
    position = build_position(place, dim=dim, depth=1, num_heads=heads, encoding=candidate.spec).double().eval()
    with torch.no_grad():
        for parameter, values in zip(position.parameters(), candidate.values or (), strict=False):
            parameter.copy_(values.reshape(parameter.shape))
    return position


def _faults(code: RotationCode) -> list[str]:
    """Return the reasons that code rotates no pairs of channels."""
    grid, notes = code.grids[0], []
    matrices = code.at(grid).double()
    twos = matrices.new_full((1, *matrices.shape[:3]), 2.0)
    if (change := float((matrices.norm(dim=-2) - 1).abs().max())) > 1e-3:
        notes.append(f"no rotation: it changes lengths of queries by up to {100 * change:.3g} %")
    if float((matrices.sum(-1) - code.rotated(twos, grid)[0] / 2).abs().max()) > 1e-3:
        notes.append("no rotation: it depends on the input, other than linearly in the queries")
    if torch.equal(matrices, torch.eye(code.channels).expand_as(matrices)):
        notes.append("no position: queries stay as they are")
    if not notes and int((matrices.abs().amax((0, 1)) > 1e-12).sum(-1).max()) > 2:
        notes.append("it does not rotate pairs of channels")
    return notes


def _of_rotation(code: RotationCode, notes: list[str]) -> Iterator[Candidate]:
    """Yield the candidates for a rotation of pairs; adds to notes."""
    partner, layouts = _partners(code), list[Any]()
    for read in (*[READ] * (code.grids == GRIDS), (*code.grids, *code.grids)[:3]):
        with suppress(Failed):  # it has no positions for large grids
            layouts = [(options, [read_angles(code, at, pair) for at in read]) for options, pair in pairs(partner)]
            break
    if layouts and (bend := layouts[0][1][-1].bend) > 1e-2:
        notes.append(f"its positions are not evenly spaced, as if quantized: angles are up to {bend:.2g} rad off")
    with suppress(Failed):
        grid = (2, 300) if code.grids == GRIDS else code.grids[-1]
        for dtype, most in ((torch.float32, 1e-2), (torch.bfloat16, 0.2)):
            if (off := float((_values(code, grid, dtype) - _values(code, grid)).abs().max())) > most:
                notes.append(f"it depends on the dtype: {dtype} queries have other positions, up to {off:.2g} off")
    for near in (NEAR, ROUGH):
        for options, angles in layouts:
            fits = candidates(options, angles[0], angles[1], angles[2], near)
            yield from (candidate._replace(rough=near > NEAR) for candidate in fits)


def _of_bias(code: BiasCode) -> Iterator[Candidate]:
    """Yield biases by formula, and those that are linear in their learned tables, with their values."""
    grid, bias = code.grids[0], code.at(code.grids[0])
    place, heads, last = Grid(*grid, prefix=code.prefix), len(bias), math.prod(grid) - 1
    for distance in get_args(Distance):
        unit = Candidate(Spec("alibi", {"distance": distance, "slopes": (1.0,) * heads}))
        lengths = _build(code, unit, place, bias)(place)[0].bias
        slopes = ((bias * lengths).sum((1, 2)) / lengths.square().sum((1, 2))).tolist()
        yield Candidate(Spec("alibi", {"distance": distance}))
        yield Candidate(Spec("alibi", {"distance": distance, "slopes": tuple(map(nice, slopes))}))
    yield Candidate(Spec("sandwich"))
    corners = [code.prefix + at for at in (0, grid[-1] - 1, last + 1 - grid[-1], last)]  # have all displacements
    corners += [0] * (code.prefix > 0)
    learned = [
        Spec("bucketed_bias", {"buckets": 32, "max_distance": 128}),
        Spec("mirrored_bias"),
        Spec("relative_bias"),
    ]
    learned += [Spec("relative_bias", {"prefix_rows": True})] * (code.prefix > 0)
    for spec in learned:
        position = _build(code, Candidate(spec), place, bias[:1])
        tables, columns = [*position.parameters()], []
        with torch.no_grad():
            torch._foreach_zero_(tables)
            for entry in (entry for table in tables for entry in table.view(-1)):
                entry.fill_(1)
                columns.append(position(place)[0].bias[0, corners].flatten())
                entry.zero_()
        solved = torch.linalg.lstsq(torch.stack(columns, -1), bias[:, corners].flatten(1).T, driver="gelsd").solution
        parts = solved.split([table.numel() for table in tables])
        yield Candidate(spec, values=tuple(part.T if spec.name == "mirrored_bias" else part for part in parts))


def _of_table(code: TableCode) -> Iterator[Candidate]:
    """Yield sinusoids, and a learned table with its resampling."""
    tokens = code.at(code.native).double()
    rows, dim = tokens[code.prefix :], tokens.shape[-1]
    factor = float(rows[-1].norm()) / math.sqrt(dim / 2)
    spread = {"spread": nice(float((rows - rows.mean(0)).square().mean().sqrt()))} if abs(factor - 1) > 1e-3 else {}
    for row, count, form in ((rows[1], dim // 4, "H, W"), (tokens[1], dim // 2, ""), (rows[1], dim // 2, "H * W")):
        slowest = min((value / factor for value in row.abs().tolist() if 1e-7 < value <= factor), default=1.0)
        for tolerance in (1e-3, 1e-5):
            waves = {"temperature": nice(math.asin(slowest) ** (-count / max(count - 1, 1)), tolerance)} | spread
            orders = [{"order": order} for order in get_args(Order)] if form else []
            yield from (Candidate(Spec("sinusoidal_2d", waves | order), form) for order in orders)
            yield from () if form else [Candidate(Spec("sinusoidal_1d", waves))]
    with suppress(NotApplicable, Failed):
        yield Candidate(Spec("learnable", {"resampler": resampling(code)}), values=(code.rows(),))
