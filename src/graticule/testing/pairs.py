"""Laws of code that rotates queries and keys or computes a bias, without a model, and comparison with a declared code.

The laws hold whatever the convention is. The convention itself, such as the base of the frequencies or the axis of each
channel, is a choice: it is compared with `expected`, if that is given.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from graticule.encodings.build import build_position
from graticule.position.grid import Grid
from graticule.position.places import by
from graticule.testing.model_under_test import Failed, NotApplicable, Size, check_same, is_same, rounding
from graticule.testing.order import COLUMNS, OPPOSITE, RIGHT, Relative
from graticule.testing.tables import PositionCode, autocast, laws_of

#: Grids of the laws: a square, one of twice its sides, one of as many patches, and two transposed ones.
GRIDS: tuple[Size, ...] = ((6, 6), (12, 12), (4, 9), (3, 5), (5, 3))
#: A grid whose columns bfloat16 cannot count.
LONG = 2, 300


class PairCode(PositionCode, ABC):
    """Code that computes position for pairs of tokens."""

    prefix: int
    expected: PairCode | None
    grids: tuple[Size, ...]
    terms = 4  # a rotation has two

    @property
    def tolerance(self) -> float:
        """The largest difference of equal values, of angles of a step per patch in float32."""
        return rounding(torch.float32, max(map(max, self.grids)), self.terms)

    def same(self, actual: Tensor, expected: Tensor) -> bool:
        return is_same(actual, expected, self.tolerance)

    @abstractmethod
    def at(self, grid: Size) -> Tensor:
        """Return the position of all tokens of a grid; the first axis is heads."""

    @abstractmethod
    def attention(self, grid: Size, plain: bool = False) -> Relative:
        """Return the attention between patches that differ in their position alone; `plain`, all channels are alike."""


@dataclass(frozen=True)
class RotationCode(PairCode):
    """Code that rotates queries and keys by the positions of their tokens.

    rotate: maps queries (B, heads, prefix + height * width, channels), patches row by row, and a grid (height, width)
        to rotated queries.
    channels: d, of a head.
    heads: number of heads; 1 if all are rotated alike.
    prefix: number of tokens before the patches, which are not rotated.
    expected: code with the declared convention, such as `RotationCode.of("rope(preset='dinov3')", 64)`.
    grids: the grids of the laws, the first a square if there is one.
    """

    rotate: Callable[[Tensor, Size], Tensor]
    channels: int
    heads: int = 1
    prefix: int = 0
    expected: RotationCode | None = None
    grids: tuple[Size, ...] = GRIDS

    @classmethod
    def of(cls, encoding: str, channels: int, heads: int = 1, prefix: int = 0) -> RotationCode:
        """Return the code of an encoding of this library."""
        first, width = Grid(*GRIDS[0], prefix=prefix), channels * heads
        position = build_position(first, dim=width, depth=1, num_heads=heads, encoding=encoding).double().eval()
        if position(first)[0].rotary is None:
            raise ValueError(f"`encoding` must be one that rotates queries and keys, got {encoding!r}.")
        return cls(lambda x, grid: position(Grid(*grid, prefix=prefix))[0].rotary(x, x)[0], channels, heads, prefix)

    def rotated(self, queries: Tensor, grid: Size) -> Tensor:
        outputs = self.run(self.rotate, grid, queries.clone(), grid)  # which code may change in place
        if outputs.shape != queries.shape:
            shapes = f"{tuple(queries.shape)}, got {tuple(outputs.shape)}"
            raise Failed(f"queries of {by(grid)} patches must keep their shape, {shapes}")
        return outputs

    def at(self, grid: Size, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the matrix that multiplies each token, (h, prefix + N, d, d)."""
        units = torch.eye(self.channels, dtype=dtype)[:, None, None]
        units = units.expand(-1, self.heads, self.prefix + math.prod(grid), -1)
        return self.rotated(units, grid).permute(1, 2, 3, 0)

    def values(self, dtype: torch.dtype = torch.float32) -> dict[Size, Tensor]:
        """Return rotated queries of 1 and -1 on a long grid, or on the last one if that is refused."""

        def at(grid: Size) -> dict[Size, Tensor]:
            shape = 2, self.heads, self.prefix + math.prod(grid), self.channels
            signs = 2 * torch.randint(2, shape, generator=torch.Generator().manual_seed(0)) - 1
            return {grid: self.rotated(signs.to(dtype), grid)}

        try:
            return at(LONG)
        except Failed:  # tables of other sizes
            return at(self.grids[-1])

    def attention(self, grid: Size, plain: bool = False) -> Relative:
        """Return the attention of one query and one key at all patches."""
        pair = torch.randn(2, self.heads, 1, self.channels, 1, generator=torch.Generator().manual_seed(0)).double()
        vectors = self.at(grid)[:, self.prefix :].double() @ (torch.ones_like(pair) if plain else pair)
        queries, keys = vectors.squeeze(-1)
        return Relative(queries @ keys.mT, queries, grid, self.prefix)


