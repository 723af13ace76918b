"""Laws of the biases that are made to extrapolate: FIRE, KERPLE and Sandwich."""

import math

import pytest
import torch

from graticule import Grid
from graticule.encodings.alibi import Kerple
from graticule.encodings.fire import Fire
from graticule.encodings.sandwich import Sandwich
from graticule.encodings.sinusoidal import Sinusoidal1d
from in_turn import in_turn

HEADS = 3
BUILT = Grid(3, 5, prefix=2)
GRIDS = [BUILT, Grid(4, 2, prefix=1), Grid(1, 6), Grid(6, 7)]
KINDS = {
    "fire": lambda grid: Fire(grid, HEADS),
    "fire, axes": lambda grid: Fire(grid, HEADS, form="axes"),
    "kerple, log": lambda grid: Kerple(grid, HEADS),
    "kerple, power": lambda grid: Kerple(grid, HEADS, kernel="power"),
    "sandwich": lambda grid: Sandwich(grid, HEADS, channels=8),
}
#: Biases that are never positive.
DECAYING = [name for name in KINDS if not name.startswith("fire")]
#: Biases that are equal in both directions and on both axes.
ISOTROPIC = [name for name in KINDS if "axes" not in name]
every = in_turn("name", KINDS)


def built(name, grid=BUILT):
    torch.manual_seed(0)
    return KINDS[name](grid).double()


@every
@in_turn("grid", GRIDS)
def test_the_bias_of_two_patches_depends_on_their_displacement_and_prefix_tokens_get_none(name, grid):
    bias = built(name)(grid)
    assert bias.shape == (HEADS, grid.tokens, grid.tokens) and bias.isfinite().all()
    assert not bias[:, : grid.prefix].any() and not bias[..., : grid.prefix].any()
    patches = bias[:, grid.prefix :, grid.prefix :].reshape(HEADS, *grid.shape, *grid.shape)
    for moved, there in (
        (patches[:, 1:, :, 1:], patches[:, :-1, :, :-1]),
        (patches[:, :, 1:, :, 1:], patches[:, :, :-1, :, :-1]),
    ):
        torch.testing.assert_close(moved, there, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ISOTROPIC)
def test_the_bias_is_symmetric_and_that_of_the_transposed_grid_is_the_transposed_one(name):
    encoding, grid = built(name), Grid(3, 5)
    bias = encoding(grid)
    torch.testing.assert_close(bias, bias.mT, rtol=0, atol=1e-12)
    turned = encoding(Grid(5, 3)).reshape(HEADS, 5, 3, 5, 3).permute(0, 2, 1, 4, 3).reshape(HEADS, 15, 15)
    torch.testing.assert_close(turned, bias, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", DECAYING)
def test_the_bias_is_zero_at_distance_zero_and_nowhere_positive(name):
    bias = built(name)(Grid(6, 7))
    assert bias.diagonal(dim1=1, dim2=2).abs().max() <= 1e-12
    assert bias.max() <= 1e-12


@pytest.mark.parametrize("name", [name for name in DECAYING if name != "sandwich"])
def test_the_bias_falls_with_the_distance_along_a_diagonal(name):
    along = built(name)(Grid(6, 6)).reshape(HEADS, 6, 6, 6, 6)[:, 0, 0].diagonal(dim1=1, dim2=2)
    assert (along.diff(dim=-1) < 0).all()


@every
def test_another_grid_is_computed_and_set_grid_changes_no_value(name):
    encoding, other = built(name), Grid(6, 7)
    asked = encoding(other)
    encoding.set_grid(other)
    assert torch.equal(encoding(other), asked) and encoding.grid == other and "Grid(6, 7" in repr(encoding)


@every
@pytest.mark.parametrize("grid", [Grid(3, 5), Grid(1, 1), Grid(1, 4)], ids=str)
def test_gradients_are_finite_from_the_initial_values_on(name, grid):
    encoding = built(name, grid)
    bias = encoding(grid)
    if bias.requires_grad:
        bias.square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in encoding.parameters())


def test_kerple_by_hand():
    grid = Grid(2, 2)
    log, power = Kerple(grid, 1).double(), Kerple(grid, 1, kernel="power").double()
    with torch.no_grad():
        for encoding in (log, power):
            encoding.raw_r1.fill_(math.log(2))
        log.raw_r2.fill_(math.log(3))
        power.raw_r2.fill_(0)  # a power of 1
    for to, distance in ((0, 0), (1, 1), (2, 1), (3, math.sqrt(2))):
        assert log(grid)[0, 0, to].item() == pytest.approx(-2 * math.log(1 + 3 * distance), abs=1e-14)
        assert power(grid)[0, 0, to].item() == pytest.approx(-2 * distance, abs=1e-14)


def test_kerples_numbers_start_in_the_ranges_of_its_code():
    torch.manual_seed(0)
    for kernel, largest in (("log", (2, 1)), ("power", (1, 2))):
        for rate, most in zip(Kerple(Grid(2, 2), 4096, kernel=kernel).rates(), largest, strict=True):
            assert 0.0099 < rate.min() < 0.02 and most - 0.02 < rate.max() <= most
            assert rate.mean().item() == pytest.approx(most / 2, abs=0.05)


