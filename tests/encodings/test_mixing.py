"""Weights that mix tokens by their displacement: formulas, translation, normalization, width and resampling."""

import copy
import math
from functools import partial

import pytest
import torch

import graticule
from graticule import Grid, LayerPosition, fold
from graticule.encodings.build import build_position
from graticule.encodings.forms.mixing import MixingPosition
from graticule.encodings.gqpe import QuadraticMixing
from graticule.encodings.lrpe import LearnableMixing, MixingSum
from graticule.encodings.sgu import DenseMixing
from graticule.layers.gating import mix_tokens
from in_turn import in_turn, refusals
from tiny import assert_same, draw, draw_double, gradients

GRIDS = [Grid(3, 4), Grid(1, 5), Grid(6, 2), Grid(5, 5)]
FORMS = ["alpha", "gamma", "gamma_gamma_t"]
RELEASED = ["alpha_released", "gamma_released"]
BUILDERS = {
    "sgu": DenseMixing,
    "lrpe": LearnableMixing,
    "glrpe": lambda grid: LearnableMixing(grid, 3),
    "lrpe_m": lambda grid: MixingSum(DenseMixing(grid), LearnableMixing(grid)),
    **{form: partial(QuadraticMixing, groups=3, form=form) for form in (*FORMS, *RELEASED)},
}
grids = in_turn("grid", GRIDS)
forms = in_turn("form", FORMS)


def fixed(grid, groups=1, form="gamma_gamma_t", **parameters):
    encoding = QuadraticMixing(grid, groups, form).double().requires_grad_(False)
    for name, value in parameters.items():
        getattr(encoding, name).copy_(torch.as_tensor(value))
    return encoding


def equation_5(encoding, grid, g):
    """Compute the weights of a group by explicit sums and exponentials: x is the column, y the row."""
    learned = encoding.matrix.detach()[g]
    matrix = {"alpha": lambda: learned * torch.eye(2).double(), "gamma": lambda: learned}
    matrix = matrix.get(encoding.form, lambda: learned @ learned.T)()
    (a, b), (c, d) = matrix.tolist()
    delta_x, delta_y = encoding.center[g].tolist()
    places = [(column, row) for row in range(grid.height) for column in range(grid.width)]
    rows = []
    for x_i, y_i in places:
        weights = []
        for x_j, y_j in places:
            u, v = x_j - x_i - delta_x, y_j - y_i - delta_y
            weights.append(math.exp(-0.5 * (u * a * u + u * b * v + v * c * u + v * d * v)))
        rows.append([weight / math.fsum(weights) for weight in weights])
    return torch.tensor(rows, dtype=torch.float64)


@grids
@forms
@in_turn("shift", [True, False])
def test_weights_are_equation_5_written_with_loops(grid, form, shift):
    encoding = draw_double(QuadraticMixing(grid, 3, form, shift)).requires_grad_(False)
    weights = encoding(grid)
    for g in range(3):
        assert_same(weights[g], equation_5(encoding, grid, g), 1e-12)


@grids
@in_turn("name", BUILDERS)
def test_weights_have_a_row_per_query_and_depend_on_the_displacement_up_to_a_normalizer(name, grid):
    encoding = draw_double(BUILDERS[name](grid))
    weights = encoding(grid)
    assert weights.shape == (encoding.groups, grid.patches, grid.patches)
    if name in ("sgu", "lrpe_m"):
        return
    index = grid.offset_index().T
    if name not in ("lrpe", "glrpe"):
        assert_same(weights.sum(-1), torch.ones_like(weights[..., 0]), 1e-12)
        assert (weights >= 0).all()
        weights = weights * encoding.logits(grid).flatten(1)[:, index].exp().sum(-1, keepdim=True)
    for row in range(int(index.max()) + 1):
        same = weights[:, index == row]
        torch.testing.assert_close(same, same[:, :1].expand_as(same), rtol=1e-11, atol=1e-12)


def test_the_released_forms_differ_from_the_printed_ones_as_documented():
    grid, turn = Grid(5, 5), torch.tensor([[0.0, 0.4], [-0.4, 0.0]], dtype=torch.float64)
    center = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    plain = fixed(grid, 1, "gamma", center=center, matrix=torch.eye(2)[None])(grid)
    turned = {
        form: fixed(grid, 1, form, center=center, matrix=torch.eye(2) + turn)(grid)
        for form in ("gamma", "gamma_released")
    }
    assert_same(turned["gamma"], plain, 1e-12)
    # the antisymmetric part moves the center
    moved = fixed(grid, 1, "gamma", center=center + turn @ center[0], matrix=torch.eye(2)[None])(grid)
    assert_same(turned["gamma_released"], moved, 1e-12)
    assert not torch.allclose(turned["gamma_released"], plain)
    # alpha scales the center alone
    released = fixed(grid, 1, "alpha_released", matrix=[2.0], center=[[0.25, -0.5]])
    assert_same(released(grid), fixed(grid, 1, "alpha", matrix=[1.0], center=[[1.0, -2.0]])(grid), 1e-12)
    assert torch.equal(released.quadratic(), torch.eye(2, dtype=torch.float64)[None])


