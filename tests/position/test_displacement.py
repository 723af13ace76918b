"""Weights by displacement: their matrix, and the product with it, without the matrix."""

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from graticule.position import displacement as displacement_module
from graticule.position.displacement import Displacements
from graticule.position.grid import Grid
from in_turn import in_turn

GRIDS = [Grid(5, 7), Grid(1, 9), Grid(9, 1), Grid(1, 1), Grid(14, 14), Grid(9), Grid(2, 3, 4)]


def drawn(grid, groups=2, softmax=False, dtype=torch.float64):
    """Return a table drawn from a normal distribution."""
    return Displacements(torch.randn(groups, *grid.table, dtype=dtype), softmax)


def product(weights, x):
    """Multiply weights (groups, N, N) with the groups of channels of x: (B, N, C)."""
    return torch.einsum("gij,bjgc->bigc", weights, x.unflatten(-1, (len(weights), -1))).flatten(-2)


def mix(x, table):
    return Displacements(table, False).mix(x)


def multiply(x, table):
    return product(Displacements(table, False).matrix(), x)


def gradients_of(function, x, table, gradient):
    """Return the gradients of x and of the table for the output gradient, (B, N, C)."""
    x, table = x.clone().requires_grad_(), table.clone().requires_grad_()
    return torch.autograd.grad(function(x, table), (x, table), gradient)


@in_turn("grid", GRIDS)
@in_turn("softmax", [True, False])
def test_a_weight_is_the_number_of_the_table_for_the_displacement(grid, softmax):
    kernel = drawn(grid, softmax=softmax)
    assert kernel.grid == grid
    middle = torch.tensor([side - 1 for side in grid.shape])
    places = grid.coordinates()
    index = places[None] - places[:, None] + middle  # (N, N, axes)
    chosen = kernel.table[:, *index.unbind(-1)]
    assert torch.equal(chosen, kernel.table.flatten(1)[:, grid.offset_index().T])
    torch.testing.assert_close(kernel.matrix(), chosen.softmax(-1) if softmax else chosen, rtol=0, atol=1e-14)


