"""Mixing by displacement: the product with the matrix of all pairs, without the matrix."""

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from graticule.position import displacement as displacement_module
from graticule.position.displacement import Displacements, displacement_index
from graticule.position.grid import Grid
from in_turn import in_turn

GRIDS = [Grid(5, 7), Grid(1, 9), Grid(9, 1), Grid(1, 1), Grid(14, 14), Grid(12, 3)]
grids = pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.height}x{grid.width}")
normalised = pytest.mark.parametrize("softmax", [True, False], ids=["softmax", "plain"])
#: With 1, each piece is one row of weights, one sample and one channel; the others split unevenly.
WORKSPACES = [1, 300, 900, 2500, 7000]


def drawn(grid, groups, softmax, dtype=torch.float64):
    """Return a table drawn from a normal distribution."""
    return Displacements(torch.randn(groups, 2 * grid.height - 1, 2 * grid.width - 1, dtype=dtype), softmax)


def gaussian(grid, center, precision, dtype=torch.float64):
    """Return one row of logits per group, -precision / 2 |d - center|^2, with centers (dy, dx)."""
    dy = torch.arange(1 - grid.height, grid.height, dtype=torch.float64)[:, None]
    dx = torch.arange(1 - grid.width, grid.width, dtype=torch.float64)
    tables = [-0.5 * precision * ((dy - y).square() + (dx - x).square()) for y, x in center]
    return Displacements(torch.stack(tables).to(dtype), softmax=True)


def product(weights, x):
    """Multiply weights (groups, N, N) with the groups of channels of x: (B, N, C)."""
    return torch.einsum("gij,bjgc->bigc", weights, x.unflatten(-1, (len(weights), -1))).flatten(-2)


def gradients_of(mix, x, table, given):
    """Return the gradients of x and of the table for the output gradient `given`: (B, N, C)."""
    x, table = x.clone().requires_grad_(), table.clone().requires_grad_()
    return torch.autograd.grad(mix(x, table), (x, table), given)


def shares(kernel):
    """Return the normalizer of each row relative to the norm of exp(t - max t), (groups, N)."""
    weights = kernel.table.sub(kernel.table.amax((1, 2), keepdim=True)).exp().flatten(1)
    return weights[:, displacement_index(kernel.grid)].sum(-1) / weights.norm(dim=1, keepdim=True)


def assert_some_rows_are_unsafe(kernel):
    unsafe = shares(kernel) < displacement_module._SAFE
    assert unsafe.any() and not unsafe.all()


def assert_is_the_product(kernel, x, atol=1e-10):
    torch.testing.assert_close(kernel.mix(x), product(kernel.matrix(), x), rtol=0, atol=atol)


def assert_gradients_are_the_products(kernel, x, given, atol=1e-10):
    by_displacement = gradients_of(lambda x, table: Displacements(table, kernel.softmax).mix(x), x, kernel.table, given)
    by_matrix = gradients_of(
        lambda x, table: product(Displacements(table, kernel.softmax).matrix(), x), x, kernel.table, given
    )
    for found, expected in zip(by_displacement, by_matrix, strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)


# The matrix


