"""Mixing encodings: weights by displacement equal the formulas, on any grid."""

import copy
from functools import partial

import pytest
import torch

import graticule
from graticule.encodings.build import build_position
from graticule.encodings.gqpe import QuadraticMixing
from graticule.encodings.lrpe import LearnableMixing, MixingSum
from graticule.encodings.sgu import DenseMixing
from graticule.layers.gating import mix_tokens
from graticule.position.displacement import displacement_index
from graticule.position.grid import Grid
from in_turn import in_turn
from tiny import draw_double

GRIDS = [Grid(3, 4), Grid(4, 3), Grid(1, 5), Grid(5, 5)]
FORMS = ["alpha", "alpha_released", "gamma", "gamma_released", "gamma_gamma_t"]
grids = in_turn("grid", GRIDS)
BUILDERS = {
    "sgu": DenseMixing,
    "lrpe": LearnableMixing,
    "glrpe": lambda grid: LearnableMixing(grid, 3),
    "lrpe_m": lambda grid: MixingSum(DenseMixing(grid), LearnableMixing(grid)),
    **{form: partial(QuadraticMixing, groups=3, form=form) for form in FORMS},
}
every = in_turn("name", BUILDERS)


@grids
@every
def test_weights_have_a_row_a_query_and_depend_on_displacement_alone(name, grid):
    encoding = draw_double(BUILDERS[name](grid))
    weights = encoding(grid)
    assert weights.shape == (encoding.groups, grid.patches, grid.patches)
    if name in ("lrpe", "glrpe"):
        index = displacement_index(grid)
        for row in range(int(index.max()) + 1):
            seen = weights[:, index == row]
            assert torch.equal(seen, seen[:, :1].expand_as(seen))
    if name in FORMS:  # up to the normalizer of its row
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-12)
        assert (weights >= 0).all()
        table = encoding.logits(grid).flatten(1)[:, displacement_index(grid)].exp()
        torch.testing.assert_close(weights * table.sum(-1, keepdim=True), table, rtol=1e-12, atol=1e-12)


def test_spread_starts_local_with_groups_in_all_directions_and_widths():
    grid = Grid(14, 14)
    encoding = QuadraticMixing(grid, 8, start="spread")
    row = encoding(grid)[:, grid.center].unflatten(-1, grid.shape)
    y, x = (axis - 7 for axis in torch.meshgrid(torch.arange(14), torch.arange(14), indexing="ij"))
    near = (x.square() + y.square()).sqrt()
    reach = (row * near).sum((-2, -1))
    assert (reach < 0.75 * near.mean()).all() and reach[0] < 1.5
    assert reach[-1] > 2 * reach[0]  # different widths
    angles = torch.atan2(encoding.center[:, 1], encoding.center[:, 0])
    assert torch.cdist(angles[:, None], angles[:, None])[~torch.eye(8, dtype=bool)].min() > 0.1
    alone = QuadraticMixing(grid, start="spread")
    assert not alone.center.any()
    assert not QuadraticMixing(grid, 8, shift=False, start="spread").center.any()


@in_turn("groups", [None, 3])
def test_dense_matrices_can_start_as_the_gaussians_with_which_gqpe_starts(groups):
    grid = Grid(4, 5)
    weights = DenseMixing(grid, groups=groups, gaussian=True)(grid)
    expected = (-grid.offsets().float().square().sum(-1) / 2).softmax(-1)  # one patch wide
    torch.testing.assert_close(weights, expected.expand_as(weights), rtol=0, atol=0.05)
    assert (weights - QuadraticMixing(grid, groups or 1)(grid)).abs().max() < 0.05  # both with noise of 0.01
    posmlp = graticule.create_model("posmlp_nano_32", encoding="gsgu(gaussian=True)", gate_norm=False, img_size=32)
    biases = [value for name, value in posmlp.named_parameters() if ".biases." in name]
    assert biases and not any(bias.any() for bias in biases)


def test_the_released_form_gamma_moves_the_center_by_the_antisymmetric_part_and_the_printed_one_does_not():
    grid, turn = Grid(5, 5), torch.tensor([[0.0, 0.4], [-0.4, 0.0]], dtype=torch.float64)
    weights = {}
    for form in ("gamma", "gamma_released"):
        encoding = QuadraticMixing(grid, 1, form).double().requires_grad_(False)
        encoding.matrix.copy_(torch.eye(2))
        encoding.center.copy_(torch.tensor([1.0, 0.5]))
        before = encoding(grid)
        encoding.matrix.add_(turn)
        weights[form] = before, encoding(grid)
        encoding.center.copy_(encoding.center + (turn @ encoding.center[0] if form == "gamma_released" else 0))
        encoding.matrix.copy_(torch.eye(2))
        torch.testing.assert_close(encoding(grid), weights[form][1], rtol=0, atol=1e-12)
    torch.testing.assert_close(*weights["gamma"], rtol=0, atol=1e-12)
    assert not torch.allclose(*weights["gamma_released"])


