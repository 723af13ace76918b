"""Mixing encodings: weights by displacement, as the formulas say, on any grid."""

from functools import partial

import pytest
import torch

from graticule.displacement import displacement_index
from graticule.encodings import DenseMixing, LearnableMixing, MixingSum, QuadraticMixing
from graticule.encodings.mixing import resize_pairs
from graticule.grid import Grid

GRIDS = [Grid(3, 4), Grid(4, 3), Grid(1, 5), Grid(5, 5)]
FORMS = ["alpha", "gamma", "gamma_gamma_t"]
grids = pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.height}x{grid.width}")
BUILDERS = {
    "sgu": DenseMixing,
    "lrpe": LearnableMixing,
    "glrpe": lambda grid: LearnableMixing(grid, 3),
    "lrpe_m": lambda grid: MixingSum(DenseMixing(grid), LearnableMixing(grid)),
    **{form: partial(QuadraticMixing, groups=3, form=form) for form in FORMS},
}
every = pytest.mark.parametrize("name", BUILDERS)


def drawn(encoding):
    """The encoding in float64, all its parameters moved."""
    with torch.no_grad():
        for parameter in encoding.double().parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return encoding


@grids
@pytest.mark.parametrize("form", FORMS)
def test_quadratic_weights_are_equation_5_written_naively(grid, form):
    encoding = drawn(QuadraticMixing(grid, 3, form))
    place = grid.coordinates().double().flip(-1)  # (x, y)
    expected = torch.empty(3, grid.patches, grid.patches, dtype=torch.float64)
    for g in range(3):
        learned = encoding.matrix[g]
        matrix = learned * torch.eye(2, dtype=torch.float64) if form == "alpha" else learned
        matrix = learned @ learned.mT if form == "gamma_gamma_t" else matrix
        for i in range(grid.patches):
            delta = place - place[i] - encoding.center[g]  # p_j - p_i - Delta
            expected[g, i] = torch.stack([-0.5 * d @ matrix.double() @ d for d in delta]).softmax(0)
    torch.testing.assert_close(encoding(grid), expected, rtol=0, atol=1e-12)


@grids
@every
def test_weights_have_a_row_a_query_and_depend_on_displacement_alone(name, grid):
    encoding = drawn(BUILDERS[name](grid))
    weights = encoding(grid)
    assert weights.shape == (encoding.groups, grid.patches, grid.patches)
    if name in ("lrpe", "glrpe"):
        index = displacement_index(grid)
        for row in range(int(index.max()) + 1):
            seen = weights[:, index == row]
            assert torch.equal(seen, seen[:, :1].expand_as(seen))
    if name in FORMS:  # up to the normaliser of its row
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-12)
        table = encoding.logits(grid).flatten(1)[:, displacement_index(grid)].exp()
        torch.testing.assert_close(weights * table.sum(-1, keepdim=True), table, rtol=1e-12, atol=1e-12)


def test_a_row_of_the_positive_form_is_largest_at_its_centre():
    grid = Grid(7, 9)
    encoding = drawn(QuadraticMixing(grid, 4)).requires_grad_(False)
    encoding.center.copy_(torch.tensor([[2.0, -1.0], [0.0, 0.0], [-3.0, 2.0], [1.0, 3.0]]))  # (x, y)
    row = encoding(grid)[:, grid.center].unflatten(-1, grid.shape)
    for g, (x, y) in enumerate(encoding.center.int().tolist()):
        assert row[g].argmax() == (3 + y) * 9 + 4 + x


def test_small_eigenvalues_look_wide():
    grid = Grid(9, 9)
    encoding = QuadraticMixing(grid, 2).double().requires_grad_(False)
    encoding.center.zero_()
    encoding.matrix.copy_(torch.diag_embed(torch.tensor([[0.1, 1.5], [1.5, 0.1]])))  # over (x, y)
    row = encoding(grid)[:, grid.center].unflatten(-1, grid.shape)
    y, x = torch.meshgrid(torch.arange(-4, 5), torch.arange(-4, 5), indexing="ij")
    spread = [((row[g] * x.square()).sum(), (row[g] * y.square()).sum()) for g in range(2)]
    assert spread[0][0] > 10 * spread[0][1] and spread[1][1] > 10 * spread[1][0]