@in_turn("grid", GRIDS[:4])
@normalised
def test_a_weight_is_the_tables_number_for_where_the_other_token_is(grid, softmax):
    kernel = drawn(grid, 2, softmax)
    weights = kernel.matrix()
    assert weights.shape == (2, grid.patches, grid.patches)
    for g, table in enumerate(kernel.table.tolist()):
        for i in range(grid.patches):
            row = []
            for j in range(grid.patches):
                dy, dx = j // grid.width - i // grid.width, j % grid.width - i % grid.width
                row.append(table[dy + grid.height - 1][dx + grid.width - 1])
            if softmax:
                row = [math.exp(logit) for logit in row]
                row = [weight / sum(row) for weight in row]
            torch.testing.assert_close(weights[g, i], torch.tensor(row, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_weights_of_a_row_of_three_written_by_hand():
    kernel = Displacements(torch.tensor([[[10.0, 20.0, 30.0, 40.0, 50.0]]], dtype=torch.float64), softmax=False)
    expected = torch.tensor([[30.0, 40.0, 50.0], [20.0, 30.0, 40.0], [10.0, 20.0, 30.0]], dtype=torch.float64)
    assert torch.equal(kernel.matrix()[0], expected)
    x = torch.tensor([[[1.0], [0.0], [2.0]]], dtype=torch.float64)
    y = torch.tensor([[[130.0], [100.0], [70.0]]], dtype=torch.float64)
    torch.testing.assert_close(kernel.mix(x), y, rtol=0, atol=1e-12)


@grids
def test_the_index_counts_the_displacements_row_by_row(grid):
    index = displacement_index(grid)
    assert index.shape == (grid.patches, grid.patches) and index.dtype == torch.int64
    for i in range(grid.patches):
        for j in range(0, grid.patches, 5):
            dy, dx = j // grid.width - i // grid.width, j % grid.width - i % grid.width
            assert index[i, j] == (dy + grid.height - 1) * (2 * grid.width - 1) + dx + grid.width - 1


@grids
def test_a_table_knows_the_grid_of_its_tokens(grid):
    assert drawn(grid, 2, True).grid == grid


@grids
@normalised
def test_weights_among_the_tokens_of_a_part_are_those_of_the_whole_cut_and_normalised(grid, softmax):
    kernel = drawn(grid, 2, softmax)
    for part in (Grid(1, 1), Grid((grid.height + 1) // 2, grid.width), Grid(grid.height, (grid.width + 2) // 3), grid):
        for down, across in {(0, 0), (grid.height - part.height, grid.width - part.width)}:
            y, x = grid.coordinates().unbind(-1)
            kept = (y >= down) & (y < down + part.height) & (x >= across) & (x < across + part.width)
            expected = kernel.matrix()[:, kept][:, :, kept]
            expected = expected / expected.sum(-1, keepdim=True) if softmax else expected
            torch.testing.assert_close(kernel.part(part).matrix(), expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(kernel.with_weights().part(part).weights, expected, rtol=0, atol=1e-12)


def test_a_part_out_of_reach_of_a_narrow_centre_still_has_weights():
    """exp(-2000) underflows: cutting the weights of the whole window would give 0 / 0."""
    kernel = gaussian(Grid(5, 7), [(4.0, 6.0)], 80.0, torch.float32)
    part = kernel.part(Grid(2, 2)).matrix()
    expected = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(4, -1)
    torch.testing.assert_close(part[0], expected, rtol=0, atol=1e-6)


# The product


@grids
@normalised
@in_turn("groups", [1, 3])
def test_mixing_is_the_product_with_the_matrix(grid, softmax, groups):
    assert_is_the_product(drawn(grid, groups, softmax), torch.randn(2, grid.patches, 6, dtype=torch.float64))


@grids
@normalised
@in_turn("groups", [1, 3])
def test_gradients_to_tokens_and_table_are_those_of_the_product(grid, softmax, groups):
    x, given = torch.randn(2, 2, grid.patches, 6, dtype=torch.float64)
    assert_gradients_are_the_products(drawn(grid, groups, softmax), x, given)


@normalised
def test_gradients_are_those_of_finite_differences(softmax):
    kernel = drawn(Grid(2, 3), 2, softmax)
    x = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    table = kernel.table.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, table: Displacements(table, softmax).mix(x), (x, table))


def test_gradients_through_unsafe_rows_are_those_of_finite_differences():
    kernel = gaussian(Grid(2, 3), [(0.0, 0.5), (8.0, 12.0)], 0.6)
    assert_some_rows_are_unsafe(kernel)
    x = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    table = kernel.table.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, table: Displacements(table, True).mix(x), (x, table))


@normalised
def test_a_table_or_tokens_alone_may_ask_for_a_gradient(softmax):
    kernel, x = drawn(Grid(3, 4), 2, softmax), torch.randn(2, 12, 4, dtype=torch.float64)
    given = torch.randn_like(x)
    both = gradients_of(lambda x, table: Displacements(table, softmax).mix(x), x, kernel.table, given)
    tokens, table = x.clone().requires_grad_(), kernel.table.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(kernel.mix(tokens), tokens, given)[0], both[0])
    assert torch.equal(torch.autograd.grad(Displacements(table, softmax).mix(x), table, given)[0], both[1])


@normalised
def test_ones_become_the_sums_of_the_rows_which_a_softmax_makes_one(softmax):
    kernel = drawn(Grid(5, 7), 2, softmax)
    ones = torch.ones(1, 35, 2, dtype=torch.float64)
    torch.testing.assert_close(kernel.mix(ones), kernel.matrix().sum(-1).T[None], rtol=0, atol=1e-12)
    assert torch.allclose(kernel.mix(ones), ones) == softmax


@normalised
@in_turn("layout", ["transposed", "expanded", "strided"])
def test_tokens_may_lie_in_memory_as_they_like_and_are_left_as_they_are(softmax, layout):
    kernel = drawn(Grid(3, 4), 2, softmax)
    x = {
        "transposed": torch.randn(2, 6, 12, dtype=torch.float64).mT,
        "expanded": torch.randn(1, 12, 1, dtype=torch.float64).expand(3, 12, 6),
        "strided": torch.randn(4, 12, 12, dtype=torch.float64)[::2, :, 1::2],
    }[layout]
    kept, table = x.clone(), kernel.table.clone()
    assert_is_the_product(kernel, x)
    assert kernel.mix(x).is_contiguous()
    assert torch.equal(x, kept) and torch.equal(kernel.table, table)


# Pieces


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("kernel", ["softmax", "plain", "unsafe"])
def test_work_done_in_pieces_is_the_same_work(workspace, kernel, monkeypatch):
    grid = Grid(5, 7)
    if kernel == "unsafe":
        kernel = gaussian(grid, [(40.0, 50.0), (1.0, -1.0), (-30.0, 0.0)], 0.1)
        assert_some_rows_are_unsafe(kernel)
    else:
        kernel = drawn(grid, 3, kernel == "softmax")
    x, given = torch.randn(2, 5, 35, 9, dtype=torch.float64)
    whole = kernel.mix(x)
    monkeypatch.setattr(displacement_module, "_WORKSPACE", workspace)
    torch.testing.assert_close(kernel.mix(x), whole, rtol=0, atol=1e-10)
    assert_is_the_product(kernel, x)
    assert_gradients_are_the_products(kernel, x, given)


@pytest.mark.parametrize(("workspace", "pieces"), [(1, 15), (4 * 35 * 3 * 2, 10), (4 * 35 * 3 * 7, 3), (1 << 20, 1)])
def test_a_small_workspace_cuts_samples_and_then_channels_into_pieces(workspace, pieces, monkeypatch):
    """5 samples of 3 groups of 3 channels: pieces of 1 channel, 2 channels, 2 samples, or all at once."""
    transform, calls = torch.fft.irfftn, []
    monkeypatch.setattr(displacement_module, "_WORKSPACE", workspace)
    monkeypatch.setattr(torch.fft, "irfftn", lambda *args, **kwargs: calls.append(1) or transform(*args, **kwargs))
    assert_is_the_product(drawn(Grid(5, 7), 3, True), torch.randn(5, 35, 9, dtype=torch.float64))
    assert len(calls) == pieces


# Rows that are too inaccurate by the transform


@in_turn("dtype", [torch.float32, torch.float64])
@in_turn("center", [(50.0, 0.0), (0.0, -50.0), (-50.0, 50.0), (50.3, 49.6)])
@in_turn("precision", [0.02, 1.0, 20.0])
def test_a_row_far_from_the_centre_is_still_the_row_of_the_matrix(dtype, center, precision):
    grid = Grid(5, 7)
    kernel = gaussian(grid, [center, (0.5, -1.0)], precision, dtype)
    if precision >= 1:
        assert_some_rows_are_unsafe(kernel)
    assert (shares(kernel) == 0).any() or precision < 20  # the normalizer underflows
    x = torch.randn(2, 35, 6, dtype=dtype)
    ones = torch.ones_like(x)
    exact = 1e-10 if dtype == torch.float64 else 1e-5
    expected = product(Displacements(kernel.table.double(), True).matrix(), x.double())
    torch.testing.assert_close(kernel.mix(x).double(), expected, rtol=0, atol=exact)
    torch.testing.assert_close(kernel.mix(ones), ones, rtol=0, atol=exact)


@pytest.mark.parametrize("workspace", [1, 100, 1 << 20])
@pytest.mark.parametrize("precision", [0.1, 1.0, 20.0])
def test_gradients_of_rows_far_from_the_centre_are_those_of_the_matrix(workspace, precision, monkeypatch):
    monkeypatch.setattr(displacement_module, "_WORKSPACE", workspace)
    kernel = gaussian(Grid(5, 7), [(50.0, -50.0), (0.5, -1.0), (-20.0, 0.0)], precision)
    assert_some_rows_are_unsafe(kernel)
    x, given = torch.randn(2, 2, 35, 6, dtype=torch.float64)
    assert_gradients_are_the_products(kernel, x, given)


def test_logits_may_be_moved_by_a_constant_without_changing_anything():
    kernel, x = drawn(Grid(5, 7), 2, True), torch.randn(2, 35, 4, dtype=torch.float64)
    for moved in (-1e4, 1e4):
        torch.testing.assert_close(kernel._replace(table=kernel.table + moved).mix(x), kernel.mix(x), rtol=0, atol=1e-9)


def test_a_table_with_one_huge_logit_gives_its_token_all_where_it_is_and_shares_the_rest():
    table = torch.zeros(1, 1, 9, dtype=torch.float64)
    table[0, 0, 8] = 1e4  # four to the right: only the first of five tokens has one there
    x = torch.randn(1, 5, 2, dtype=torch.float64)
    expected = torch.cat([x[:, 4:], x.mean(1, keepdim=True).expand(-1, 4, -1)], 1)
    torch.testing.assert_close(Displacements(table, True).mix(x), expected, rtol=0, atol=1e-12)


# Precision


@grids
@normalised
def test_float32_is_close_to_the_float64_matrix(grid, softmax):
    kernel, x = drawn(grid, 3, softmax, torch.float32), torch.randn(2, grid.patches, 6)
    expected = product(Displacements(kernel.table.double(), softmax).matrix(), x.double())
    assert (kernel.mix(x) - expected).abs().max() < 1e-5 * expected.abs().max()


@normalised
def test_float32_gradients_are_close_to_those_of_the_float64_matrix(softmax):
    kernel = drawn(Grid(14, 14), 3, softmax, torch.float32)
    x, given = torch.randn(2, 2, 196, 6)
    found = gradients_of(lambda x, table: Displacements(table, softmax).mix(x), x, kernel.table, given)
    expected = gradients_of(
        lambda x, table: product(Displacements(table, softmax).matrix(), x),
        x.double(),
        kernel.table.double(),
        given.double(),
    )
    for close, exact in zip(found, expected, strict=True):
        assert close.dtype == torch.float32
        assert (close - exact).abs().max() < 1e-5 * exact.abs().max()


def test_a_saturated_group_gets_no_gradient_but_rounding_errors_far_below_what_an_optimizer_sees():
    """A Gaussian of 1/12 patch in the middle: the next weight is exp(-72), and so is the gradient of the table."""
    kernel = gaussian(Grid(14, 14), [(0.0, 0.0), (1.0, -2.0)], 144.0, torch.float32)
    x, given = torch.randn(2, 8, 196, 16)
    _, found = gradients_of(lambda x, table: Displacements(table, True).mix(x), x, kernel.table, given)
    assert found[0].abs().max() < 1e-12  # Adam's eps is 1e-8
    _, expected = gradients_of(
        lambda x, table: product(Displacements(table, True).matrix(), x),
        x.double(),
        kernel.table.double(),
        given.double(),
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-12)


@normalised
@pytest.mark.parametrize("size", [1e4, 1e8])
def test_a_token_far_larger_than_the_others_does_not_show_in_those_that_hardly_take_it(softmax, size):
    """In float32 the rounding errors of the large token would exceed the others."""
    logits = gaussian(Grid(13, 13), [(0.0, 0.0), (1.0, 0.0)], 2.0, torch.float32)
    kernel = logits if softmax else Displacements(logits.table.exp(), softmax=False)
    x = torch.randn(2, 169, 4)
    x[:, 84] *= size
    expected = product(Displacements(kernel.table.double(), softmax).matrix(), x.double())
    weights = Displacements(kernel.table.double(), softmax).matrix()[:, :, 84]
    hardly = (weights * size < 1e-6).all(0)  # rows that the large token hardly affects
    assert hardly.sum() > 10
    torch.testing.assert_close(kernel.mix(x)[:, hardly], expected[:, hardly].float(), rtol=1e-6, atol=1e-6)


@normalised
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_number_that_is_not_finite_spoils_its_channel_of_its_sample_alone(softmax, value):
    kernel, x = drawn(Grid(5, 7), 2, softmax), torch.randn(2, 35, 6, dtype=torch.float64)
    expected = kernel.mix(x)
    x[1, 20, 3] = value
    found = kernel.mix(x)
    assert found[1, :, 3].isnan().all()
    found[1, :, 3] = expected[1, :, 3]
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("reach", "transforms"), [(0.0, True), (3.0, True), (6.0, False), (40.0, False)])
def test_nothing_is_transformed_where_most_rows_have_to_be_computed_pair_by_pair(reach, transforms, monkeypatch):
    kernel = gaussian(Grid(9, 9), [(reach, 0.0)] * 2, 20.0, torch.float32)
    calls, transform = [], torch.fft.irfftn
    monkeypatch.setattr(torch.fft, "irfftn", lambda *args, **kwargs: calls.append(1) or transform(*args, **kwargs))
    x, given = torch.randn(2, 1, 81, 4)
    found = gradients_of(lambda x, table: Displacements(table, True).mix(x), x, kernel.table, given)
    expected = gradients_of(lambda x, table: product(Displacements(table, True).matrix(), x), x, kernel.table, given)
    assert bool(calls) == transforms
    for close, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(close, exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@normalised
def test_half_precision_is_that_of_the_result_alone(dtype, softmax):
    kernel, x = drawn(Grid(5, 7), 2, softmax, dtype), torch.randn(2, 35, 4, dtype=dtype)
    y = kernel.mix(x)
    assert y.dtype == dtype
    assert torch.equal(y, kernel._replace(table=kernel.table.float()).mix(x.float()).to(dtype))
    x, table = x.requires_grad_(), kernel.table.requires_grad_()
    for gradient in torch.autograd.grad(Displacements(table, softmax).mix(x).sum(), (x, table)):
        assert gradient.dtype == dtype and gradient.isfinite().all() and gradient.any()


@normalised
def test_autocast_changes_neither_the_product_nor_its_gradients(softmax):
    kernel = drawn(Grid(5, 7), 2, softmax, torch.float32)
    x, given = torch.randn(2, 2, 35, 4)

    def mixed(x, table):
        return Displacements(table, softmax).mix(x)

    def cast(x, table):
        with torch.autocast("cpu", torch.bfloat16):
            return mixed(x, table)

    assert cast(x, kernel.table).dtype == torch.float32
    assert torch.equal(cast(x, kernel.table), mixed(x, kernel.table))
    plain = gradients_of(mixed, x, kernel.table, given)
    assert all(map(torch.equal, gradients_of(cast, x, kernel.table, given), plain))
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, gradients_of(mixed, x, kernel.table, given), plain))


