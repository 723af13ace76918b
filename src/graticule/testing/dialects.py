"""The rotary encodings with the angles of given code: its pairs of channels, coordinates and frequencies are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from graticule.encodings.forms.coordinates import Coordinates, Origin
from graticule.encodings.mrope import Mrope
from graticule.encodings.rope import Frequencies, Rope
from graticule.position.grid import Grid
from graticule.registry.specs import Spec
from graticule.testing.pairs import wrap_angle

Options = dict[str, Any]
#: Largest relative difference of a frequency that is read from one of a candidate, which is certified later.
NEAR = 1e-4
#: The same for the nearest encoding, if none is equal.
ROUGH = 0.1
TINY = 1e-12


class Angles(NamedTuple):
    """Angles of n pairs of channels on a grid, in radians: at the first patch, (h, n), per step, (h, n, axes).

    `bend` is the largest difference of a patch from angles that are linear in its index.
    """

    grid: tuple[int, ...]
    first: Tensor
    steps: Tensor
    bend: float


class Candidate(NamedTuple):
    """An encoding, the shape of its grid as text, and the values of its parameters, if they are learned.

    The frequencies of a rough match differ from the frequencies of the code, so it is at most the nearest encoding.
    """

    spec: Spec
    shape: str = "H, W"
    values: tuple[Tensor, ...] | None = None
    rough: bool = False


def pairs(partner: Tensor) -> Iterator[tuple[Options, Tensor]]:
    """Yield the layouts with these partners of channels, (d,), as options, and the channels of pairs, (d / 2, 2).

    A channel that is not rotated is its own partner.
    """
    index, gap = torch.arange(len(partner)), int((partner - torch.arange(len(partner))).max())
    layouts: list[tuple[Options, Tensor]] = [({}, index.view(-1, 2)), ({"layout": "half"}, index.view(2, -1).T)]
    if len(partner) % 4 == 0:
        layouts.append(({"layout": "half_per_axis"}, index.view(2, 2, -1).mT.flatten(0, 1)))
    if 0 < 2 * gap < len(partner):
        for first, where in ((0, {}), (len(partner) - 2 * gap, {"unrotated": "first"})):
            before, part, after = index.split([first, 2 * gap, len(partner) - 2 * gap - first])
            channels = torch.cat([before.view(-1, 2), part.view(2, -1).T, after.view(-1, 2)])
            layouts.append(({"layout": "half_rotated"} | where, channels))
    for options, channels in layouts:
        if bool(((partner[channels] == channels) | (partner[channels] == channels.flip(-1))).all()):
            yield options, channels


def read_angles(code: Any, grid: tuple[int, ...], pair: Tensor) -> Angles:
    """Read the angles of pairs of channels, (n, 2), of a `RotationCode` on a grid."""
    queries = torch.zeros(1, code.heads, code.prefix + math.prod(grid), code.channels, dtype=torch.float64)
    queries[..., pair[:, 0]] = 1
    rotated = code.rotated(queries, grid)[0, :, code.prefix :].double()
    angles = torch.atan2(rotated[..., pair[:, 1]], rotated[..., pair[:, 0]])  # (h, N, n)
    first, slopes, index = angles[:, 0], [], Grid(*grid).coordinates().double()
    for axis, side in enumerate(grid):
        line = angles[:, index.sum(-1) == index[:, axis]] - first[:, None]
        slope, stride = torch.zeros_like(first), 1
        while stride < side:  # a longer distance is more exact, and known up to whole turns
            slope, stride = slope + wrap_angle(line[:, stride] - stride * slope) / stride, 2 * stride
        slopes.append(slope)
    steps = torch.stack(slopes, -1)
    return Angles(grid, first, steps, float(wrap_angle(angles - first[:, None] - index @ steps.mT).abs().max()))


def candidates(layout: Options, small: Angles, large: Angles, other: Angles, near: float = NEAR) -> Iterator[Candidate]:
    """Yield encodings with these angles on a small and on two larger grids, to `near`, the likeliest first."""
    for kind in get_args(Origin):
        (unit, origin), (its_unit, _) = (_units(kind, angles.grid) for angles in (large, other))
        vectors = large.steps / unit
        offset = _offset(large.steps, large.first - (vectors * origin).sum(-1))
        if offset is not None and _near(vectors * its_unit, other.steps, near):
            yield from _encodings(layout, vectors, offset | ({"coordinates": kind} if kind != "patches" else {}), near)
    if layout.keys() <= {"layout"}:  # a step to the next row is one of a whole row
        for frequencies in _frequencies(large.steps[0, :, -1], near):
            yield Candidate(Spec("rope_1d", frequencies | layout))
    offset = _offset(small.steps, small.first) or {}
    for vectors, reference, way in _scaled(small, large, other):
        yield from _encodings(layout, vectors, offset | way | {"reference": tuple(reference.int().tolist())}, near)


def _near(steps: Tensor, others: Tensor, near: float = NEAR) -> bool:
    return bool((wrap_angle(steps - others).abs() < 10 * near * (1e-3 + others.abs())).all())


def _scaled(small: Angles, large: Angles, other: Angles) -> Iterator[tuple[Tensor, Tensor, Options]]:
    """Yield frequency vectors per patch of the reference, its sides, and how they are scaled on another grid."""
    sides, moves = torch.tensor(large.grid).double(), small.steps[0].abs() > TINY
    places = [axis.nonzero().flatten() for axis in moves.unbind(-1)]
    if not all(map(len, places)):
        return
    spans = large.steps * sides
    if _near(spans / torch.tensor(other.grid), other.steps):
        first = torch.stack([spans[0, at[0], axis] for axis, at in enumerate(places)])
        fall = torch.stack([first[axis] / spans[0, at[:2][-1], axis] for axis, at in enumerate(places)])
        rank = torch.tensor([float(at[0]) for at in places])
        every = torch.tensor([float(at[:2].diff()) if len(at) > 1 else 1.0 for at in places])
        # the first frequency of an axis is 1, or axes share a series: in turn, or by the number of the pair
        for shift in (0 * rank, rank.argsort().argsort() / len(rank), rank / every):
            reference = (first * fall**shift).round().clamp_min(1)
            yield spans / reference, reference, {"scaling": "interpolation"}
    known, scaled = small.steps[0].abs(), large.steps[0].abs()
    slowest = torch.where(moves, known, math.inf).argmin(0, keepdim=True)
    ratio, lowest = (known / scaled).gather(0, slowest)[0], known.gather(0, slowest)[0]
    depth = (known.max() / lowest).log() / (known.max() / known[moves].min()).log()  # of a series that axes share
    ways: tuple[tuple[Tensor, Options], ...] = (
        (ratio, {"scaling": "ntk"}),
        (ratio ** (1 / depth), {"scaling": "ntk"}),
        (ratio, {"scaling": "yarn"}),
        (ratio, {"scaling": "yarn", "ramp": (0.25, 1.0)}),
    )
    if bool((ratio > 1 + NEAR).all()):
        yield from ((small.steps, (sides / s).round(), way) for s, way in ways)


def _encodings(layout: Options, vectors: Tensor, options: Options, near: float) -> Iterator[Candidate]:
    """Yield encodings with these frequency vectors per unit of the coordinates, (h, n, axes)."""
    sizes = vectors.norm(dim=-1, keepdim=True)
    moves = vectors.abs() > 1e-6 * sizes.clamp_min(TINY)
    if bool((moves.sum(-1) <= 1).all()) and bool(((vectors - vectors[0]).abs() <= near * sizes).all()):
        yield from _axial(layout, torch.where(moves[0], vectors[0], 0), options, near)
    elif layout == {"layout": "half"}:
        still = int((sizes[0] <= TINY).sum())
        ends: Options = {"lowest": nice(float(sizes[0, still])), "highest": nice(float(sizes[0, -1]))}
        zeros = {"zeros": nice(still / sizes.shape[1]), "coordinates": "patches"}
        yield Candidate(Spec("rope_golden_gate", ends | zeros | options))
    else:
        yield Candidate(Spec("rope_mixed", options), values=(vectors.permute(2, 0, 1).flip(0),))


def _axial(layout: Options, vectors: Tensor, options: Options, near: float) -> Iterator[Candidate]:
    """Yield `rope` and `mrope` with these frequency vectors, (n, axes), whose pairs have one axis each."""
    moves, grid, (count, axes) = vectors != 0, Grid(*(1,) * vectors.shape[1]), vectors.shape
    split, at = tuple(moves.sum(0).tolist()), moves.any(-1).nonzero().flatten()
    if not len(at):
        return
    series = [vectors[moves[:, axis], axis] for axis in range(axes)]
    bases = tuple(next(_frequencies(axis, near), {}).get("base") for axis in series)
    longest = max(series, key=len)
    shared = vectors.sum(-1)[at].sort(descending=bool(longest[0] > longest[-1])).values
    choices = [*_frequencies(longest, near), *(fit | {"alternate": True} for fit in _frequencies(shared, near))]
    choices += [{"base": bases}] * (None not in bases)
    frame = [] if "unrotated" in layout or not at[0] else [(int(at[0]), *split)]  # its pairs rotate no image
    for parts, frequencies in product((*frame, split), choices):
        for order, arrangement, where in product(("yx", "xy"), ("chunked", "interleaved"), ("last", "first")):
            named = {**layout, "order": order, "arrangement": arrangement, "unrotated": layout.get("unrotated", where)}
            with suppress(ValueError):  # options that exclude each other
                rope = Rope(grid, 2 * count, Frequencies(**frequencies), split=parts, **named)
                if bool(((rope.vectors() - vectors).abs() <= near * vectors.abs()).all()):
                    equal = len({*parts}) == 1 and len(parts) * parts[0] == count
                    shape = {key: value for key, value in named.items() if value not in ("yx", "chunked", "last")}
                    spec = Spec("rope", frequencies | shape | ({} if equal else {"split": parts}) | options)
                    yield from (Candidate(spec, form) for form in ("1, H, W", "H, W")[len(parts) == axes :])
    if layout == {"layout": "half"} and at[-1] > 0:
        size, sections = vectors.sum(-1)[at].abs().log(), (count - len(at), *split)
        base = math.exp(min(-float((size * at).sum() / (at * at).sum()) * count, 99))
        bases = tuple(dict.fromkeys(nice(base, tolerance) for tolerance in (1e-3, 1e-5, 1e-7)))
        for number, arrangement in product(bases if axes == 2 else (), ("interleaved", "chunked")):
            named = {"base": number, "sections": sections, "arrangement": arrangement}
            if bool(((Mrope(grid, 2 * count, **named).vectors() - vectors).abs() <= near * vectors.abs()).all()):
                yield from (Candidate(Spec("mrope", named | options), form) for form in ("H, W", "1, H, W"))


def _frequencies(series: Tensor, near: float) -> Iterator[Options]:
    """Yield the options of `rope` that give a series of frequencies to `near`, the simplest first."""
    if not len(series) or float(series.min()) <= 0:
        return
    first, last, count = float(series[0]), float(series[-1]), len(series)
    fall = (first / last) ** (count / max(count - 1, 1))  # T for a series T^(-k / n)
    fits: list[Options] = []
    if near > NEAR and count > 2:  # a few frequencies may differ: most falls from one to the next are equal
        fall = math.exp(min(-float(series.log().diff().median()) * count, 99))
    for tolerance in (1e-3, 1e-5, 1e-7):
        base, pixels = {"base": nice(min(fall, 1e40), tolerance)}, {"pixels": nice(2 * last / math.pi, tolerance)}
        periods = {"periods": tuple(nice(2 * math.pi / frequency, tolerance) for frequency in (first, last))}
        for options in (base, base | {"turns": True}, pixels, pixels | {"linear": True}, periods):
            with suppress(ValueError):  # a number beyond its range
                if options not in fits and bool((Frequencies(**options)(count) / series - 1).abs().max() < near):
                    fits.append(options)
    yield from fits


def _units(kind: str, grid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the step of coordinates along each axis of a grid, and the first patch's coordinates, (axes,) each."""
    values: Any = {"coordinates": kind}
    places = Coordinates(**values)(Grid(*grid)).unflatten(0, grid)
    return places[(1,) * len(grid)] - places[(0,) * len(grid)], places[(0,) * len(grid)]


def _offset(steps: Tensor, angles: Tensor) -> Options | None:
    """Return the offset in patches, as an option, that gives all pairs these angles, (h, n); None if there is none.

    Slow pairs give it up to whole turns of faster ones.
    """
    step, offset = steps.sum(-1).flatten(), 0.0
    step, angles = step[step.abs() > TINY], angles.flatten()[step.abs() > TINY]
    for at in step.abs().argsort():
        offset += float(wrap_angle(angles[at] - offset * step[at]) / step[at])
    offset = nice(offset, 1e-5) if abs(offset) > 1e-5 else 0
    if wrap_angle(angles - offset * step).abs().sum() > 1e-2 * (1 + abs(offset)):
        return None
    return {"offset": offset} if offset else {}


def nice(number: float, tolerance: float = 1e-6) -> float:
    """Return the number of the fewest digits within a relative tolerance; whole numbers are ints."""
    rounded = (float(f"{number:.{digits}g}") for digits in range(1, 17))
    near = next((value for value in rounded if abs(value - number) <= tolerance * abs(number)), number)
    return int(near) if near.is_integer() else near
