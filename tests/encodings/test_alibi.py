"""Laws of ALiBi: the slopes of its paper and code, the distance in one dimension and two."""

import math

import pytest
import torch

from graticule import Crop, Grid
from graticule.encodings.alibi import Alibi, default_slopes
from graticule.encodings.forms import bias as layer_bias
from graticule.position.bias import LowRank
from graticule.surgery.fold import fold
from in_turn import in_turn
from tiny import draw, images, tiny

BUILT, OTHER = Grid(3, 5, prefix=1), Grid(4, 2, prefix=1)
#: Distances of two patches, row and column apart.
DISTANCES = {
    "euclidean": math.hypot,
    "manhattan": lambda dy, dx: abs(dy) + abs(dx),
    "squared": lambda dy, dx: dy**2 + dx**2,
}


@in_turn("distance", ["euclidean", "squared", "axes"])
def test_given_slopes_replace_those_of_the_formula(distance):
    default, doubled = (Alibi(BUILT, 2, distance, slopes).double() for slopes in (None, [0.5, 0.25]))
    formula = torch.tensor([1 / 256] * 2 if distance == "axes" else [1 / 16, 1 / 256], dtype=torch.float64)
    expected = default(OTHER) * (torch.tensor([0.5, 0.25], dtype=torch.float64) / formula)[:, None, None]
    torch.testing.assert_close(doubled(OTHER), expected, rtol=1e-12, atol=0)


def test_learned_slopes_start_at_the_formula_and_stay_positive():
    bias = Alibi(BUILT, 3, slopes="learned").double()
    torch.testing.assert_close(bias(OTHER), Alibi(BUILT, 3).double()(OTHER), rtol=1e-6, atol=0)
    bias(OTHER).sum().backward()
    torch.testing.assert_close(bias.log_slopes.grad, bias(OTHER).sum((1, 2)).detach())  # d exp(s) / ds = exp(s)
    with torch.no_grad():
        bias.log_slopes.sub_(100)
    assert (bias.slopes > 0).all()


def test_slopes_are_one_per_head_and_not_negative():
    with pytest.raises(ValueError, match="`slopes` must be one per head, 3, got 2"):
        Alibi(BUILT, 3, slopes=[0.5, 0.25])
    with pytest.raises(ValueError, match="`slopes` must be at least 0, got"):
        Alibi(BUILT, 2, slopes=[0.5, -0.25])


def test_eight_heads_halve_the_slope_from_a_half_on():
    assert default_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


def test_twelve_heads_have_the_eight_and_every_other_one_of_sixteen():
    sixteen = [2 ** (-h / 2) for h in range(1, 17)]
    assert default_slopes(12) == pytest.approx([*default_slopes(8), *sixteen[0:8:2]], abs=1e-15)
    assert default_slopes(12)[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5], abs=1e-15)


@in_turn("heads", [1, 2, 4, 16, 32])
def test_a_power_of_two_is_a_geometric_sequence_that_ends_at_one_256th(heads):
    ratio = 2 ** (-8 / heads)
    assert default_slopes(heads) == pytest.approx([ratio**h for h in range(1, heads + 1)], rel=1e-12)
    assert default_slopes(heads)[-1] == pytest.approx(1 / 256)


@in_turn("heads", [3, 5, 6, 7, 9, 12, 20, 24])
def test_other_numbers_of_heads_follow_the_recursion_of_the_code(heads):
    below = 1 << (heads.bit_length() - 1)
    assert default_slopes(heads) == pytest.approx(
        default_slopes(below) + default_slopes(2 * below)[::2][: heads - below], rel=1e-12
    )
    assert len(set(default_slopes(heads))) == heads


def test_a_text_loses_the_slope_times_the_number_of_tokens_between():
    bias = Alibi(Grid(1, 6), 8).double()(Grid(1, 6))
    for head in range(8):
        for i in range(6):
            for j in range(6):
                assert bias[head, i, j] == -abs(i - j) / 2 ** (head + 1)


