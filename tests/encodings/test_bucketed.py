"""Laws of T5's buckets: the formula of the paper's code, its edges in exact arithmetic, one table per axis."""

import math
from fractions import Fraction

import pytest
import torch

import graticule
from graticule import Grid
from graticule.encodings.bucketed import BucketedBias, edges
from in_turn import in_turn

HEADS = 3
TEXT = Grid(1, 9)


def naive_bucket(offset, buckets=32, max_distance=128, causal=False):
    """T5's bucket of key - query, one offset at a time: the largest t with (n / m)^(M - m) >= (L / m)^t, exactly."""
    first = 0
    if not causal:
        buckets //= 2
        first = buckets if offset > 0 else 0
        distance = abs(offset)
    else:
        distance = max(-offset, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    far = Fraction(distance, exact) ** (buckets - exact)
    steps = 0
    while far >= Fraction(max_distance, exact) ** (steps + 1):
        steps += 1
    return first + min(exact + steps, buckets - 1)


def drawn(grid=TEXT, **kwargs):
    encoding = BucketedBias(grid, HEADS, **kwargs).double()
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    return encoding


@in_turn("causal", [False, True])
@in_turn(("buckets", "max_distance"), [(32, 128), (16, 20), (8, 64), (4, 5)])
def test_the_buckets_are_those_of_the_formula(causal, buckets, max_distance):
    encoding = BucketedBias(TEXT, HEADS, buckets, max_distance, causal)
    offsets = list(range(-200, 201))
    expected = [naive_bucket(offset, buckets, max_distance, causal) for offset in offsets]
    assert encoding.bucket(torch.tensor(offsets)).tolist() == expected


def test_a_few_buckets_by_hand():
    both, past = BucketedBias(TEXT, HEADS), BucketedBias(TEXT, HEADS, causal=True)
    # 16 per side, 8 exact; from 8 on they are 8 + floor(8 ln(n / 8) / ln 16), one more for every factor of 2^0.5
    distances = torch.tensor([0, 1, 7, 8, 11, 12, 15, 16, 23, 32, 64, 90, 91, 127, 128, 1000])
    expected = [0, 1, 7, 8, 8, 9, 9, 10, 11, 12, 14, 14, 15, 15, 15, 15]
    assert both.bucket(-distances).tolist() == expected
    assert both.bucket(distances).tolist() == [0, *(16 + b for b in expected[1:])]
    # all 32 for the past, 16 of them exact; then 16 + floor(16 ln(n / 16) / ln 8)
    distances = torch.tensor([0, 15, 16, 18, 19, 32, 64, 112, 113, 127, 1000])
    assert past.bucket(-distances).tolist() == [0, 15, 16, 16, 17, 21, 26, 30, 31, 31, 31]
    assert past.bucket(distances).tolist() == [0] * len(distances)


def test_the_edges_are_where_the_logarithm_of_the_code_has_them():
    for buckets, max_distance in ((16, 128), (32, 128), (32, 1000)):
        exact, whole = buckets // 2, edges(buckets, max_distance)
        for distance in range(exact, 2 * max_distance):
            real = math.log(distance / exact) / math.log(max_distance / exact) * (buckets - exact)
            if abs(real - round(real)) > 1e-9:  # at an edge the logarithm may be rounded up or down
                found = sum(edge <= distance for edge in whole)
                assert found == min(exact + math.floor(real), buckets - 1)


@pytest.mark.parametrize("causal", [False, True])
def test_a_text_has_the_number_of_its_bucket(causal):
    encoding = drawn(buckets=8, max_distance=6, causal=causal)
    bias = encoding(TEXT)
    assert bias.shape == (HEADS, 9, 9)
    for i in range(9):
        for j in range(9):
            row = encoding.relative_attention_bias[naive_bucket(j - i, 8, 6, causal)]
            assert torch.equal(bias[:, i, j], row)
    assert [name for name, _ in encoding.named_parameters()] == ["relative_attention_bias"]


@pytest.mark.parametrize("grid", [Grid(3, 5), Grid(3, 5, prefix=1), Grid(4, 2, prefix=2), Grid(1, 6)], ids=str)
def test_in_two_dimensions_it_is_a_sum_of_an_axis_each(grid):
    encoding = drawn(Grid(3, 5, prefix=grid.prefix), buckets=8, max_distance=4)
    bias = encoding(grid)
    assert bias.shape == (HEADS, grid.tokens, grid.tokens)
    place = grid.coordinates().tolist()
    for i, (y, x) in enumerate(place):
        for j, (v, u) in enumerate(place):
            across = encoding.relative_attention_bias[naive_bucket(u - x, 8, 4)]
            down = encoding.relative_attention_bias_y[naive_bucket(v - y, 8, 4)]
            torch.testing.assert_close(bias[:, grid.prefix + i, grid.prefix + j], across + down, rtol=0, atol=1e-14)
    assert not bias[:, : grid.prefix].any() and not bias[:, :, : grid.prefix].any()


def test_a_gradient_reaches_every_bucket_that_has_an_offset():
    encoding = drawn(Grid(1, 200))
    (encoding(Grid(1, 200)) * torch.randn(HEADS, 200, 200)).sum().backward()
    reached = encoding.relative_attention_bias.grad.abs().sum(1) > 0
    assert reached.tolist() == [bucket != 16 for bucket in range(32)]  # distance 0 belongs to the other side
    past = drawn(Grid(1, 200), causal=True)
    (past(Grid(1, 200)) * torch.randn(HEADS, 200, 200)).sum().backward()
    assert (past.relative_attention_bias.grad.abs().sum(1) > 0).all()


def test_a_longer_text_begins_with_the_shorter():
    encoding = drawn(causal=True)
    longer = encoding(Grid(1, 300))
    assert torch.equal(longer[:, :9, :9], encoding(TEXT))
    encoding.set_grid(Grid(1, 300))
    assert torch.equal(encoding(Grid(1, 300)), longer)


def test_all_layers_share_one_table():
    position = graticule.build_position(
        TEXT, dim=12, depth=4, num_heads=3, encoding="bucketed_bias", joining="default(layers=3)"
    )
    given = position(TEXT)
    assert sum(p.numel() for p in position.parameters()) == 32 * 3
    assert given[1].bias is given[0].bias and given[3].bias is None


@in_turn(
    ("grid", "kwargs", "message"),
    [
        (TEXT, {"buckets": 6}, "`buckets` must be a multiple of 4, got 6"),
        (TEXT, {"buckets": 0}, "`buckets` must be a multiple of 4, got 0"),
        (TEXT, {"buckets": 5, "causal": True}, "`buckets` must be a multiple of 2, got 5"),
        (TEXT, {"max_distance": 8}, "`max_distance` must be more than the 8 exact buckets, got 8"),
        (Grid(2, 3), {"causal": True}, "`grid` must have height 1"),
    ],
)
def test_invalid_arguments_are_refused(grid, kwargs, message):
    with pytest.raises(ValueError, match=message):
        BucketedBias(grid, HEADS, **kwargs)


def test_one_built_for_a_text_refuses_a_grid_of_rows():
    encoding = BucketedBias(TEXT, HEADS)
    for act in (encoding, encoding.set_grid):
        with pytest.raises(ValueError, match=r"`grid` must have height 1, .* got 2 x 3"):
            act(Grid(2, 3))
