"""Laws of code that rotates queries, computes a bias or resamples a table: planted faults fail the right law."""

import json
import math
from functools import partial

import pytest
import torch
from torch.nn.functional import interpolate

from commands import run_command
from graticule.testing import BiasCode, RotationCode, TableCode, inspect_code
from graticule.testing.pairs import GRIDS


def middles(n):
    """Coordinates of the middles of patches in [-1, 1]: those of DINOv3, up to 2 pi."""
    return 2 * math.pi * ((torch.arange(n).double() + 0.5) / n * 2 - 1)


def ends(n):
    """Coordinates from the first patch to the last in [-1, 1]."""
    return 2 * math.pi * torch.linspace(-1, 1, n, dtype=torch.float64)


def counted(n):
    return torch.arange(n).double()


def rotated(
    x, grid, at=middles, base=100.0, layout="half", use=None, order="yx", sign=1, reverse=False, columns=False, prefix=0
):
    """Rotate x (B, h, prefix + N, d) by rows and columns; the options are the conventions that ports get wrong."""
    y, x_ = torch.meshgrid(
        *(at(n) if not isinstance(at, tuple) else at[i](n) for i, n in enumerate(grid)), indexing="ij"
    )
    places = torch.stack([y, x_] if order == "yx" else [x_, y], -1)  # (H, W, 2)
    places = (places.transpose(0, 1) if columns else places).flatten(0, 1)
    frequencies = base ** -(torch.arange(x.shape[-1] // 4).double() * 4 / x.shape[-1])
    frequencies = frequencies.flip(0) if reverse else frequencies
    angles = (sign * places[..., None] * frequencies).flatten(1)  # (N, d / 2)
    table = torch.cat([angles, angles], -1) if layout == "half" else angles.repeat_interleave(2, -1)
    if (use or layout) == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    else:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    outputs = x.clone()
    outputs[..., prefix:, :] = (x * 1.0)[..., prefix:, :] * table.cos() + turned[..., prefix:, :] * table.sin()
    return outputs


def code(rotate=rotated, prefix=0, expected="rope(preset='dinov3')", grids=GRIDS, **options):
    expected = RotationCode.of(expected, 16, 2, prefix) if expected else None
    return RotationCode(lambda x, grid: rotate(x, grid, prefix=prefix, **options), 16, 2, prefix, expected, grids)


def failures(position):
    return {finding.check: finding.detail for finding in inspect_code(position) if finding.outcome == "failed"}


def outcomes(position):
    return {finding.check: (finding.outcome, finding.detail) for finding in inspect_code(position)}


@pytest.mark.parametrize(
    ("at", "layout", "order", "prefix"),
    [(middles, "half", "yx", 2), (ends, "interleaved", "xy", 0), (counted, "interleaved", "yx", 2)],
)
def test_correct_rotations_pass_in_any_convention(at, layout, order, prefix):
    position = code(prefix=prefix, expected=None, at=at, layout=layout, order=order)
    assert failures(position) == {}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "rope(preset='dinov3')"),
        ({"at": counted, "base": 10_000.0, "layout": "interleaved"}, "rope(base=10000)"),
        ({"at": counted, "base": 100.0}, "rope(base=100, layout='half')"),
    ],
)
def test_declared_conventions_are_compared(options, expected):
    findings = outcomes(code(prefix=1, expected=expected, **options))
    assert {name for name, (outcome, _) in findings.items() if outcome != "passed"} == set()


def test_coordinates_are_named():
    for at, name in (
        (counted, "counted in patches"),
        (middles, "half-open"),
        (ends, "from the first patch to the last"),
    ):
        assert name in outcomes(code(expected=None, at=at))["coordinates"][1]


def by_first_size(x, grid, grids={}, **options):  # noqa: B006
    """Keep the coordinates of the first grid with as many patches."""
    return rotated(x, grids.setdefault(math.prod(grid), grid), **options)


def opposite(x, grid, prefix):
    """Rotate odd and even samples in opposite directions, as queries and keys that are rotated by different code."""
    outputs = rotated(x, grid, prefix=prefix)
    outputs[1::2] = rotated(x[1::2], grid, prefix=prefix, sign=-1)
    return outputs


def rounded(x, grid, prefix):
    """Compute coordinates in the dtype of the queries."""
    return rotated(x, grid, at=lambda n: torch.arange(n).to(x.dtype).double(), prefix=prefix).to(x.dtype)