def test_unsafe_rows_are_as_exact_under_autocast():
    kernel, x = gaussian(Grid(5, 7), [(50.0, -50.0)], 0.2, torch.float32), torch.randn(2, 35, 4)
    assert_some_rows_are_unsafe(kernel)
    with torch.autocast("cpu", torch.bfloat16):
        y = kernel.mix(x)
    assert torch.equal(y, kernel.mix(x))


# PyTorch's requirements for operators


@normalised
def test_it_is_one_graph_forward_and_backward(softmax):
    kernel = drawn(Grid(5, 7), 2, softmax)
    x, given = torch.randn(2, 2, 35, 4, dtype=torch.float64)

    def mixed(x, table):
        return Displacements(table, softmax).mix(x.sin()) * 2

    compiled = torch.compile(mixed, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, kernel.table), mixed(x, kernel.table))
    found = gradients_of(compiled, x, kernel.table, given)
    expected = gradients_of(mixed, x, kernel.table, given)
    assert all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of the check
@pytest.mark.parametrize("kernel", ["softmax", "plain", "unsafe"])
def test_it_keeps_the_promises_that_pytorch_asks_of_an_operator(kernel):
    grid = Grid(3, 4)
    if kernel == "unsafe":
        kernel = gaussian(grid, [(50.0, 0.0), (0.0, 1.0)], 0.5)
        assert_some_rows_are_unsafe(kernel)
    else:
        kernel = drawn(grid, 2, kernel == "softmax")
    x = torch.randn(2, 12, 4, dtype=torch.float64, requires_grad=True)
    operator = torch.ops.graticule.mix_by_displacement.default
    kept = torch.library.opcheck(operator, (x, kernel.table.requires_grad_(), kernel.softmax))
    assert set(kept.values()) == {"SUCCESS"}