@forms
def test_gradients_of_center_and_matrix_are_those_of_finite_differences_and_reach_every_group(form):
    grid = Grid(2, 3)
    encoding = draw_double(QuadraticMixing(grid, 2, form))

    def weights(center, matrix):
        return torch.func.functional_call(encoding, {"center": center, "matrix": matrix}, (grid,))

    assert torch.autograd.gradcheck(weights, (encoding.center, encoding.matrix))
    table = draw_double(LearnableMixing(grid, 2))
    for mixing in (encoding, table):
        x, gradient = torch.randn(2, 2, 6, 8, dtype=torch.float64)
        mix_tokens(x, mixing(grid)).mul(gradient).sum().backward()
        assert all(parameter.grad.all() for parameter in mixing.parameters())


@forms
def test_a_center_that_is_not_learned_gets_no_gradient_and_stays_at_zero(form):
    grid = Grid(3, 4)
    encoding = QuadraticMixing(grid, 3, form, shift=False).double()
    optimizer = torch.optim.AdamW(encoding.parameters(), lr=0.1, weight_decay=0.1)
    encoding(grid).square().sum().backward()
    optimizer.step()
    encoding.reset_parameters()
    assert encoding.center.grad is None and not encoding.center.any() and not encoding.center.requires_grad


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
    assert not QuadraticMixing(grid, start="spread").center.any()
    assert not QuadraticMixing(grid, 8, shift=False, start="spread").center.any()


@in_turn("groups", [None, 3])
def test_dense_matrices_can_start_as_the_gaussians_with_which_gqpe_starts(groups):
    grid = Grid(4, 5)
    weights = DenseMixing(grid, groups=groups, gaussian=True)(grid)
    expected = (-grid.offsets().float().square().sum(-1) / 2).softmax(-1)  # one patch wide
    assert_same(weights, expected.expand_as(weights), 0.05)
    assert (weights - QuadraticMixing(grid, groups or 1)(grid)).abs().max() < 0.05  # both with noise of 0.01
    posmlp = graticule.create_model("posmlp_nano_32", encoding="gsgu(gaussian=True)", gate_norm=False, img_size=32)
    biases = [value for name, value in posmlp.named_parameters() if ".biases." in name]
    assert biases and not any(bias.any() for bias in biases)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_every_group_stays_positive_semidefinite_and_finite_with_fewer_digits(dtype, autocast):
    """Parameters of many magnitudes, some nearly singular; float16 overflows if it squares them."""
    grid, groups = Grid(14, 14), 60
    angle = torch.linspace(0, torch.pi, groups)
    along, across = torch.stack([angle.cos(), angle.sin()], -1), torch.stack([-angle.sin(), angle.cos()], -1)
    size = torch.logspace(-3, 3, groups)[:, None]
    encoding = fixed(
        grid, groups, matrix=torch.stack([along * size, across * 1e-3], -1), center=3 * torch.randn(groups, 2)
    )
    encoding = encoding.float() if autocast else encoding.to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        logits, matrix, weights = encoding.logits(grid), encoding.quadratic(), encoding(grid)
        output = mix_tokens(torch.randn(2, 196, groups, dtype=dtype), encoding.displacements(grid).with_weights())
    assert logits.dtype == matrix.dtype == torch.float32
    assert logits.isfinite().all() and matrix.isfinite().all() and weights.isfinite().all() and output.isfinite().all()
    values = torch.linalg.eigvalsh(matrix.double())
    assert (values[:, 0] >= -1e-6 * values[:, 1]).all()
    exact = copy.deepcopy(encoding).double()
    away = grid.unique_offsets().double().flatten(0, 1).flip(-1) - exact.center[:, None]
    form = (away @ exact.matrix).square().sum(-1) / 2
    best = (exact.center[:, None] @ exact.matrix).square().sum(-1) / 2
    scale = torch.linalg.matrix_norm(exact.matrix)[:, None] * (20 + exact.center.norm(dim=-1))[:, None]
    # -1/2 |Gamma^T (delta - Delta)|^2 up to the rounding of Gamma^T delta: a flat direction stays flat
    error = (logits.flatten(1) - (best - form)).abs()
    assert (error <= 1e-6 * scale * (1 + form.sqrt() + best.sqrt())).all()


