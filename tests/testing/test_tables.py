"""Laws of code that resamples a table: correct code passes, and planted faults are found."""

import math

import pytest
import torch
from torch.nn.functional import interpolate

from graticule.testing.tables import TableCode, inspect_code


def resampled(table, native, grid, prefix, mode="bicubic", **options):
    """Resample the rows of patches from one grid to another, and keep the rows before."""
    image = table[prefix:].reshape(1, *native, -1).permute(0, 3, 1, 2)
    if grid != native:
        image = interpolate(image, grid, mode=mode, **options)
    return torch.cat([table[:prefix], image.permute(0, 2, 3, 1).flatten(0, 2)])


def code(compute, native=(4, 4), prefix=1, resampler=None):
    """Return position code of a random table, whose function gets (table, native, grid, prefix)."""
    torch.manual_seed(0)
    table = torch.randn(prefix + native[0] * native[1], 6, dtype=torch.float64)
    return TableCode(lambda grid: compute(table, native, grid, prefix), table, native, prefix, resampler)


def failures(compute, **options):
    return [finding.check for finding in inspect_code(code(compute, **options)) if finding.outcome == "failed"]


@pytest.mark.parametrize("native", [(4, 4), (4, 6), (3, 12)])
@pytest.mark.parametrize("options", [{}, {"antialias": True}, {"align_corners": True}, {"mode": "bilinear"}], ids=str)
def test_correct_code_passes(native, options):
    assert failures(lambda *given: resampled(*given, **options), native=native) == []
    assert failures(lambda *given: resampled(*given, **options), native=native, prefix=0) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_correct_code_with_weights_of_float32_passes(dtype):
    """Rounding moves a ramp of 0 to 15 by more than 1e-5."""
    torch.manual_seed(0)
    table = torch.randn(256, 6, dtype=dtype)
    position = TableCode(lambda grid: resampled(table.float(), (16, 16), grid, 0).to(dtype), table, (16, 16))
    assert [finding for finding in inspect_code(position) if finding.outcome == "failed"] == []


def test_the_table_has_its_values_again_afterwards():
    position = code(resampled)
    before = position.table.clone()
    inspect_code(position)
    assert torch.equal(position.table, before)


def as_square(table, native, grid, prefix):
    """Read a table of any shape as a square one: transformers' `num_positions**0.5`."""
    side = math.isqrt(len(table) - prefix)
    return resampled(table, (side, side), grid, prefix)


def swapped(table, native, grid, prefix):
    """Resample to (width, height)."""
    return resampled(table, native, grid[::-1], prefix)


def by_columns(table, native, grid, prefix):
    """Return the rows of patches by columns, at other grids only."""
    rows = resampled(table, native, grid, prefix)
    if grid == native:
        return rows
    return torch.cat([rows[:prefix], rows[prefix:].unflatten(0, grid).transpose(0, 1).flatten(0, 1)])


def with_prefix(table, native, grid, prefix):
    """Resample the row of the class token with the others, by one axis."""
    if grid == native:
        return table
    return interpolate(table.T[None], prefix + grid[0] * grid[1], mode="linear")[0].T


def by_number(table, native, grid, prefix):
    """Return the table itself for each grid of as many patches."""
    return table if grid[0] * grid[1] == native[0] * native[1] else resampled(table, native, grid, prefix)


def not_normalized(table, native, grid, prefix):
    """Weights of resampling whose sum is not 1."""
    return resampled(table, native, grid, prefix) * (1.0 if grid == native else 1.01)


def aligned_on_one_axis(table, native, grid, prefix):
    """Aligned corners for rows alone."""
    rows = resampled(table, native, (grid[0], native[1]), prefix, "bilinear", align_corners=True)
    return resampled(rows, (grid[0], native[1]), grid, prefix, "bilinear")


def from_corners(table, native, grid, prefix):
    """Sample at the corners of patches instead of their middles."""
    if grid == native:
        return table
    finer = resampled(table, native, (2 * grid[0], 2 * grid[1]), prefix)
    rows = finer[prefix:].unflatten(0, (2 * grid[0], 2 * grid[1]))[::2, ::2]
    return torch.cat([finer[:prefix], rows.flatten(0, 1)])


def cached(by):
    """Return code that keeps the first positions of each key, as of each number of rows or each height."""
    tables = {}

    def compute(table, native, grid, prefix):
        return tables.setdefault(by(grid), resampled(table, native, grid, prefix))

    return compute


@pytest.mark.parametrize(
    ("compute", "options", "law"),
    [
        (as_square, {"native": (4, 6)}, "native"),
        (as_square, {"native": (3, 12)}, "native"),
        (swapped, {}, "separation"),
        (by_columns, {}, "separation"),
        (with_prefix, {}, "prefix"),
        (by_number, {}, "axes"),
        (not_normalized, {}, "constant"),
        (aligned_on_one_axis, {}, "transposition"),
        (from_corners, {}, "reflection"),
        (cached(math.prod), {}, "axes"),
        (cached(tuple), {}, "separation"),  # the table has other values by then
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_a_planted_fault_is_found(compute, options, law):
    assert law in failures(compute, **options)


def found_of(compute, **options):
    return {finding.check: (finding.outcome, finding.detail) for finding in inspect_code(code(compute, **options))}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "bicubic(antialias=False, align_corners=False)"),
        ({"antialias": True}, "bicubic(antialias=True, align_corners=False)"),
        ({"mode": "bilinear", "align_corners": True}, "bilinear(antialias=False, align_corners=True)"),
        ({"mode": "area"}, "area"),
    ],
    ids=str,
)
def test_the_resampling_is_named_and_compared_with_the_declared_one(options, name):
    def compute(*args):
        return resampled(*args, **options)

    assert found_of(compute)["resampling"] == ("passed", name)
    assert found_of(compute, resampler=name)["resampling"] == ("passed", name)
    other = "bilinear" if name != "bilinear" else "bicubic"
    message = f"the table must be resampled by {other}, got {name}"
    assert found_of(compute, resampler=other)["resampling"] == ("failed", message)