def wide(x, grid, prefix):
    return rotated(x.double(), grid, prefix=prefix)


def with_prefix_rotated(x, grid, prefix):
    """Rotate the tokens before the patches, too: the first patch gets the position of a later one."""
    places = torch.arange(x.shape[-2]).double()[:, None]
    frequencies = 100.0 ** -(torch.arange(8).double() / 8)
    angles = places // grid[1] * frequencies + places % grid[1] * frequencies.flip(0)
    first, second = x.chunk(2, -1)
    sine, cosine = angles.sin(), angles.cos()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def absolute(x, grid, prefix):
    """Rotate by the square of the row."""
    return rotated(x, grid, at=lambda n: torch.arange(n).double() ** 2, prefix=prefix)


def by_product(x, grid, prefix, multiply):
    """Compute angles by a product of matrices, which autocast rounds, or by one of elements."""
    places = torch.stack([torch.arange(grid[0]).repeat_interleave(grid[1]), torch.arange(grid[1]).repeat(grid[0])])
    angles = torch.cat([multiply(at.float(), 100.0 ** -(torch.arange(4) / 4)) for at in places], -1)
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    (first, second), outputs = x[..., prefix:, :].chunk(2, -1), x[..., :prefix, :]
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
    return torch.cat([outputs, turned], -2)


def by_matrix(first, second):
    return first[:, None] @ second[None]


def by_rounded(first, second):
    return first[:, None] * (torch.eye(4) @ second)


def by_elements(first, second):
    return first[:, None] * second


def narrow(x, grid, prefix):
    return rotated(x, grid, prefix=prefix)[..., :8]


def by_height(x, grid, prefix):
    """Relate both axes to the height."""
    return rotated(x, grid, at=lambda n: torch.arange(n).double() * 2 * math.pi / grid[0], prefix=prefix)


def largest_so_far(x, grid, prefix, largest=[1]):  # noqa: B006
    largest.append(max(largest[-1], *grid))
    return rotated(x, grid, at=lambda n: torch.arange(n).double() / largest[-1], prefix=prefix)


#: Planted faults of correct code for DINOv3: code, options, the law that fails, and part of what it says.
MUTANTS = [
    (rotated, {"columns": True}, "axes", "got column by column"),
    (rotated, {"at": (middles, lambda n: 0 * counted(n))}, "axes", "must have positions, got the same columns"),
    (by_first_size, {}, "axes", "over 5 x 3 patches, got column by column"),
    (rotated, {"use": "interleaved"}, "length", "channels 8 apart have the same angle, those 1 apart are rotated"),
    (rotated, {"layout": "interleaved", "use": "half"}, "length", "1 apart have the same angle, those 8 apart"),
    (rotated, {"layout": "interleaved"}, "expected", "other pairs: channel 0 with 1 instead of 8"),
    (rotated, {"order": "xy"}, "expected", "rows and columns exchanged"),
    (rotated, {"reverse": True}, "expected", "frequencies in another order"),
    (rotated, {"base": 10_000.0}, "expected", "other frequencies, as of another base"),
    (rotated, {"sign": -1}, "expected", "the opposite sign of displacements"),
    (rotated, {"at": lambda n: middles(n) + 2 * math.pi / n}, "expected", "another origin"),
    (rotated, {"at": lambda n: middles(n) / 2}, "expected", "0.5 times as large"),
    (rotated, {"at": ends}, "coordinates", "must be relative to the size, half-open, got relative to the size, from"),
    (rotated, {"at": counted}, "coordinates", "got counted in patches"),
    (rotated, {"at": (middles, counted)}, "coordinates", "both axes must have the same coordinates"),
    (largest_so_far, {}, "repetition", "6 x 6 patches must have the same after other grids"),
    (opposite, {}, "batch", "a batch must give the same as its samples alone"),
    (rounded, {}, "dtype", "torch.bfloat16 must be near float64 on 2 x 300 patches"),
    (wide, {}, "dtype", "must stay torch.float32, got torch.float64"),
    (by_product, {"multiply": by_matrix}, "autocast", "must not round coordinates of 2 x 300 patches"),
    (by_product, {"multiply": by_rounded}, "autocast", "must not round coordinates of 2 x 300 patches"),
    (absolute, {}, "shift", "other values for the same displacement"),
    (narrow, {}, "length", "must keep their shape"),
    (by_height, {}, "transposition", "must have the position of 3 x 5, transposed"),
]