def test_the_released_form_alpha_scales_the_center_alone():
    grid = Grid(5, 5)
    encoding = QuadraticMixing(grid, 1, "alpha_released").double().requires_grad_(False)
    encoding.matrix.fill_(2.0)
    encoding.center.copy_(torch.tensor([0.25, -0.5]))
    plain = QuadraticMixing(grid, 1, "alpha").double().requires_grad_(False)
    plain.matrix.fill_(1.0)
    plain.center.copy_(4 * encoding.center)
    torch.testing.assert_close(encoding(grid), plain(grid), rtol=0, atol=1e-12)
    assert torch.equal(encoding.quadratic(), torch.eye(2, dtype=torch.float64)[None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_every_group_stays_positive_semidefinite_and_finite_with_fewer_digits(dtype, autocast):
    """Parameters of many magnitudes, some nearly singular; float16 overflows if it squares them."""
    grid, groups = Grid(14, 14), 60
    encoding = QuadraticMixing(grid, groups).requires_grad_(False)
    angle = torch.linspace(0, torch.pi, groups)
    along = torch.stack([angle.cos(), angle.sin()], -1)
    across = torch.stack([-angle.sin(), angle.cos()], -1)
    size = torch.logspace(-3, 3, groups)[:, None]
    encoding.matrix.copy_(torch.stack([along * size, across * 1e-3], -1))
    encoding.center.copy_(3 * torch.randn(groups, 2))
    encoding = encoding if autocast else encoding.to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        logits, matrix, weights = encoding.logits(grid), encoding.quadratic(), encoding(grid)
        output = mix_tokens(torch.randn(2, 196, groups, dtype=dtype), encoding.displacements(grid).with_weights())
    assert logits.dtype == matrix.dtype == torch.float32
    assert logits.isfinite().all() and matrix.isfinite().all() and weights.isfinite().all() and output.isfinite().all()
    values = torch.linalg.eigvalsh(matrix.double())
    assert (values[:, 0] >= -1e-6 * values[:, 1]).all()
    exact = copy.deepcopy(encoding).double()
    away = grid_of(logits) - exact.center[:, None]
    form = (away @ exact.matrix).square().sum(-1) / 2
    best = (exact.center[:, None] @ exact.matrix).square().sum(-1) / 2
    scale = torch.linalg.matrix_norm(exact.matrix)[:, None] * (20 + exact.center.norm(dim=-1))[:, None]
    # -1/2 |Gamma^T (delta - Delta)|^2 up to the rounding of Gamma^T delta: a flat direction stays flat
    error = (logits.flatten(1) - (best - form)).abs()
    assert (error <= 1e-6 * scale * (1 + form.sqrt() + best.sqrt())).all()


def grid_of(logits):
    """Return the displacements (x, y) of a table, (displacements, 2)."""
    sides = [torch.arange(1 - (side + 1) // 2, (side + 1) // 2) for side in logits.shape[1:]]
    y, x = torch.meshgrid(*sides, indexing="ij")
    return torch.stack([x, y], -1).flatten(0, 1).double()


@in_turn("name", ["sgu", "lrpe", "glrpe", "lrpe_m"])
@in_turn(("old", "new"), [((7, 7), (14, 14)), ((6, 9), (5, 12)), ((8, 8), (4, 4)), ((4, 6), (9, 5))])
def test_a_row_keeps_its_sum_when_what_it_is_made_of_is_resampled(name, old, new):
    """Exactly for constant values, and approximately for values that vary over several patches."""
    old, new = Grid(*old), Grid(*new)
    encoding = BUILDERS[name](old).double().requires_grad_(False)
    for parameter in encoding.parameters():
        parameter.fill_(0.25)
    rows = encoding(old).sum(-1)
    torch.testing.assert_close(encoding(new).sum(-1), rows[:, :1].expand(-1, new.patches), rtol=0, atol=1e-9)
    if name in ("lrpe", "glrpe"):
        y, x = torch.meshgrid(*(torch.linspace(-1, 1, 2 * side - 1) for side in old.shape), indexing="ij")
        encoding.relative_position_table.copy_((1 + (-2 * (y * y + x * x)).exp()).flatten())
    center = encoding(old).sum(-1)[:, old.center]
    moved = copy.deepcopy(encoding)
    moved.set_grid(new)
    for made in (encoding, moved):
        torch.testing.assert_close(made(new).sum(-1)[:, new.center], center, rtol=0.15, atol=0)


def test_parameters_are_those_that_the_paper_counts_or_should():
    grid, count = Grid(14, 14), lambda encoding: sum(p.numel() for p in encoding.parameters())
    assert count(QuadraticMixing(grid, 8)) == 6 * 8
    assert count(DenseMixing(grid)) == 196**2
    # printed: (4 s + 1) N - 4 s sqrt(N) + 4 s, of which N is the bias; by construction it ends in s
    assert count(LearnableMixing(grid, 8)) == 8 * (2 * 14 - 1) ** 2 == 4 * 8 * 196 - 4 * 8 * 14 + 8


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


@in_turn(
    ("build", "said"),
    [
        (lambda: QuadraticMixing(Grid(3, 3), 0), "`groups`"),
        (lambda: QuadraticMixing(Grid(3, 3), 2, "sigma"), "`form`"),
        (lambda: QuadraticMixing(Grid(3, 3), 2, start="zero"), "`start`"),
        (lambda: LearnableMixing(Grid(3, 3, prefix=1)), "`grid`"),
    ],
)
def test_invalid_arguments_are_refused(build, said):
    with pytest.raises(ValueError, match=said):
        build()


def test_lrpe_m_has_a_table_for_each_group_if_told():
    grid = Grid(3, 4)
    for options, tables in (("", 1), ("(group_tables=True)", 2)):
        position = build_position(grid, dim=8, depth=1, num_heads=2, encoding=f"lrpe_m{options}")
        (encoding,) = position.encodings
        assert encoding.second.relative_position_table.shape == (tables, 35)
        assert torch.equal(encoding(grid), encoding.first(grid) + encoding.second(grid))


def test_logits_are_the_weights_without_a_softmax():
    grid = Grid(3, 4)
    plain, soft = QuadraticMixing(grid, 2, softmax=False), QuadraticMixing(grid, 2)
    soft.load_state_dict(plain.state_dict())
    assert torch.equal(soft(grid), plain(grid).softmax(-1))