@dataclass(frozen=True)
class BiasCode(PairCode):
    """Code that computes a bias of attention for pairs of tokens.

    compute: maps a grid (height, width) to a bias (..., prefix + N, prefix + N), from queries to keys, N = height *
        width, patches row by row.
    prefix: number of tokens before the patches.
    expected: code with the declared convention, and the same table if it has one.
    grids: the grids of the laws, the first a square if there is one, such as ((7, 7),) for code of one window.
    """

    compute: Callable[[Size], Tensor]
    prefix: int = 0
    expected: BiasCode | None = None
    grids: tuple[Size, ...] = GRIDS

    def at(self, grid: Size) -> Tensor:
        """Return the bias of a grid, (h, prefix + N, prefix + N)."""
        bias, side = self.run(self.compute, grid, grid), self.prefix + math.prod(grid)
        if bias.shape[-2:] != (side, side):
            raise Failed(f"the bias of {by(grid)} patches must be {side} x {side}, got {tuple(bias.shape)}")
        return bias.double().reshape(-1, side, side)

    def values(self) -> dict[Size, Tensor]:
        return {grid: self.at(grid) for grid in self.grids}

    def attention(self, grid: Size, plain: bool = False) -> Relative:
        return Relative(self.at(grid)[:, self.prefix :, self.prefix :], None, grid, self.prefix)


def length(code: RotationCode) -> str:
    """A rotation keeps the length of queries; it does not if its table has another layout of pairs than its use."""
    for grid in code.grids:
        matrices = code.at(grid)
        change = float((matrices.mT @ matrices - torch.eye(matrices.shape[-1]).double()).abs().max())
        if change > 2 * code.tolerance:  # of both factors
            raise Failed(
                f"a rotation must keep the length of queries, got a change by up to {100 * change:.3g} %: the table "
                f"and its use disagree on which channels form a pair{_layouts(matrices[:, code.prefix :])}"
            )
    return "queries keep their length"


