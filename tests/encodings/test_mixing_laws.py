"""Laws of mixing by displacement: translation, normalization, and width."""

import math

import pytest
import torch
from torch.nn.functional import pad

from graticule.encodings.gqpe import QuadraticMixing
from graticule.encodings.lrpe import LearnableMixing
from graticule.layers.gating import mix_tokens
from graticule.position.displacement import displacement_index
from graticule.position.grid import Grid
from in_turn import in_turn
from tiny import draw_double

GRIDS = [Grid(3, 4), Grid(4, 3), Grid(1, 5), Grid(6, 2), Grid(2, 7)]
FORMS = ["alpha", "gamma", "gamma_gamma_t"]
grids = in_turn("grid", GRIDS)
forms = in_turn("form", FORMS)
roads = in_turn("road", ["matrix", "displacement"])
SHIFTS = [(0, 0), (2, 0), (0, -3), (-1, 2), (2, 3), (-2, -3)]


def mixed(encoding, grid, x, road):
    """Mix tokens x: (B, N, C) by the matrix or by displacement."""
    return mix_tokens(x, encoding(grid) if road == "matrix" else encoding.displacements(grid))


def quadratic(encoding):
    """Return the matrix of each form, (groups, 2, 2), as in Table 6: alpha I, Gamma, Gamma Gamma^T."""
    learned = encoding.matrix.detach()
    if encoding.form == "alpha":
        return torch.stack([alpha * torch.eye(2, dtype=learned.dtype) for alpha in learned])
    return learned if encoding.form == "gamma" else torch.stack([gamma @ gamma.T for gamma in learned])


def set_forms(encoding, matrices):
    """Set the encoding's quadratic forms to `matrices`, (groups, 2, 2), symmetric and positive definite."""
    with torch.no_grad():
        if encoding.form == "alpha":
            encoding.matrix.copy_(matrices[:, 0, 0])
        else:
            encoding.matrix.copy_(matrices if encoding.form == "gamma" else torch.linalg.cholesky(matrices))


def object_and_shifted(grid, inner, shift, channels):
    """Return tokens that are zero outside an inner region of a grid, and the same shifted by (rows, columns)."""
    (top, left), (height, width) = inner, (3, 4)
    content = torch.randn(2, channels, height, width, dtype=torch.float64)
    maps = []
    for dy, dx in ((0, 0), shift):
        above, before = top + dy, left + dx
        maps.append(pad(content, (before, grid.width - width - before, above, grid.height - height - above)))
    return [grid.from_map(features) for features in maps]


def assert_moved(first, second, grid, shift, atol=1e-12):
    """Check that the first map (B, N, C) at p equals the second at p + shift, for all p where both exist."""
    dy, dx = shift
    first, second = first.unflatten(1, grid.shape), second.unflatten(1, grid.shape)
    here = first[:, max(-dy, 0) : grid.height - max(dy, 0), max(-dx, 0) : grid.width - max(dx, 0)]
    there = second[:, max(dy, 0) : grid.height - max(-dy, 0), max(dx, 0) : grid.width - max(-dx, 0)]
    assert here.numel() and here.abs().max() > 1e-3
    torch.testing.assert_close(there, here, rtol=0, atol=atol)


# Equation 5


def equation_5(encoding, grid, g):
    """Compute the weights of a group by explicit sums and exponentials: x is the column, y the row."""
    (a, b), (c, d) = quadratic(encoding)[g].tolist()
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
        torch.testing.assert_close(weights[g], equation_5(encoding, grid, g), rtol=0, atol=1e-12)


def test_a_row_of_three_is_computed_by_hand():
    """Delta = (1, 0), M = 2 I: logits -(j - i - 1)^2, for the first token -1, 0, -1."""
    encoding = QuadraticMixing(Grid(1, 3), 1, "alpha").double().requires_grad_(False)
    encoding.center.copy_(torch.tensor([[1.0, 0.0]]))
    encoding.matrix.fill_(2.0)
    e, f = math.exp(-1), math.exp(-4)
    rows = [[e, 1, e], [f, e, 1], [math.exp(-9), f, e]]
    expected = torch.tensor([[w / sum(row) for w in row] for row in rows], dtype=torch.float64)
    torch.testing.assert_close(encoding(Grid(1, 3))[0], expected, rtol=0, atol=1e-15)


