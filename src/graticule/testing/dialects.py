"""The rotary encodings with the angles of given code: its pairs of channels, coordinates and frequencies are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from graticule.encodings.forms.coordinates import Coordinates, Origin
from graticule.encodings.rope import Frequencies
from graticule.position.grid import Grid
from graticule.registry.specs import Spec
from graticule.testing.pairs import wrapped

Options = dict[str, Any]
#: Largest relative difference of a frequency that is read from one of a candidate, which is certified later.
NEAR = 1e-4
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
    """An encoding, the shape of its grid as text, and the values of its parameters, if they are learned."""

    spec: Spec
    shape: str = "H, W"
    values: tuple[Tensor, ...] | None = None


def pairs(partner: Tensor) -> Iterator[tuple[Options, Tensor]]:
    """Yield the layouts with these partners of channels, (d,), as options, and the channels of pairs, (d / 2, 2).

    A channel that is not rotated is its own partner.
    """
    index, gap = torch.arange(len(partner)), int((partner - torch.arange(len(partner))).max())
    layouts: list[tuple[Options, Tensor]] = [({}, index.view(-1, 2)), ({"layout": "half"}, index.view(2, -1).T)]
    if len(partner) % 4 == 0:
        layouts.append(({"layout": "half_per_axis"}, index.view(2, 2, -1).mT.flatten(0, 1)))
    for first, unrotated in (
        ((0, {}), (len(partner) - 2 * gap, {"unrotated": "first"})) if 2 * gap < len(partner) else ()
    ):
        before, part, after = index.split([first, 2 * gap, len(partner) - 2 * gap - first])
        channels = torch.cat([before.view(-1, 2), part.view(2, -1).T, after.view(-1, 2)])
        layouts.append(({"layout": "half_rotated"} | unrotated, channels))
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
            slope, stride = slope + wrapped(line[:, stride] - stride * slope) / stride, 2 * stride
        slopes.append(slope)
    steps = torch.stack(slopes, -1)
    return Angles(grid, first, steps, float(wrapped(angles - first[:, None] - index @ steps.mT).abs().max()))


def candidates(layout: Options, small: Angles, large: Angles, other: Angles) -> Iterator[Candidate]:
    """Yield encodings with these angles on a small and on two larger grids, the likeliest first."""
    for kind in (*get_args(Origin), "interpolation"):
        (unit, origin), (its_unit, _) = (_units(kind, angles.grid) for angles in (large, other))
        vectors, near = large.steps / unit, 10 * NEAR * (1e-3 + other.steps.abs())
        offset = _offset(vectors * unit, large.first - (vectors * origin).sum(-1))
        if offset is not None and bool((wrapped(vectors * its_unit - other.steps).abs() < near).all()):
            named = {"coordinates": kind} if kind not in ("patches", "interpolation") else {}
            if kind != "interpolation":
                yield from _encodings(layout, vectors, offset | named)
                continue
            for shares in _shares(vectors):  # the frequencies of an axis are multiples of its reference
                reference = (vectors[0].amax(0) * shares).round().clamp_min(1)
                scaling = {"scaling": "interpolation", "reference": tuple(reference.int().tolist())}
                yield from _encodings(layout, vectors / reference, offset | scaling)
    if layout.keys() <= {"layout"}:  # a step to the next row is one of a whole row
        for frequencies in _frequencies(large.steps[0, :, -1]):
            yield Candidate(Spec("rope_1d", frequencies | layout))
    yield from _scaled(layout, small, large)


def _shares(vectors: Tensor) -> Iterator[Tensor]:
    """Yield what the fastest pair of each axis is slower than the first of its series, if axes have one or share it."""
    moves = vectors[0].abs() > TINY
    first, counts = moves.int().argmax(0), moves.sum(0)
    ratios = torch.stack([axis[axis.abs() > TINY][1:2].sum() / axis.abs().max() for axis in vectors[0].unbind(-1)])
    yield torch.ones(len(counts), dtype=torch.float64)
    if bool((counts > 1).all()) and bool((ratios > 0).all()):
        yield ratios ** -(first.argsort().argsort() / len(counts))
        spacing = torch.stack([axis.nonzero().flatten()[:2].diff() for axis in moves.unbind(-1)]).flatten()
        yield ratios ** -(first / spacing)


def _scaled(layout: Options, small: Angles, large: Angles) -> Iterator[Candidate]:
    """Yield encodings whose frequencies are scaled on the large grid alone, the slowest of an axis the most."""
    known, scaled, sides = small.steps[0].abs(), large.steps[0].abs(), torch.tensor(large.grid)  # (n, axes)
    moves = known > TINY
    slowest = torch.where(moves, known, math.inf).argmin(0, keepdim=True)
    ratio = (known / scaled).gather(0, slowest)[0]
    if not bool((ratio > 1 + NEAR).all()):
        return
    highest, lowest = known.max().log(), known[moves].min().log()
    depth = (highest - known.gather(0, slowest)[0].log()) / (highest - lowest)
    ways: list[tuple[Tensor, Options]] = [
        (ratio, {"scaling": "ntk"}),
        (ratio ** (1 / depth), {"scaling": "ntk"}),
        (ratio, {"scaling": "yarn"}),
    ]
    s, turns = sides / (sides / ratio).round(), known * (sides / ratio).round() / (2 * math.pi)
    share = torch.where(moves, (scaled / known - 1 / s) / (1 - 1 / s), math.nan)
    at, part = turns[(share > 1e-3) & (share < 1 - 1e-3)], share[(share > 1e-3) & (share < 1 - 1e-3)]
    if len(at) and bool(at.max() > (1 + NEAR) * at.min()):  # shares of 'yarn' are linear in the number of turns
        slope, rest = torch.linalg.lstsq(torch.stack([at, torch.ones_like(at)], -1), part).solution.tolist()
        ends = -rest / slope, (1 - rest) / slope
    elif len(at):  # any ramp through one share, and none of another pair
        ends = float(at[0] * (1 - part[0] / 100)), float(at[0] * (1 + (1 - part[0]) / 100))
    else:
        ends = float(turns[share <= 1e-3].max()), float(torch.cat([turns[share > 0.5], 2 * turns.max()[None]]).min())
    ways += [(ratio, {"scaling": "yarn", "ramp": tuple(nice(end, near) for end in ends)}) for near in (NEAR, 1e-9)]
    for scale, way in ways:
        reference = tuple((sides / scale).round().int().tolist())
        yield from _encodings(
            layout, small.steps, (_offset(small.steps, small.first) or {}) | way | {"reference": reference}
        )


def _encodings(layout: Options, vectors: Tensor, options: Options) -> Iterator[Candidate]:
    """Yield encodings with these frequency vectors per unit of the coordinates, (h, n, axes)."""
    sizes = vectors.norm(dim=-1, keepdim=True)
    moves = vectors.abs() > 1e-6 * sizes.clamp_min(TINY)
    if bool((moves.sum(-1) <= 1).all()) and bool(((vectors - vectors[0]).abs() <= NEAR * sizes).all()):
        places = [axis.nonzero().flatten().tolist() for axis in moves[0].unbind(-1)]
        yield from _in_blocks(layout, vectors[0], places, options)
        if layout == {"layout": "half"}:
            yield from _in_sections(sizes[0, :, 0], places, options)
    elif layout == {"layout": "half"}:
        still = int((sizes[0] <= TINY).sum())
        ends: Options = {"lowest": nice(float(sizes[0, still])), "highest": nice(float(sizes[0, -1]))}
        spec = Spec(
            "rope_golden_gate", ends | {"zeros": nice(still / sizes.shape[1]), "coordinates": "patches"} | options
        )
        yield Candidate(spec)
    else:
        yield Candidate(Spec("rope_mixed", options), values=(vectors.permute(2, 0, 1).flip(0),))


def _in_blocks(layout: Options, vectors: Tensor, places: list[list[int]], options: Options) -> Iterator[Candidate]:
    """Yield `rope` with these frequencies of each axis at these pairs: the axes one after the other, or in turn."""
    used = [axis for axis, at in enumerate(places) if at]
    order = sorted(used, key=lambda axis: places[axis][0])
    by_axis = [at for axis in order for at in places[axis]]
    if not used or order not in (used, used[::-1]) or sorted(by_axis) != [*range(min(by_axis), max(by_axis) + 1)]:
        return
    split, shape, forms = tuple(map(len, places)), dict(layout), ["H, W"]
    if order != used:
        shape["order"] = "xy"
    if by_axis != sorted(by_axis):
        shape["arrangement"] = "interleaved"
    if min(by_axis) and "unrotated" not in layout:  # pairs of the frame, which an image does not rotate
        split, forms = (min(by_axis), *split), ["1, H, W", "H, W"]
    if len(split) * split[0] != len(vectors) or len(set(split)) > 1:
        shape["split"] = split
    series = [vectors[places[axis], axis] for axis in order]
    choices = [*_frequencies(max(series, key=len))]
    if len(used) > 1 and len({*map(len, series)}) == 1:
        choices += [part | {"alternate": True} for part in _frequencies(torch.stack(series, -1).flatten())]
    bases = tuple(next(_frequencies(vectors[at, axis]), {}).get("base") for axis, at in enumerate(places) if at)
    choices += [{"base": bases}] * (None not in bases and len({*bases}) > 1 and len(split) == len(places))
    for frequencies in choices:
        yield from (Candidate(Spec("rope", frequencies | shape | options), form) for form in forms)


def _in_sections(sizes: Tensor, places: list[list[int]], options: Options) -> Iterator[Candidate]:
    """Yield `mrope`, whose pairs have one series of frequencies, (n,), whatever their axis."""
    at = torch.tensor(sorted(index for place in places for index in place))
    sections = (len(sizes) - len(at), *map(len, places))
    if bool((at > 0).any()):
        base = math.exp(-float((sizes[at].log() * at).sum() / (at * at).sum()) * len(sizes))
        for number in dict.fromkeys(nice(base, tolerance) for tolerance in (1e-3, 1e-5, 1e-7)):
            for arrangement in ("interleaved", "chunked"):
                spec = Spec("mrope", {"base": number, "sections": sections, "arrangement": arrangement} | options)
                yield from (Candidate(spec, form) for form in ("H, W", "1, H, W"))


def _frequencies(series: Tensor) -> Iterator[Options]:
    """Yield the options of `rope` that give a series of frequencies, the simplest first."""
    if not len(series) or float(series.min()) <= 0:
        return
    first, last, count, index = float(series[0]), float(series[-1]), len(series), torch.arange(len(series)).double()
    line = torch.stack([index, torch.ones_like(index)], -1)
    slope = float(torch.linalg.lstsq(line, series.log(), driver="gelsd").solution[0])
    choices: list[Options] = []
    for tolerance in (1e-3, 1e-5, 1e-7):
        base = {"base": nice(math.exp(min(-slope * count, 99)), tolerance)}
        pixels = {"pixels": nice(2 * last / math.pi, tolerance)}
        periods = {"periods": tuple(nice(2 * math.pi / frequency, tolerance) for frequency in (first, last))}
        choices += [base, base | {"turns": True}, pixels, pixels | {"linear": True}, periods]
    for options in choices:
        with suppress(ValueError):  # a number beyond its range
            if bool((Frequencies(**options)(count) / series - 1).abs().max() < NEAR):
                yield options


def _units(kind: str, grid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the step of coordinates along each axis of a grid, and those of the first patch, (axes,) each."""
    if kind == "interpolation":
        return 1 / torch.tensor(grid).double(), torch.zeros(len(grid)).double()
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
        offset += float(wrapped(angles[at] - offset * step[at]) / step[at])
    offset = nice(offset, 1e-5) if abs(offset) > 1e-5 else 0
    if wrapped(angles - offset * step).abs().sum() > 1e-2 * (1 + abs(offset)):
        return None
    return {"offset": offset} if offset else {}


def nice(number: float, tolerance: float = 1e-6) -> float:
    """Return the number of the fewest digits within a relative tolerance; whole numbers are ints."""
    rounded = (float(f"{number:.{digits}g}") for digits in range(1, 17))
    near = next((value for value in rounded if abs(value - number) <= tolerance * abs(number)), number)
    return int(near) if near.is_integer() else near