def _layouts(matrices: Tensor) -> str:
    """Return how far apart channels of one angle are, and those that are rotated into each other, (h, N, d, d)."""
    cosines, channels = matrices.diagonal(dim1=-2, dim2=-1), matrices.shape[-1]
    gaps = [gap for gap in (1, channels // 4, channels // 2) if gap and channels % (2 * gap) == 0]
    table = [gap for gap in gaps if is_same(*cosines.unflatten(-1, (-1, 2, gap)).unbind(-2))]
    row, column = divmod(int(matrices.abs().amax((0, 1)).triu(1).argmax()), channels)
    same = f"channels {table[0]} apart have the same angle, " if table else ""
    return f": {same}those {column - row} apart are rotated into each other"


def axes(code: PairCode) -> str:
    """Patches are ordered row by row, change along both axes, and 2 x 8 differ from 4 x 4."""
    if min(code.grids[0]) > 1:
        at = code.attention(code.grids[0]).by_displacement()
        still = [name for name, step in (("rows", (1, 0)), ("columns", (0, 1))) if code.same(at[step], at[0, 0])]
        if len(still) == 1:
            raise Failed(f"both axes of {by(code.grids[0])} patches must have positions, got the same {still[0]}")
    wide = [grid for grid in code.grids if grid[0] != grid[1]]
    if not wide:
        raise NotApplicable("all grids are square")
    for grid in wide:
        if code.attention(grid).reading() == COLUMNS:
            raise Failed(f"position must run row by row over {by(grid)} patches, got {COLUMNS}")
    for first, second in itertools.combinations(code.grids, 2):
        if math.prod(first) == math.prod(second) and code.same(code.at(first), code.at(second)):
            raise Failed(f"{by(first)} patches must differ from {by(second)}, got the same position")
    return f"row by row over {', '.join(map(by, wide))} patches"


def shift(code: PairCode) -> str:
    """Attention depends on the displacement of two patches alone."""
    for grid in code.grids:
        if isinstance(code, RotationCode):
            first, last = code.at(grid)[:, -2:].unbind(1)
            if not code.same(first @ last, last @ first):
                raise NotApplicable("rotations do not commute")
        reading = code.attention(grid).reading()
        if reading in (None, OPPOSITE):
            raise Failed(
                f"attention must depend on the displacement of two of {by(grid)} patches alone, got "
                f"{reading or 'other values for the same displacement'}"
            )
        if reading != RIGHT:
            raise NotApplicable(f"position is {reading}: see axes and prefix")
    return "attention depends on the displacement"


def transposition(code: PairCode) -> str:
    """A transposed grid has the transposed position, in another order of channels or heads."""

    def mirrors(grid: Size) -> bool:
        there, back = (code.attention(at, plain=True).by_displacement() for at in (grid, grid[::-1]))
        return all(code.same(there[y, x].sum(), back[x, y].sum()) for y, x in there)

    pairs = [grid for grid in code.grids if grid[0] != grid[1] and grid[::-1] in code.grids]
    if not pairs or not mirrors(code.grids[0]):
        raise NotApplicable("rows have other values than columns" if pairs else "no grid is the transposed one")
    if not all(map(mirrors, pairs)):
        raise Failed(f"{by(pairs[0][::-1])} patches must have the position of {by(pairs[0])}, transposed")
    return f"{by(pairs[0])} patches, transposed"


def prefix(code: PairCode) -> str:
    """Tokens before the patches are not rotated, and have one bias with all patches."""
    if not code.prefix:
        raise NotApplicable("there are no such tokens")
    for grid in code.grids:
        position, count = code.at(grid), code.prefix
        if isinstance(code, RotationCode):
            unit = torch.eye(code.channels, dtype=position.dtype).expand_as(position[:, :count])
            check_same(
                position[:, :count], unit, f"tokens before {by(grid)} patches must not be rotated", code.tolerance
            )
        else:
            for values in (position[:, :count, count:], position[:, count:, :count].mT):
                law = f"a token before {by(grid)} patches must have the same bias with all of them"
                check_same(values, values[..., :1].expand_as(values), law, code.tolerance)
        reading = code.attention(grid).reading() or ""
        if reading.startswith("shifted"):
            raise Failed(f"the first patch must be at the first position, got positions {reading} of {by(grid)}")
    return f"{code.prefix} before the patches"


def dtype(code: RotationCode) -> str:
    """Queries keep their dtype, and bfloat16 rounds queries alone, not their coordinates."""
    [(grid, exact)] = code.values(torch.float64).items()
    for precision, largest in ((torch.float32, max(grid)), (torch.bfloat16, 1)):
        rotated = code.values(precision)[grid]
        if rotated.dtype != precision:
            raise Failed(f"queries of {precision} must stay {precision}, got {rotated.dtype}")
        law = f"{precision} must be near float64 on {by(grid)} patches: angles must be float32 at least"
        check_same(rotated.double(), exact, law, rounding(precision, largest, code.terms))
    return f"float32 and bfloat16 on {by(grid)} patches"


def batch(code: RotationCode) -> str:
    """A batch gives the same as each sample alone."""
    for grid in code.grids:
        x = torch.randn(3, code.heads, code.prefix + math.prod(grid), code.channels, dtype=torch.float64)
        alone = torch.cat([code.rotated(sample, grid) for sample in x.split(1)])
        check_same(code.rotated(x, grid), alone, "a batch must give the same as its samples alone", code.tolerance)
    return "3 samples give the same together and alone"


def repetition(code: PairCode) -> str:
    """Another grid in between changes nothing."""
    before = {grid: code.at(grid) for grid in code.grids}
    for grid, first in reversed(before.items()):
        check_same(code.at(grid), first, f"{by(grid)} patches must have the same after other grids", code.tolerance)
    return "the same after other grids"


def coordinates(code: PairCode) -> str:
    """Both axes count patches, or both are relative to the size, half-open or from the first patch to the last."""
    down, right = (_coordinates(code, axis) for axis in (0, 1))
    if down != right:
        raise Failed(f"both axes must have the same coordinates, got {down} for rows, {right} for columns")
    if code.expected is not None and (declared := _coordinates(code.expected, 0)) != down:
        raise Failed(f"coordinates must be {declared}, got {down}")
    return down


def _coordinates(code: PairCode, axis: int) -> str:
    """Return how coordinates along an axis depend on its length."""
    double = 2 * code.grids[0][0], 2 * code.grids[0][1]
    if double not in code.grids:
        raise NotApplicable("no grid has twice the sides of another")
    small, large = (code.attention(grid).by_displacement() for grid in (code.grids[0], double))
    side = code.grids[0][axis]
    for kind, first, second in (
        ("counted in patches", 1, 1),
        ("relative to the size, half-open", 1, 2),
        ("relative to the size, from the first patch to the last", side - 1, 2 * side - 1),
    ):
        near, far = (at[(count, 0) if axis == 0 else (0, count)] for at, count in ((small, first), (large, second)))
        if code.same(near, far):
            return kind
    raise NotApplicable("coordinates depend on the size in another way")


def expected(code: PairCode) -> str:
    """All values equal the expected code; if not, the difference of the conventions is named."""
    if code.expected is None:
        raise NotApplicable("none is declared")
    for grid in code.grids:
        if not code.same(code.at(grid), code.expected.at(grid)):
            named = _difference_of_biases if isinstance(code, BiasCode) else _difference_of_rotations
            raise Failed(f"{by(grid)} patches must have the expected position, got {named(code, code.expected)}")
    return f"equal on {', '.join(map(by, code.grids))} patches"


def _difference_of_biases(code: PairCode, known: PairCode) -> str:
    grid = code.grids[0]
    bias, other = code.at(grid), known.at(grid)
    if code.same(bias, other.mT):
        return "the opposite sign of displacements"
    turned = torch.arange(math.prod(grid)).view(grid).T.flatten() + code.prefix
    turned = torch.cat([torch.arange(code.prefix), turned])
    exchanged = grid[0] == grid[1] and code.same(bias, other[:, turned][:, :, turned])
    return "rows and columns exchanged" if exchanged else "other values"


def _difference_of_rotations(code: PairCode, known: PairCode) -> str:
    near = partial(_near, tolerance=code.tolerance)
    partner, first, steps = _angles(code, code.grids[0])
    its_partner, its_first, its_steps = _angles(known, code.grids[0])
    if not torch.equal(partner, its_partner):
        return f"other pairs: channel 0 with {int(partner[0, 0])} instead of {int(its_partner[0, 0])}"
    sizes, others = steps.abs(), its_steps.abs()
    if not near(sizes.flatten().sort()[0], others.flatten().sort()[0]):
        factor = sizes.max() / others.max()
        if torch.allclose(sizes, factor * others, atol=code.tolerance):
            return f"angles between neighboring patches that are {factor:.3g} times as large"
        return "other frequencies, as of another base"
    if not near(sizes, others):
        return "rows and columns exchanged" if near(sizes, others.flip(0)) else "frequencies in another order"
    if not near(steps, its_steps):
        return "the opposite sign of displacements"
    return "other values" if near(first, its_first) else "another origin, as of coordinates of corners or middles"


def _angles(code: PairCode, grid: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Return the partner of each channel, (h, d), its angle at the first patch, and of a step on each axis, (2, h, d).

    A channel that is not rotated is its own partner.
    """
    matrices = code.at(grid)[:, code.prefix :]  # (h, N, d, d)
    channels = torch.arange(matrices.shape[-1])
    coupled = matrices.abs().amax(1) * (channels[:, None] != channels) > code.tolerance  # (h, d, d)
    partner = torch.where(coupled.any(-1), coupled.int().argmax(-1), channels)
    sines = matrices.gather(-1, partner[:, None, :, None].expand(*matrices.shape[:-1], 1)).squeeze(-1)
    sines = sines * torch.sign(channels - partner)[:, None]
    angles = torch.atan2(sines, matrices.diagonal(dim1=-2, dim2=-1)).unflatten(1, grid)  # (h, H, W, d)
    first = angles[:, 0, 0]
    return partner, first, wrap_angle(torch.stack([angles[:, 1, 0], angles[:, 0, 1]]) - first)


def wrap_angle(angles: Tensor) -> Tensor:
    """Return angles plus whole turns, above -pi and up to pi."""
    return math.pi - (math.pi - angles) % (2 * math.pi)


def _near(angles: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool(wrap_angle(angles - other).abs().max() <= tolerance)


# first the law that a cache fulfills once it is full
_LAWS = (axes, shift, transposition, prefix, coordinates, expected)
BiasCode.laws = laws_of(repetition, autocast, *_LAWS)
RotationCode.laws = laws_of(repetition, length, dtype, autocast, batch, *_LAWS)