def test_the_first_number_of_a_centre_is_the_column_and_the_second_the_row():
    encoding = QuadraticMixing(Grid(5, 5), 2).requires_grad_(False)
    encoding.center.copy_(torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
    right, below = encoding(Grid(5, 5))[:, Grid(5, 5).center].argmax(-1).tolist()
    assert right == 12 + 2 and below == 12 + 2 * 5


@forms
@roads
def test_what_is_the_same_everywhere_stays_as_it_is(form, road):
    grid = Grid(4, 6)
    x = torch.randn(2, 1, 6, dtype=torch.float64).expand(2, grid.patches, 6)
    torch.testing.assert_close(mixed(draw_double(QuadraticMixing(grid, 3, form)), grid, x, road), x, rtol=0, atol=1e-12)


# Translation


@roads
@in_turn("shift", SHIFTS)
@in_turn("groups", [1, 3])
def test_with_a_table_the_output_moves_with_what_is_seen(road, shift, groups):
    grid = Grid(7, 10)
    encoding = draw_double(LearnableMixing(grid, groups))
    first, second = object_and_shifted(grid, (2, 3), shift, 6)
    assert_moved(mixed(encoding, grid, first, road), mixed(encoding, grid, second, road), grid, shift)


@forms
@roads
@in_turn("shift", SHIFTS)
def test_after_a_softmax_the_output_moves_once_the_normaliser_is_taken_out(form, road, shift):
    grid = Grid(7, 10)
    encoding = draw_double(QuadraticMixing(grid, 3, form))
    normaliser = encoding.logits(grid).flatten(1)[:, displacement_index(grid)].exp().sum(-1)  # (groups, N)
    first, second = (
        (mixed(encoding, grid, x, road).unflatten(-1, (3, -1)) * normaliser.T[..., None]).flatten(-2)
        for x in object_and_shifted(grid, (2, 3), shift, 6)
    )
    assert_moved(first, second, grid, shift, atol=1e-12 * max(normaliser.max().item(), 1))


@forms
def test_after_a_softmax_the_output_itself_does_not_move(form):
    """A row near the edge distributes its weights over fewer tokens."""
    grid = Grid(7, 10)
    encoding = QuadraticMixing(grid, 3, form).double()
    first, second = object_and_shifted(grid, (2, 3), (2, 3), 6)
    with pytest.raises(AssertionError, match="not close"):
        assert_moved(*(mixed(encoding, grid, x, "matrix") for x in (first, second)), grid, (2, 3))


# Groups


@roads
@pytest.mark.parametrize(
    "build", [lambda grid: LearnableMixing(grid, 3), *(lambda grid, f=f: QuadraticMixing(grid, 3, f) for f in FORMS)]
)
def test_groups_do_not_mix_channels(road, build):
    grid = Grid(4, 5)
    encoding, x = draw_double(build(grid)), torch.randn(1, 20, 6, dtype=torch.float64)
    before = mixed(encoding, grid, x, road)
    for channel in range(6):
        changed = x.clone()
        changed[..., channel] += torch.randn(20, dtype=torch.float64)
        moved = (mixed(encoding, grid, changed, road) - before).abs().amax((0, 1))
        assert moved[channel] > 1e-3
        moved[channel] = 0
        assert moved.max() < 1e-12


@forms
@roads
def test_a_group_says_what_it_says_alone(form, road):
    grid = Grid(4, 5)
    encoding = draw_double(QuadraticMixing(grid, 3, form))
    x = torch.randn(2, 20, 6, dtype=torch.float64)
    together = mixed(encoding, grid, x, road)
    for g in range(3):
        alone = QuadraticMixing(grid, 1, form).double()
        alone.load_state_dict({name: value[g : g + 1] for name, value in encoding.state_dict().items()})
        part = slice(2 * g, 2 * g + 2)
        torch.testing.assert_close(mixed(alone, grid, x[..., part], road), together[..., part], rtol=0, atol=1e-12)


# Gradients


@forms
@roads
def test_a_gradient_reaches_centre_and_matrix_of_every_group(form, road):
    grid = Grid(4, 5)
    encoding = draw_double(QuadraticMixing(grid, 4, form))
    x, given = torch.randn(2, 2, 20, 8, dtype=torch.float64)
    mixed(encoding, grid, x, road).mul(given).sum().backward()
    assert encoding.center.grad.shape == (4, 2) and encoding.center.grad.all()
    assert encoding.matrix.grad.shape == encoding.matrix.shape and encoding.matrix.grad.all()


@forms
def test_gradients_of_centre_and_matrix_are_those_of_finite_differences(form):
    grid = Grid(2, 3)
    encoding = draw_double(QuadraticMixing(grid, 2, form))

    def weights(center, matrix):
        return torch.func.functional_call(encoding, {"center": center, "matrix": matrix}, (grid,))

    assert torch.autograd.gradcheck(weights, (encoding.center, encoding.matrix))


@forms
def test_gradients_of_centre_and_matrix_are_the_same_by_displacement(form):
    grid = Grid(4, 5)
    encoding = draw_double(QuadraticMixing(grid, 3, form))
    x, given = torch.randn(2, 2, 20, 6, dtype=torch.float64)
    learned = (encoding.center, encoding.matrix)
    by_matrix, otherwise = (
        torch.autograd.grad(mixed(encoding, grid, x, road), learned, given) for road in ("matrix", "displacement")
    )
    for found, expected in zip(otherwise, by_matrix, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@roads
def test_a_gradient_reaches_every_number_of_a_table(road):
    grid = Grid(3, 4)
    encoding = draw_double(LearnableMixing(grid, 2))
    x, given = torch.randn(2, 2, 12, 4, dtype=torch.float64)
    mixed(encoding, grid, x, road).mul(given).sum().backward()
    assert encoding.relative_position_table.grad.shape == (2, 5 * 7)
    assert encoding.relative_position_table.grad.all()


@forms
@roads
def test_a_centre_that_is_not_learned_gets_no_gradient_and_stays_at_zero(form, road):
    grid = Grid(3, 4)
    encoding = QuadraticMixing(grid, 3, form, shift=False).double()
    before = encoding.matrix.detach().clone()
    optimizer = torch.optim.AdamW(encoding.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        x, given = torch.randn(2, 2, 12, 6, dtype=torch.float64)
        mixed(encoding, grid, x, road).mul(given).sum().backward()
        optimizer.step()
    assert encoding.center.grad is None and not encoding.center.any()
    assert (encoding.matrix - before).unflatten(0, (3, -1)).flatten(1).abs().sum(1).all()
    encoding.reset_parameters()
    assert not encoding.center.any() and not encoding.center.requires_grad


# Maximum and width of a row


def random_forms(groups, least=0.05):
    """Return symmetric matrices of random directions with eigenvalues in [least, least + 2], (groups, 2, 2)."""
    angle, values = 2 * torch.pi * torch.rand(groups, dtype=torch.float64), torch.rand(groups, 2, dtype=torch.float64)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))
    return turn @ torch.diag_embed(least + 2 * values) @ turn.mT


@pytest.mark.parametrize("grid", [Grid(5, 8), Grid(9, 4)], ids=["5x8", "9x4"])
def test_a_row_of_the_positive_form_is_largest_exactly_at_an_integer_centre(grid):
    centers = [(x, y) for y in range(-2, 3) for x in range(-2, 3)]
    encoding = QuadraticMixing(grid, len(centers)).double().requires_grad_(False)
    encoding.center.copy_(torch.tensor(centers))
    set_forms(encoding, random_forms(len(centers)))
    weights = encoding(grid)
    reached = 0
    for g, (x, y) in enumerate(centers):
        for i in range(grid.patches):
            row, column = i // grid.width + y, i % grid.width + x
            if 0 <= row < grid.height and 0 <= column < grid.width:
                assert weights[g, i].argmax() == row * grid.width + column
                assert (weights[g, i] == weights[g, i].max()).sum() == 1
                reached += 1
    assert reached > 10 * len(centers)


def test_a_row_of_the_positive_form_is_largest_at_the_token_nearest_to_the_centre():
    """Nearest in the Euclidean sense if M is a multiple of I, as for a multiple of a rotation."""
    grid = Grid(7, 9)
    encoding = QuadraticMixing(grid, 6).double().requires_grad_(False)
    encoding.center.copy_(3 * torch.rand(6, 2) - 1.5)
    angle = torch.rand(6, dtype=torch.float64)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))
    encoding.matrix.copy_(0.8 * turn)
    weights, place = encoding(grid), grid.coordinates().double().flip(-1)  # (x, y)
    for g in range(6):
        assert torch.equal(weights[g].argmax(-1), torch.cdist(place + encoding.center[g], place).argmin(-1))