def test_it_starts_local_with_groups_in_all_directions_and_widths():
    grid = Grid(14, 14)
    encoding = QuadraticMixing(grid, 8)
    row = encoding(grid)[:, grid.center].unflatten(-1, grid.shape)
    y, x = (axis - 7 for axis in torch.meshgrid(torch.arange(14), torch.arange(14), indexing="ij"))
    near = (x.square() + y.square()).sqrt()
    reach = (row * near).sum((-2, -1))
    assert (reach < 0.75 * near.mean()).all() and reach[0] < 1.5
    assert reach[-1] > 2 * reach[0]  # widths spread
    angles = torch.atan2(encoding.center[:, 1], encoding.center[:, 0])
    assert torch.cdist(angles[:, None], angles[:, None])[~torch.eye(8, dtype=bool)].min() > 0.1
    alone = QuadraticMixing(grid)
    assert not alone.center.any() and QuadraticMixing(grid, 8, shift=False).center.abs().sum() == 0


@every
def test_a_gradient_reaches_every_parameter_of_every_group(name):
    grid = Grid(3, 4)
    encoding = drawn(BUILDERS[name](grid))
    (encoding(grid) * torch.randn(encoding.groups, 12, 12)).sum().backward()
    for parameter in encoding.parameters():
        assert parameter.grad.flatten(1).abs().sum(1).all() if parameter.ndim > 1 else parameter.grad.all()


def test_a_frozen_centre_takes_no_gradient():
    encoding = QuadraticMixing(Grid(3, 4), 2, shift=False)
    assert [name for name, p in encoding.named_parameters() if p.requires_grad] == ["matrix"]


def test_parameters_are_those_that_the_paper_counts_or_should():
    grid, count = Grid(14, 14), lambda encoding: sum(p.numel() for p in encoding.parameters())
    assert count(QuadraticMixing(grid, 8)) == 6 * 8
    assert count(DenseMixing(grid)) == 196**2
    # printed: (4 s + 1) N - 4 s sqrt(N) + 4 s, of which N is the bias; by construction it ends in s
    assert count(LearnableMixing(grid, 8)) == 8 * (2 * 14 - 1) ** 2 == 4 * 8 * 196 - 4 * 8 * 14 + 8


@pytest.mark.parametrize("form", FORMS)
def test_a_quadratic_encoding_is_computed_anew_at_another_grid(form):
    encoding = drawn(QuadraticMixing(Grid(3, 4), 2, form))
    other = QuadraticMixing(Grid(6, 5), 2, form).double()
    other.load_state_dict(encoding.state_dict())
    assert torch.equal(encoding(Grid(6, 5)), other(Grid(6, 5)))


@every
def test_making_another_grid_ones_own_gives_what_was_made_for_it(name):
    encoding, grid = drawn(BUILDERS[name](Grid(3, 4))), Grid(5, 6)
    there = encoding(grid)
    encoding.set_grid(grid)
    torch.testing.assert_close(encoding(grid), there, rtol=0, atol=1e-12)
    assert encoding.grid == grid


def test_a_dense_matrix_keeps_what_a_row_takes_in_all_at_another_size():
    matrix = torch.full((12, 12), 0.25, dtype=torch.float64)
    resized = resize_pairs(matrix, Grid(3, 4), Grid(5, 6))
    torch.testing.assert_close(resized.sum(1), torch.full((30,), 3.0, dtype=torch.float64))


def test_a_row_far_from_its_centre_is_still_a_distribution():
    encoding = QuadraticMixing(Grid(4, 4), 1).requires_grad_(False)
    encoding.center.fill_(1000.0)
    assert torch.isfinite(encoding(Grid(4, 4))).all() and (encoding(Grid(4, 4)).sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_that_of_the_result_alone(dtype):
    encoding = QuadraticMixing(Grid(7, 7), 4).to(dtype)
    wide = QuadraticMixing(Grid(7, 7), 4)
    wide.load_state_dict(encoding.state_dict())
    torch.testing.assert_close(encoding(Grid(7, 7)), wide(Grid(7, 7)).to(dtype), rtol=0.01, atol=1e-3)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: QuadraticMixing(Grid(3, 3), 0), "`groups`"),
        (lambda: QuadraticMixing(Grid(3, 3), 2, "sigma"), "`form`"),
        (lambda: LearnableMixing(Grid(3, 3, prefix=1)), "`grid`"),
    ],
)
def test_what_cannot_be_is_refused(build, said):
    with pytest.raises(ValueError, match=said):
        build()