def largest_allocation(work):
    """Return the largest number of bytes that one operation inside `work` allocates and still holds on return."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    return max(event.self_cpu_memory_usage for event in found.events())


@normalised
def test_no_matrix_of_all_pairs_is_ever_made(softmax):
    grid = Grid(40, 40)
    matrix = 4 * grid.patches**2  # bytes in float32
    kernel = drawn(grid, 2, softmax, torch.float32)._replace(table=0.01 * torch.randn(2, 79, 79))
    x, given = torch.randn(2, 1, 1600, 4)

    def both(mix):
        return gradients_of(mix, x, kernel.table, given)

    assert largest_allocation(lambda: both(lambda x, t: product(Displacements(t, softmax).matrix(), x))) >= matrix
    assert largest_allocation(lambda: both(lambda x, t: Displacements(t, softmax).mix(x))) < matrix / 10


def test_the_gradient_of_the_table_is_the_same_within_a_compiled_backward_pass():
    torch.manual_seed(0)
    x = torch.randn(2, 12, 4, dtype=torch.float64, requires_grad=True)
    table = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    for softmax in (False, True):
        given = (torch.randn_like(x), x.detach(), table.detach(), softmax)
        found = torch.library.opcheck(torch.ops.graticule.mix_by_displacement_backward.default, given)
        assert set(found.values()) == {"SUCCESS"}, found


@pytest.mark.parametrize("shape", [(0, 12, 4), (2, 12, 0)])
def test_nothing_mixed_is_nothing(shape):
    table = torch.randn(2, 5, 7, requires_grad=True)
    y = Displacements(table, True).mix(torch.zeros(shape, requires_grad=True))
    assert y.shape == shape
    y.sum().backward()
    assert torch.equal(table.grad, torch.zeros_like(table))


@in_turn("shape", [(2, 11, 4), (2, 12, 5), (12, 4)])
def test_tokens_that_do_not_fit_the_table_are_refused(shape):
    with pytest.raises(ValueError, match=r"`x` must be \(B, 12, C\), C a multiple of 2"):
        Displacements(torch.randn(2, 5, 7), True).mix(torch.zeros(shape))