def test_a_row_of_the_positive_form_is_largest_at_the_token_nearest_in_the_metric_of_its_matrix():
    grid = Grid(7, 9)
    encoding = draw_double(QuadraticMixing(grid, 6)).requires_grad_(False)
    weights, place = encoding(grid), grid.coordinates().double().flip(-1)
    for g in range(6):
        gamma = encoding.matrix[g]
        distance = torch.cdist((place + encoding.center[g]) @ gamma, place @ gamma)
        assert torch.equal(weights[g].argmax(-1), distance.argmin(-1))


def test_without_a_positive_form_a_row_need_not_be_largest_at_its_centre():
    encoding = QuadraticMixing(Grid(5, 5), 1, "gamma").requires_grad_(False)
    encoding.center.zero_()
    encoding.matrix.copy_(torch.tensor([[[1.0, 0.0], [0.0, -0.5]]]))
    row = encoding(Grid(5, 5))[0, 12].unflatten(0, (5, 5))
    assert row[0, 2] > row[2, 2] and row[4, 2] > row[2, 2]


@forms
def test_smaller_eigenvalues_look_wider_from_every_token(form):
    """The mean distance from Delta in the metric of M falls as M grows: its derivative is minus a variance."""
    grid = Grid(6, 9)
    matrices = torch.eye(2, dtype=torch.float64).expand(4, 2, 2) if form == "alpha" else random_forms(4)
    place = grid.coordinates().double().flip(-1)
    encoding = QuadraticMixing(grid, 4, form).double().requires_grad_(False)
    away = place[None, None] - place[None, :, None] - encoding.center[:, None, None]  # (groups, N, N, 2)
    distance = torch.einsum("gija,gab,gijb->gij", away, matrices, away)
    reach, entropy = [], []
    for scale in (0.1, 0.3, 1.0, 3.0):
        set_forms(encoding, scale * matrices)
        weights = encoding(grid)
        reach.append((weights * distance).sum(-1))
        entropy.append(torch.special.entr(weights).sum(-1))
    for small, large in zip(range(3), range(1, 4), strict=True):
        assert (reach[small] > reach[large]).all() and (entropy[small] > entropy[large]).all()


@in_turn("form", ["gamma", "gamma_gamma_t"])
@in_turn("angle", [0.0, 0.4, 0.8, 1.2, 2.0])
def test_a_row_is_wide_along_the_eigenvector_of_the_smaller_eigenvalue(form, angle):
    """On a grid much wider than both, the covariance of the weights is the inverse of M."""
    grid = Grid(41, 43)
    encoding = QuadraticMixing(grid, 1, form).double().requires_grad_(False)
    encoding.center.zero_()
    u = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    v = torch.tensor([-math.sin(angle), math.cos(angle)], dtype=torch.float64)
    matrix = 0.1 * u.outer(u) + 0.6 * v.outer(v)
    set_forms(encoding, matrix[None])
    weights = encoding(grid)[0, grid.center]
    place = grid.coordinates().double().flip(-1)  # (x, y)
    away = place - place[grid.center]
    covariance = torch.einsum("n,na,nb->ab", weights, away, away)
    torch.testing.assert_close(covariance, matrix.inverse(), rtol=0, atol=1e-6)
    assert u @ covariance @ u > 5 * (v @ covariance @ v)