def test_a_row_far_from_its_center_is_still_a_distribution():
    weights = fixed(Grid(4, 4), 1, center=[[1000.0, 1000.0]]).float()(Grid(4, 4))
    assert torch.isfinite(weights).all() and (weights.sum(-1) - 1).abs().max() < 1e-6


@in_turn("name", ["sgu", "lrpe", "glrpe", "lrpe_m"])
@in_turn(("old", "new"), [((7, 7), (14, 14)), ((6, 9), (5, 12)), ((8, 8), (4, 4)), ((4, 6), (9, 5))])
def test_a_row_keeps_its_sum_when_what_it_is_made_of_is_resampled(name, old, new):
    """Exactly for constant values, and approximately for values that vary over several patches."""
    old, new = Grid(*old), Grid(*new)
    encoding = BUILDERS[name](old).double().requires_grad_(False)
    for parameter in encoding.parameters():
        parameter.fill_(0.25)
    rows = encoding(old).sum(-1)
    assert_same(encoding(new).sum(-1), rows[:, :1].expand(-1, new.patches), 1e-9)
    if name in ("lrpe", "glrpe"):
        y, x = torch.meshgrid(*(torch.linspace(-1, 1, 2 * side - 1) for side in old.shape), indexing="ij")
        encoding.relative_position_table.copy_((1 + (-2 * (y * y + x * x)).exp()).flatten())
    center = encoding(old).sum(-1)[:, old.center]
    moved = copy.deepcopy(encoding)
    moved.set_grid(new)
    for made in (encoding, moved):
        torch.testing.assert_close(made(new).sum(-1)[:, new.center], center, rtol=0.15, atol=0)


def test_lrpe_m_has_one_table_or_one_for_each_group():
    grid = Grid(3, 4)
    for options, tables in (("", 1), ("(group_tables=True)", 2)):
        position = build_position(grid, dim=8, depth=1, num_heads=2, encoding=f"lrpe_m{options}")
        (encoding,) = position.encodings
        assert encoding.second.relative_position_table.shape == (tables, 35)
        assert torch.equal(encoding(grid), encoding.first(grid) + encoding.second(grid))


test_invalid_arguments_are_refused = refusals(
    (lambda: QuadraticMixing(Grid(3, 3), 0), "`groups`"),
    (lambda: QuadraticMixing(Grid(3, 3), 2, "sigma"), "`form`"),
    (lambda: QuadraticMixing(Grid(3, 3), 2, start="zero"), "`start`"),
    (lambda: LearnableMixing(Grid(3, 3, prefix=1)), "`grid`"),
    (lambda: MixingPosition([]), "`encodings` must be one per layer, got none"),
    (
        lambda: LayerPosition(mixing=LearnableMixing(Grid(3, 4)).displacements(Grid(3, 4))).merge(
            LayerPosition(mixing=torch.zeros(1, 12, 12))
        ),
        "`mixing` must be given by one encoding at most",
    ),
)


@in_turn("encoding", BUILDERS)
def test_no_index_of_all_pairs_is_held_or_made(encoding, monkeypatch):
    """An index of 1,024 patches takes 8 MB, and longer to compute than the weights."""
    made = MixingPosition([BUILDERS[encoding](Grid(4, 5)) for _ in range(2)])
    assert not list(made.buffers())
    with monkeypatch.context() as patch:
        patch.setattr(Grid, "offsets", None)
        patch.setattr(Grid, "offset_index", None)
        assert len(made(Grid(4, 5))) == len(made(Grid(5, 6))) == 2


GMLP = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 16, "num_blocks": 1, "groups": 4, "num_classes": 5}


@pytest.mark.parametrize("encoding", [pytest.param("lrpe", marks=pytest.mark.slow), "ggqpe", "global_filter"])
def test_a_whole_model_is_one_graph_with_the_same_gradients_and_is_exported(encoding):
    model = draw(graticule.create_model("gmlp_s16_224", encoding=encoding, **GMLP)).double().eval()
    x = torch.randn(2, 3, *model.img_size, dtype=torch.float64)
    model(x).square().sum().backward()
    eager = {key: gradient.clone() for key, gradient in gradients(model).items()}
    model.zero_grad()
    output = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert_same(output, model(x), 1e-12)
    output.square().sum().backward()
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, eager[key], rtol=1e-10, atol=1e-10, msg=key)
    for exported in (model, fold(model)):
        program = torch.export.export(exported, (x,)).module()
        assert_same(program(x), exported(x), 1e-12)
