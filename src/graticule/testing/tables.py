"""Laws of code that resamples a learned table of positions, without a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from graticule.external.images import error_line
from graticule.position.places import by
from graticule.position.resampling import build_resampler
from graticule.testing.model_under_test import Failed, NotApplicable, Size, check_same, is_same, rounding
from graticule.testing.models import Finding


def laws_of(*laws: Callable[[Any], str]) -> dict[str, Callable[[Any], str]]:
    """Map the name of each law, which reports call it by, to its function."""
    return {law.__name__: law for law in laws}


class PositionCode:
    """Position code alone, without a model, that `inspect_code` holds to laws."""

    #: Name of each law -> its function.
    laws: ClassVar[dict[str, Callable[[Any], str]]]
    #: The most products in a sum, which round values: the pixels of bicubic resampling.
    terms: ClassVar[int] = 16

    @staticmethod
    def run(code: Callable[..., Tensor], grid: Size, *args: Any) -> Tensor:
        """Return the values of code for a grid, and check that they are finite."""
        try:
            position = code(*args)
        except Exception as error:  # any error of the code under test
            raise Failed(f"{by(grid)} patches must be accepted, got {error_line(error)}") from error
        if not isinstance(position, Tensor):
            raise Failed(f"positions of {by(grid)} patches must be a tensor, got {type(position).__name__}")
        if not position.isfinite().all():
            raise Failed(f"positions of {by(grid)} patches must be finite")
        return position.detach()


@dataclass(frozen=True)
class TableCode(PositionCode):
    """Code that computes the positions of a grid from a table.

    compute: maps a grid (height, width) to positions, (prefix + height * width, D).
    table: the parameter or buffer that it reads, (..., prefix + N, D), the rows of patches by rows of the grid.
    native: the grid of the table.
    prefix: number of rows before the patches, such as the row of a class token.
    resampler: the declared resampling, such as 'bicubic(antialias=False)'.
    """

    compute: Callable[[Size], Tensor]
    table: Tensor
    native: Size
    prefix: int = 0
    resampler: str | None = None

    @property
    def tolerance(self) -> float:
        """The largest difference of equal values, relative to the largest one."""
        return rounding(self.table.dtype)

    def values(self) -> dict[Size, Tensor]:
        """Return the positions of other grids; a law does not apply if they are refused, which other laws find."""
        try:
            return {grid: self.at(grid) for grid in self.other_grids}
        except Failed as error:
            raise NotApplicable(str(error)) from error

    @property
    def other_grids(self) -> tuple[Size, ...]:
        height, width = self.native
        return (height + 1, 2 * width + 1), (2 * height, 2 * width), (max(height // 2, 2), width)

    def check(self, actual: Tensor, expected: Tensor, law: str) -> None:
        """Raise `Failed` with `law` unless positions are the expected ones."""
        check_same(actual, expected, law, self.tolerance)

    @contextmanager
    def with_rows(self, rows: Tensor) -> Iterator[None]:
        """Give the table other rows within a `with` statement."""
        table = self.table.detach()
        before = table.clone()
        table.copy_(rows.reshape(table.shape))
        try:
            yield
        finally:
            table.copy_(before)

    def with_patches(self, patches: Tensor) -> AbstractContextManager[None]:
        """Give the rows of patches other values, (H, W, D), within a `with` statement."""
        return self.with_rows(torch.cat([self.rows()[: self.prefix], patches.flatten(0, 1)]))

    def native_map(self) -> Tensor:
        """Return the rows of patches in the table, (H, W, D)."""
        return self.rows()[self.prefix :].unflatten(0, self.native)

    def rows(self) -> Tensor:
        """Return the rows of the table, (prefix + N, D)."""
        return self.table.detach().reshape(-1, self.table.shape[-1])

    def at(self, grid: Size) -> Tensor:
        """Return the positions of a grid, and check their number and their values."""
        rows = self.run(self.compute, grid, grid)
        rows = rows.reshape(-1, rows.shape[-1])
        if len(rows) != self.prefix + grid[0] * grid[1]:
            expected = f"{self.prefix + grid[0] * grid[1]} rows"
            raise Failed(f"{by(grid)} patches must have {expected}, got {len(rows)}")
        return rows

    def map(self, grid: Size) -> Tensor:
        """Return the positions of the patches of a grid, (height, width, D)."""
        patches = self.at(grid)[self.prefix :]
        return patches.reshape(*grid, patches.shape[-1])


def native(code: TableCode) -> str:
    """At its own grid, the table is not changed."""
    code.check(
        code.at(code.native), code.rows(), f"{by(code.native)} patches, its own grid, must have the table itself"
    )
    return f"{by(code.native)} patches have the table itself"


def axes(code: TableCode) -> str:
    """Grids of as many patches have other positions, as 2 x 8 and 4 x 4."""
    height, width = code.native
    if height % 2:
        raise NotApplicable("the height of the table is odd")
    wide = height // 2, 2 * width
    if is_same(code.at(wide), code.at(code.native), code.tolerance):
        raise Failed(f"{by(wide)} patches must differ from {by(code.native)}, got the same positions")
    return f"{by(wide)} patches differ from {by(code.native)}"


def constant(code: TableCode) -> str:
    """A table of equal rows gives these rows at every grid, so that the weights of resampling have the sum 1."""
    with code.with_rows(torch.ones_like(code.rows())):
        for grid in code.other_grids:
            patches = code.map(grid)
            code.check(patches, torch.ones_like(patches), f"{by(grid)} patches of equal rows must be equal")
    return "equal rows stay equal"


def transposition(code: TableCode) -> str:
    """The transposed table gives transposed positions at the transposed grid."""
    height, width = code.native
    if height != width:
        raise NotApplicable("the table is not square")
    grid = code.other_grids[0]
    expected = code.map(grid).transpose(0, 1)
    with code.with_patches(code.native_map().transpose(0, 1)):
        code.check(code.map(grid[::-1]), expected, f"{by(grid[::-1])} patches must be the transposed {by(grid)}")
    return f"{by(grid)} patches, transposed"


def reflection(code: TableCode) -> str:
    """The mirrored table gives mirrored positions, as coordinates of the middles of patches do, not of corners.

    It does not apply to nearest rows of corners, i * n // height, as in `interpolate(mode="nearest")`.
    """
    grid = code.other_grids[0]
    positions, table = code.map(grid), code.native_map()
    y, x = (torch.arange(side, device=table.device) * n // side for side, n in zip(grid, code.native, strict=True))
    if is_same(positions, table[y][:, x], code.tolerance):
        raise NotApplicable("it takes the nearest rows of corners")
    expected = positions.flip(0, 1)
    with code.with_patches(code.native_map().flip(0, 1)):
        code.check(code.map(grid), expected, f"{by(grid)} patches of the mirrored table must be mirrored")
    return f"{by(grid)} patches, mirrored"


def separation(code: TableCode) -> str:
    """A table that varies along one axis gives positions that vary along this axis alone."""
    height, width = code.native
    for axis, index in ((0, torch.arange(height)[:, None]), (1, torch.arange(width)[None])):
        ramp = index.to(code.table)[..., None].expand(height, width, code.table.shape[-1])
        with code.with_patches(ramp):
            for grid in code.other_grids:
                patches = code.map(grid)
                across = patches - patches.narrow(1 - axis, 0, 1)
                grows = patches.select(axis, -1) > patches.select(axis, 0)
                if across.abs().max() > code.tolerance * patches.abs().max() or not grows.all():
                    name = ("rows", "columns")[axis]
                    raise Failed(f"{by(grid)} patches of a table that grows along {name} must grow along {name} alone")
    return "rows stay rows, columns stay columns"


def prefix(code: TableCode) -> str:
    """The rows before the patches are the same at every grid."""
    if not code.prefix:
        raise NotApplicable("there are no such rows")
    for grid in code.other_grids:
        law = f"{by(grid)} patches must keep the rows before"
        code.check(code.at(grid)[: code.prefix], code.rows()[: code.prefix], law)
    return f"{code.prefix} rows before the patches are kept"


def repetition(code: TableCode) -> str:
    """Another grid in between changes nothing."""
    before = code.at(code.native).clone()
    for grid in code.other_grids:
        code.at(grid)
        code.check(code.at(code.native), before, f"{by(code.native)} patches must have the same after {by(grid)}")
    return "the same after other grids"


def dtype(code: TableCode) -> str:
    """Positions have the dtype of the table."""
    for grid, rows in code.values().items():
        if rows.dtype != code.table.dtype:
            law = f"positions of {by(grid)} patches must be {code.table.dtype}, as the table"
            raise Failed(f"{law}, got {rows.dtype}")
    return f"{code.table.dtype}, as the table"


def autocast(code: Any) -> str:
    """Autocast to bfloat16 rounds values alone, not coordinates, indices and angles."""
    expected = code.values()
    try:
        with torch.autocast("cpu", torch.bfloat16):
            actual = code.values()
    except NotApplicable as error:
        raise Failed(f"with autocast, {error}") from error
    for grid, values in expected.items():
        law = f"autocast must not round coordinates of {by(grid)} patches"
        check_same(actual[grid].double(), values.double(), law, rounding(torch.bfloat16, terms=code.terms))
    return f"the same with autocast on {', '.join(map(by, expected))} patches"


def resampling(code: TableCode) -> str:
    """The table is resampled as declared: kernel, antialias, and centers of patches (half-open) or aligned corners."""
    positions, table = code.values(), code.native_map().movedim(-1, 0)

    def follows(name: str) -> bool:
        resample = build_resampler(name)
        expected = {grid: resample(table, grid).flatten(1).mT for grid in positions}
        return all(is_same(rows[code.prefix :], expected[grid], code.tolerance) for grid, rows in positions.items())

    options = itertools.product(("bicubic", "bilinear"), (False, True), (False, True))
    names = [f"{kind}(antialias={wide}, align_corners={ends})" for kind, wide, ends in options]
    declared, names = code.resampler, [*names, "bicubic(antialias=False, offset=0.1)", "area"]
    known: str | None = next((name for name in (*([declared] if declared else ()), *names) if follows(name)), None)
    if declared not in (None, known):
        raise Failed(f"the table must be resampled by {declared}, got {known or 'another one'}")
    if known is None:
        raise NotApplicable("none is declared, and it is no known one")
    return known


TableCode.laws = laws_of(
    native, axes, constant, transposition, reflection, separation, prefix, repetition, dtype, autocast, resampling
)


def inspect_code(code: PositionCode) -> list[Finding]:
    """Check position code without a model by all laws of its kind; a table has its values again afterwards.

    A resampling that smooths the table at its own grid fails `native` alone, which may be meant.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [Finding.of(name, law, code) for name, law in code.laws.items()]