@in_turn("grid", [Grid(5, 7), Grid(1, 9), Grid(14, 14)])
@in_turn("softmax", [True, False])
def test_weights_among_the_tokens_of_a_part_are_cut_and_normalized(grid, softmax):
    kernel = drawn(grid, softmax=softmax)
    for part in (Grid(1, 1), Grid((grid.height + 1) // 2, grid.width), Grid(grid.height, (grid.width + 2) // 3), grid):
        for down, across in {(0, 0), (grid.height - part.height, grid.width - part.width)}:
            y, x = grid.coordinates().unbind(-1)
            inside = (y >= down) & (y < down + part.height) & (x >= across) & (x < across + part.width)
            expected = kernel.matrix()[:, inside][:, :, inside]
            expected = expected / expected.sum(-1, keepdim=True) if softmax else expected
            torch.testing.assert_close(kernel.part(part).matrix(), expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(kernel.with_weights().part(part).weights, expected, rtol=0, atol=1e-12)


def test_a_part_out_of_reach_of_a_narrow_center_still_has_weights():
    """exp(-2000) underflows: cutting the weights of the whole window would give 0 / 0."""
    offsets = Grid(5, 7).lags().float() - torch.tensor([4.0, 6.0])
    part = Displacements(-40 * offsets.square().sum(-1)[None], softmax=True).part(Grid(2, 2)).matrix()
    expected = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(4, -1)
    torch.testing.assert_close(part[0], expected, rtol=0, atol=1e-6)


@in_turn("grid", GRIDS)
@in_turn("groups", [1, 3])
@in_turn("workspace", [1, 900, 1 << 20])
def test_mixing_and_its_gradients_are_those_of_the_product_with_the_matrix(grid, groups, workspace, monkeypatch):
    monkeypatch.setattr(displacement_module, "_WORKSPACE", workspace)
    kernel = drawn(grid, groups)
    x, gradient = torch.randn(2, 2, grid.patches, 6, dtype=torch.float64)
    torch.testing.assert_close(mix(x, kernel.table), multiply(x, kernel.table), rtol=0, atol=1e-10)
    pairs = zip(*(gradients_of(function, x, kernel.table, gradient) for function in (mix, multiply)), strict=True)
    for value, expected in pairs:
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-10)


@in_turn("layout", ["transposed", "expanded", "strided"])
def test_tokens_may_have_any_strides_and_are_unchanged(layout):
    kernel = drawn(Grid(3, 4))
    x = {
        "transposed": torch.randn(2, 6, 12, dtype=torch.float64).mT,
        "expanded": torch.randn(1, 12, 1, dtype=torch.float64).expand(3, 12, 6),
        "strided": torch.randn(4, 12, 12, dtype=torch.float64)[::2, :, 1::2],
    }[layout]
    before = x.clone()
    torch.testing.assert_close(kernel.mix(x), multiply(x, kernel.table), rtol=0, atol=1e-10)
    assert kernel.mix(x).is_contiguous() and torch.equal(x, before)


@pytest.mark.parametrize("size", [1, 1e8])
def test_in_float32_it_is_the_float64_product_also_beside_a_far_larger_token(size):
    grid = Grid(13, 13)
    table = (-grid.lags().float().square().sum(-1)).exp()[None]
    x, gradient = torch.randn(2, 2, 169, 4)
    x[:, 84] *= size
    small = table.double()
    expected = multiply(x.double(), small)
    hardly = Displacements(small, False).matrix()[0, :, 84] * size < 1e-6  # rows that the large token hardly affects
    assert hardly.sum() > 10
    torch.testing.assert_close(mix(x, table)[:, hardly], expected[:, hardly].float(), rtol=1e-6, atol=1e-6)
    exact = gradients_of(multiply, x.double(), small, gradient.double())
    for value, other in zip(gradients_of(mix, x, table, gradient), exact, strict=True):
        assert value.dtype == torch.float32 and (value - other).abs().max() < 1e-5 * other.abs().max()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_number_that_is_not_finite_affects_its_channel_of_its_sample_alone(value):
    kernel, x = drawn(Grid(5, 7)), torch.randn(2, 35, 6, dtype=torch.float64)
    expected = kernel.mix(x)
    x[1, 20, 3] = value
    mixed = kernel.mix(x)
    assert mixed[1, :, 3].isnan().all()
    mixed[1, :, 3] = expected[1, :, 3]
    assert torch.equal(mixed, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_that_of_the_result_alone(dtype):
    kernel, x = drawn(Grid(5, 7), dtype=dtype), torch.randn(2, 35, 4, dtype=dtype)
    y = kernel.mix(x)
    assert y.dtype == dtype and torch.equal(y, mix(x.float(), kernel.table.float()).to(dtype))
    for gradient in gradients_of(mix, x, kernel.table, torch.ones_like(x)):
        assert gradient.dtype == dtype and gradient.isfinite().all() and gradient.any()


def test_autocast_changes_neither_the_product_nor_its_gradients():
    kernel = drawn(Grid(5, 7), dtype=torch.float32)
    x, gradient = torch.randn(2, 2, 35, 4)
    y, plain = kernel.mix(x), gradients_of(mix, x, kernel.table, gradient)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kernel.mix(x), y)
        assert all(map(torch.equal, gradients_of(mix, x, kernel.table, gradient), plain))


def test_it_is_one_graph_forward_and_backward():
    kernel = drawn(Grid(5, 7))
    x, gradient = torch.randn(2, 2, 35, 4, dtype=torch.float64)

    def mixed(x, table):
        return mix(x.sin(), table) * 2

    compiled = torch.compile(mixed, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, kernel.table), mixed(x, kernel.table))
    expected = gradients_of(mixed, x, kernel.table, gradient)
    assert all(map(torch.equal, gradients_of(compiled, x, kernel.table, gradient), expected))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of the check
def test_pytorch_accepts_both_operators():
    table, x = drawn(Grid(3, 4)).table, torch.randn(2, 12, 4, dtype=torch.float64)
    operators = torch.ops.graticule
    forward = torch.library.opcheck(
        operators.mix_by_displacement.default, (x.clone().requires_grad_(), table.clone().requires_grad_())
    )
    backward = torch.library.opcheck(operators.mix_by_displacement_backward.default, (torch.randn_like(x), x, table))
    assert {*forward.values(), *backward.values()} == {"SUCCESS"}


def largest_allocation(work):
    """Return the largest number of bytes that one operation inside `work` allocates and still holds on return."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        work()
    return max(event.self_cpu_memory_usage for event in events.events())


def test_no_matrix_of_all_pairs_is_made():
    grid = Grid(40, 40)
    matrix = 4 * grid.patches**2  # bytes in float32
    kernel, (x, gradient) = drawn(grid, dtype=torch.float32), torch.randn(2, 1, 1600, 4)
    assert largest_allocation(lambda: gradients_of(multiply, x, kernel.table, gradient)) >= matrix
    assert largest_allocation(lambda: gradients_of(mix, x, kernel.table, gradient)) < matrix / 10


@pytest.mark.parametrize("shape", [(0, 12, 4), (2, 12, 0)])
def test_no_samples_or_channels_are_mixed_to_none(shape):
    table = torch.randn(2, 5, 7)
    assert mix(torch.zeros(shape), table).shape == shape
    assert not gradients_of(mix, torch.zeros(shape), table, torch.zeros(shape))[1].any()


@in_turn(
    ("shape", "softmax", "message"),
    [
        *(
            (shape, False, r"`x` must be \(B, 12, C\), C a multiple of 2")
            for shape in ((2, 11, 4), (2, 12, 5), (12, 4))
        ),
        ((2, 12, 4), True, "`softmax` must be False"),
    ],
)
def test_tokens_and_weights_that_do_not_fit_are_refused(shape, softmax, message):
    with pytest.raises(ValueError, match=message):
        Displacements(torch.randn(2, 5, 7), softmax).mix(torch.zeros(shape))