def of_pairs(grid, slopes, distances):
    """Return -slope * distance of every head and pair of patches, and zeros for prefix tokens, by hand."""
    place, prefix = grid.coordinates().tolist(), grid.prefix
    bias = torch.zeros(len(slopes), grid.tokens, grid.tokens, dtype=torch.float64)
    for head, (slope, distance) in enumerate(zip(slopes, distances, strict=True)):
        for i, (y, x) in enumerate(place):
            for j, (v, u) in enumerate(place):
                bias[head, prefix + i, prefix + j] = -slope * distance(y - v, x - u)
    return bias


@in_turn("grid", [BUILT, OTHER, Grid(1, 7), Grid(3, 4, prefix=2)])
def test_the_bias_is_the_slope_times_the_distance_and_prefix_tokens_are_left_out(grid):
    for name, distance in DISTANCES.items():
        bias = Alibi(BUILT, 3, distance=name).double()(grid)
        expected = of_pairs(grid, default_slopes(3), [distance] * 3)
        torch.testing.assert_close(bias, expected, rtol=1e-6, atol=0, msg=name)  # slopes are stored in float32
    rows, columns = lambda dy, dx: abs(dy), lambda dy, dx: abs(dx)
    bias = Alibi(BUILT, 3, distance="axes").double()(grid)
    expected = of_pairs(grid, [*default_slopes(2), *default_slopes(1)], [rows, rows, columns])
    torch.testing.assert_close(bias, expected, rtol=1e-6, atol=0)


def test_patches_of_twice_the_size_are_twice_as_far_apart():
    bias = Alibi(BUILT, 3)
    large = Grid(3, 4, prefix=1, crop=Crop((6, 8), (0, 0, 6, 8)))
    torch.testing.assert_close(bias(large), 2 * bias(Grid(3, 4, prefix=1)))


@pytest.mark.parametrize("distance", [*DISTANCES, "axes"])
def test_nothing_is_learned_or_saved(distance):
    encoding = Alibi(BUILT, 3, distance=distance)
    assert not list(encoding.parameters()) and not encoding.state_dict()


@pytest.mark.parametrize("grid", [BUILT, OTHER, Grid(1, 7, prefix=2)], ids=str)
def test_squared_distances_alone_have_four_factors(grid):
    squared = Alibi(BUILT, 3, distance="squared").double()
    factors = squared.low_rank(grid)
    assert factors.rank == 4
    torch.testing.assert_close(factors.table(), squared(grid), rtol=0, atol=1e-12)
    assert all(Alibi(BUILT, 3, distance=d).low_rank(grid) is None for d in ("euclidean", "manhattan", "axes"))


@pytest.mark.parametrize("encoding", ["alibi(distance='squared')", "alibi(distance='squared') + sandwich(channels=2)"])
def test_a_model_computes_the_same_with_the_factors(encoding, monkeypatch):
    model = draw(tiny(encoding)).double().eval()
    x = images().double()
    expected = model(x)
    monkeypatch.setattr(layer_bias, "LOW_RANK_TOKENS", 1)
    assert isinstance(model.position(model.grid)[0].bias, LowRank)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)
    folded = fold(model)
    assert isinstance(folded.position(model.grid)[0].bias, LowRank)
    torch.testing.assert_close(folded(x), expected, rtol=0, atol=1e-12)


def test_all_layers_share_one_bias_that_folds_into_one_constant():
    model = draw(tiny("alibi")).eval()
    first, *others = model.position(model.grid)
    assert all(other.bias is first.bias for other in others)
    x = images()
    before = model(x)
    fold(model)
    assert [name for name, _ in model.position.named_buffers() if name.startswith("layer")] == ["layer0_bias"]
    assert torch.equal(model(x), before)


def test_other_distances_and_too_few_heads_are_refused():
    for heads, distance, message in (
        (0, "euclidean", "`num_heads` must be at least 1, got 0"),
        (1, "axes", "`num_heads` must be at least 2 where `distance` is 'axes', got 1"),
        (2, "chebyshev", "`distance` must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            Alibi(BUILT, heads, distance=distance)