@pytest.mark.parametrize("kernel", ["log", "power"])
def test_kerples_kernels_are_conditionally_positive_definite_on_the_plane(kernel):
    grid = Grid(5, 6)
    torch.manual_seed(0)
    for bias in Kerple(grid, 8, kernel=kernel).double()(grid):
        centered = bias - bias.mean(0) - bias.mean(1, keepdim=True) + bias.mean()
        assert torch.linalg.eigvalsh(centered).min() > -1e-10


@pytest.mark.parametrize("grid", [Grid(3, 5), Grid(1, 7)], ids=str)
def test_sandwich_is_the_inner_product_of_sinusoidal_encodings(grid):
    heads, channels = 4, 8
    bias = Sandwich(grid, heads, channels, temperature=100.0).double()(grid)
    for i, p in enumerate(grid.coordinates().tolist()):
        for j, q in enumerate(grid.coordinates().tolist()):
            total = sum(
                math.cos(float(torch.tensor(100.0 ** (-2 * k / channels))) * (a - b)) - 1
                for k in range(1, channels // 2 + 1)
                for a, b in zip(p, q, strict=True)
            )
            assert bias[:, i, j].tolist() == pytest.approx([total * heads / (8 * h) for h in (1, 2, 3, 4)], abs=1e-6)


def test_sandwich_on_a_row_is_the_product_of_the_table_of_a_transformer_up_to_the_index_of_the_first_wave():
    # the published waves start at k = 1, those of the table at k = 0
    grid = Grid(1, 9)
    table = Sinusoidal1d(grid, 16)(grid).double()
    shifted = Sandwich(grid, 1, channels=16).double()
    with torch.no_grad():
        shifted.omega.mul_(10_000 ** (2 / 16))
    product = table @ table.T
    torch.testing.assert_close(8 * shifted(grid)[0], product - product.diagonal(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("grid", [BUILT, Grid(9, 8)], ids=["as built", "larger than the threshold"])
def test_fire_is_its_formula(grid):
    encoding = built("fire")
    with torch.no_grad():
        encoding.log_scale.fill_(math.log(0.7))
        encoding.log_threshold.fill_(math.log(1.25))
    threshold = 1.25 * math.hypot(2, 4)
    largest = max(threshold, math.hypot(grid.height - 1, grid.width - 1))
    distance = torch.cdist(grid.coordinates().double(), grid.coordinates().double())
    share = torch.log(1 + 0.7 * distance) / math.log(1 + 0.7 * largest)
    first, _, second = encoding.mlp
    hidden = (share[..., None] @ first.weight.T + first.bias).relu()
    expected = (hidden @ second.weight.T + second.bias).permute(2, 0, 1)
    torch.testing.assert_close(encoding(grid)[:, grid.prefix :, grid.prefix :], expected, rtol=0, atol=1e-12)


def test_fire_never_sees_a_share_beyond_one_and_on_larger_grids_the_threshold_does_not_matter():
    encoding, seen = built("fire, axes"), []
    encoding.mlp.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    for grid in (BUILT, Grid(40, 3)):
        encoding(grid)
        assert seen[-1].abs().max() <= 1 + 1e-12
    far = encoding(Grid(40, 50))
    with torch.no_grad():
        encoding.log_threshold.sub_(1)
    torch.testing.assert_close(encoding(Grid(40, 50)), far, rtol=0, atol=1e-12)


def test_fire_of_a_text_normalizes_by_the_position_of_the_query_as_in_the_paper():
    grid = Grid(8)
    torch.manual_seed(0)
    encoding = Fire(grid, HEADS, causal=True).double()
    bias = encoding(grid)
    with torch.no_grad():
        encoding.log_threshold.fill_(math.log(3 / 7))  # L = 3
    bias = encoding(grid)
    for i in range(8):
        for j in range(i + 1):
            share = math.log(1 + 0.1 * (i - j)) / math.log(1 + 0.1 * max(3, i))
            expected = encoding.mlp(torch.tensor([share], dtype=torch.float64))
            torch.testing.assert_close(bias[:, i, j], expected, rtol=0, atol=1e-6)  # 0.1 is stored in float32


def test_the_first_tokens_of_a_text_do_not_depend_on_its_length():
    for name in KINDS:
        if not name.startswith("fire"):
            encoding = built(name, Grid(8))
            whole, short = encoding(Grid(8)), encoding(Grid(5))
            torch.testing.assert_close(whole[:, :5, :5], short, rtol=0, atol=1e-12, msg=name)


def test_what_is_refused():
    for build, message in (
        (lambda: Sandwich(BUILT, 2, channels=3), "`channels` must be a multiple of 2 .*, got 3"),
        (lambda: Sandwich(BUILT, 2, channels=0), "`channels` must be at least 1, got 0"),
        (lambda: Fire(BUILT, 2, form="axis"), "`form` must be one of"),
        (lambda: Kerple(BUILT, 2, kernel="linear"), "`kernel` must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            build()