@pytest.mark.parametrize(("rotate", "options", "law", "message"), MUTANTS)
def test_a_planted_fault_of_a_rotation_fails_the_right_law(rotate, options, law, message):
    failed = failures(code(rotate, **options))
    assert message in failed.get(law, ""), failed


def test_a_right_rotation_in_float32_passes_all_laws():
    """Angles of float32 up to 300 are off by more than 1e-5."""
    position = code(by_product, prefix=2, multiply=by_elements, expected="rope(base=100, layout='half')")
    assert {name for name, (outcome, _) in outcomes(position).items() if outcome != "passed"} == set()


def test_rotated_tokens_before_the_patches_fail():
    for prefix, message in (
        (1, "the first patch must be at the first position, got positions shifted by +1 of 6 x 6"),
        (2, "tokens before 6 x 6 patches must not be rotated"),  # the first has the position 0
    ):
        assert message in failures(code(with_prefix_rotated, prefix=prefix, expected=None))["prefix"]


TABLE = torch.randn(2, 23 * 23 + 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def bias(grid, prefix=0, sign=1, order="yx", columns=False, shifted=False):
    """Relative biases as Swin's (or BEiT's, with a prefix) from a table of displacements of at most 11 patches."""
    height, width = grid
    rank = torch.arange(height * width) + (1 if shifted else 0)
    y, x = (rank % height, rank // height) if columns else (rank // width, rank % width)
    dy, dx = (sign * (places[:, None] - places) + 11 for places in (y, x))
    dy, dx = (dy, dx) if order == "yx" else (dx, dy)
    values = torch.empty(2, prefix + len(rank), prefix + len(rank), dtype=torch.float64)
    values[:, prefix:, prefix:] = TABLE[:, (dy * 23 + dx).clamp(max=528)]
    values[:, :prefix, prefix:], values[:, prefix:, :prefix], values[:, :prefix, :prefix] = (
        TABLE[:, at][:, None, None] for at in (529, 530, 531)
    )
    return values


def log_spaced(grid, side=None):
    """Minus the distance of log-spaced coordinates that are relative to the size, as those of Swin V2."""
    y, x = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
    distances = [
        torch.log1p(8 * (at[:, None] - at).abs().double() / ((side or n) - 1))
        for at, n in ((y.flatten(), grid[0]), (x.flatten(), grid[1]))
    ]
    return -(distances[0] + distances[1])


def alibi(grid):
    y, x = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
    places = torch.stack([y, x], -1).flatten(0, 1).double()
    return -torch.cdist(places, places)[None] * torch.tensor([0.5, 0.25], dtype=torch.float64)[:, None, None]


@pytest.mark.parametrize("prefix", [0, 1])
def test_correct_biases_pass(prefix):
    compute = partial(bias, prefix=prefix) if prefix else partial(by_index, product=by_sum)
    position = BiasCode(compute, prefix, BiasCode(lambda grid: bias(grid, prefix), prefix))
    findings = outcomes(position)
    assert {findings[law][0] for law in {*BiasCode.laws} - {"transposition", "prefix"}} == {"passed"}
    assert findings["transposition"][0] == "not applicable"
    assert findings["prefix"][0] == ("passed" if prefix else "not applicable")


def test_computed_biases_pass():
    for compute, coordinates in ((alibi, "counted in patches"), (log_spaced, "from the first patch to the last")):
        findings = outcomes(BiasCode(compute))
        assert {findings[law][0] for law in ("axes", "shift", "transposition", "repetition", "autocast")} == {"passed"}
        assert coordinates in findings["coordinates"][1]


def by_index(grid, product=torch.matmul):
    """Biases as Swin's, whose index a product of matrices computes, which autocast rounds."""
    y, x = (at.flatten() for at in torch.meshgrid(*map(torch.arange, grid), indexing="ij"))
    offsets = torch.stack([at[:, None] - at + 11 for at in (y, x)], -1).float()
    return TABLE[:, product(offsets, torch.tensor([23.0, 1.0])).long()]


def by_sum(first, second):
    return (first * second).sum(-1)


def grown(grid, grids=[]):  # noqa: B006
    """Add a number that grows with each grid."""
    grids.append(grid)
    return bias(grid) + len(grids)


def alibi_of_patches_and_sizes(grid):
    """Minus the distance of rows in patches, and of columns relative to the width."""
    y, x = (torch.arange(n).double() for n in grid)
    distances = (y[:, None] - y).abs()[:, None, :, None] + (x[:, None] - x).abs()[None, :, None] / grid[1]
    return -distances.flatten(2).flatten(0, 1)[None]


def moved(grid):
    """Count the class token as the first patch."""
    values = bias(grid, 1)
    values[:, 1:, 1:] = bias(grid, 1, shifted=True)[:, 1:, 1:]
    return values


def as_patch(grid):
    """Give the class token the displacements of a patch."""
    values = bias(grid, 1)
    values[:, :1, 1:] = bias(grid)[:, :1]
    return values


#: Planted faults of correct biases.
BIAS_MUTANTS = [
    (lambda grid: bias(grid, columns=True), 0, "axes", "got column by column"),
    (lambda grid: bias(grid, sign=-1), 0, "expected", "the opposite sign of displacements"),
    (lambda grid: bias(grid, order="xy"), 0, "expected", "rows and columns exchanged"),
    (lambda grid: bias(grid).flip(0), 0, "expected", "got other values"),
    (lambda grid: bias(grid).cumsum(-1), 0, "shift", "other values for the same displacement"),
    (lambda grid: bias((grid[0], grid[1] - 1)), 0, "shift", "the bias of 6 x 6 patches must be 36 x 36, got"),
    (by_index, 0, "autocast", "must not round coordinates of 6 x 6 patches"),
    (grown, 0, "repetition", "must have the same after other grids"),
    (alibi_of_patches_and_sizes, 0, "coordinates", "both axes must have the same coordinates"),
    (moved, 1, "prefix", "the first patch must be at the first position, got positions shifted by +1"),
    (as_patch, 1, "prefix", "must have the same bias with all of them"),
    (lambda grid: bias(grid) * math.nan, 0, "axes", "must be finite"),
    (lambda grid: log_spaced(grid, grid[1]), 0, "transposition", "must have the position of 3 x 5, transposed"),
]


@pytest.mark.parametrize(("compute", "prefix", "law", "message"), BIAS_MUTANTS)
def test_a_planted_fault_of_a_bias_fails_the_right_law(compute, prefix, law, message):
    failed = failures(BiasCode(compute, prefix, BiasCode(lambda grid: bias(grid, prefix), prefix)))
    assert message in failed.get(law, ""), failed


def test_the_command_checks_position_code_in_a_file(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "from graticule.testing import BiasCode, RotationCode\n"
        "def alike(grid):\n"
        "    return torch.zeros(grid[0] * grid[1], grid[0] * grid[1])\n"
        "bias = BiasCode(alike)\n"
        "def rotation():\n"
        "    return RotationCode(lambda q, grid: q, 8, expected=RotationCode.of('rope', 8))\n"
    )
    status, written, _ = run_command(capsys, "check", f"{file}:bias", "--json")
    assert status == 1
    assert [finding["check"] for finding in json.loads(written)["findings"]] == list(BiasCode.laws)
    status, written, _ = run_command(capsys, "check", f"{file}:rotation")
    assert status == 1 and "expected       failed" in written
    status, _, error = run_command(capsys, "check", f"{file}:bias", "--skip", "axes")
    assert status == 1 and "must be left out for position code, got one of them" in error


# Code that resamples a table


def resampled(table, native, grid, prefix, mode="bicubic", **options):
    """Resample the rows of patches from one grid to another, and keep the rows before."""
    image = table[prefix:].reshape(1, *native, -1).permute(0, 3, 1, 2)
    if grid != native:
        image = interpolate(image, grid, mode=mode, **options)
    return torch.cat([table[:prefix], image.permute(0, 2, 3, 1).flatten(0, 2)])


def table_code(compute, native=(4, 4), prefix=1, resampler=None, dtype=torch.float64):
    """Return position code of a random table, whose function gets (table, native, grid, prefix)."""
    torch.manual_seed(0)
    table = torch.randn(prefix + native[0] * native[1], 6, dtype=torch.float64).to(dtype)
    return TableCode(lambda grid: compute(table, native, grid, prefix), table, native, prefix, resampler)


@pytest.mark.parametrize(
    ("native", "prefix", "options"),
    [
        ((4, 4), 0, {}),
        ((4, 6), 1, {"antialias": True}),
        ((3, 12), 1, {"align_corners": True}),
        ((3, 12), 0, {"mode": "bilinear"}),
    ],
)
def test_correct_code_passes(native, prefix, options):
    assert failures(table_code(lambda *args: resampled(*args, **options), native, prefix)) == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_correct_code_with_weights_of_float32_passes(dtype):
    """Rounding moves a ramp of 0 to 15 by more than 1e-5."""
    torch.manual_seed(0)
    table = torch.randn(256, 6, dtype=dtype)
    position = TableCode(lambda grid: resampled(table.float(), (16, 16), grid, 0).to(dtype), table, (16, 16))
    assert failures(position) == {}


def test_the_table_has_its_values_again_afterwards():
    position = table_code(resampled)
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


def halved(table, native, grid, prefix):
    """Return float16."""
    return resampled(table, native, grid, prefix).half()


def by_row(table, native, grid, prefix):
    """Take the nearest rows by an index that a product of matrices computes, which autocast rounds."""
    y, x = torch.meshgrid(*(torch.arange(n) * m // n for n, m in zip(grid, native, strict=True)), indexing="ij")
    index = torch.stack([y, x], -1).flatten(0, 1).float() @ torch.tensor([float(native[1]), 1.0])
    return torch.cat([table[:prefix], table[prefix + index.long()]])


def by_corner(table, native, grid, prefix, step=0):
    """Take the nearest row of each corner, as `interpolate(mode="nearest")`, or the one `step` after it."""
    y, x = ((torch.arange(n) * m // n + step).clamp(max=m - 1) for n, m in zip(grid, native, strict=True))
    return torch.cat([table[:prefix], table[prefix:].unflatten(0, native)[y][:, x].flatten(0, 1)])


def test_nearest_rows_of_corners_need_no_reflection():
    assert failures(table_code(by_corner)) == {}
    assert outcomes(table_code(by_corner))["reflection"][0] == "not applicable"
    assert {"native", "reflection"} <= set(failures(table_code(partial(by_corner, step=1))))


def renewed(table, native, grid, prefix, grids=[]):  # noqa: B006
    """Change the scale with each grid."""
    grids.append(grid)
    return table * (1 + len(grids) % 3) if grid == native else resampled(table, native, grid, prefix)


def cached(by):
    """Return code that keeps the first positions of each key, as of each number of rows or each height."""
    tables = {}

    def compute(table, native, grid, prefix):
        return tables.setdefault(by(grid), resampled(table, native, grid, prefix))

    return compute


#: Planted faults of code that resamples.
TABLE_MUTANTS = [
    (as_square, {"native": (4, 6)}, "native"),
    (swapped, {}, "separation"),
    (by_columns, {}, "separation"),
    (with_prefix, {}, "prefix"),
    (not_normalized, {}, "constant"),
    (aligned_on_one_axis, {}, "transposition"),
    (from_corners, {}, "reflection"),
    (halved, {}, "dtype"),
    (by_row, {"native": (18, 18)}, "autocast"),
    (renewed, {}, "repetition"),
    (resampled, {"resampler": "bilinear"}, "resampling"),
    (cached(math.prod), {}, "axes"),
    (cached(tuple), {}, "separation"),  # the table has other values by then
]


@pytest.mark.parametrize(("compute", "options", "law"), TABLE_MUTANTS, ids=lambda one: getattr(one, "__name__", None))
def test_a_planted_fault_is_found(compute, options, law):
    for dtype in (torch.float64, torch.bfloat16):
        if (compute, dtype) != (not_normalized, torch.bfloat16):  # whose fault is not larger than rounding
            assert law in failures(table_code(compute, **options, dtype=dtype)), dtype


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

    assert outcomes(table_code(compute))["resampling"] == ("passed", name)
    assert outcomes(table_code(compute, resampler=name))["resampling"] == ("passed", name)
    other = "bilinear" if name != "bilinear" else "bicubic"
    message = f"the table must be resampled by {other}, got {name}"
    assert outcomes(table_code(compute, resampler=other))["resampling"] == ("failed", message)


def test_every_law_has_a_planted_fault():
    rotations = [*MUTANTS, (None, {}, "prefix", "")]
    for kind, mutants in ((RotationCode, rotations), (BiasCode, BIAS_MUTANTS), (TableCode, TABLE_MUTANTS)):
        assert {mutant[2] for mutant in mutants} == set(kind.laws)
