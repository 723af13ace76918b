"""Laws of the rotary encoding of a sequence."""

import copy
import math

import pytest
import torch
from timm.layers import apply_rot_embed_cat

from graticule import Grid
from graticule.encodings.rope import Rope1d
from in_turn import in_turn

GRIDS = [Grid(1, 6), Grid(3, 4), Grid(1, 5, prefix=1), Grid(2, 3, prefix=2)]
HEAD_DIM = 6


def naive(grid, head_dim=HEAD_DIM, temperature=10_000.0):
    """Return sines, then cosines, each for both channels of a pair, of the position in the sequence."""
    rows = []
    for token in range(grid.tokens):
        place = token - grid.prefix if token >= grid.prefix else 0
        angles = [place * temperature ** (-2 * (channel // 2) / head_dim) for channel in range(head_dim)]
        rows.append([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
    return torch.tensor(rows, dtype=torch.float64)


@in_turn("temperature", [10_000.0, 50.0])
@in_turn("grid", GRIDS)
def test_the_angles_are_those_of_the_formula(grid, temperature):
    table = Rope1d(grid, HEAD_DIM, temperature).double()(grid)
    assert table.shape == (grid.tokens, 2 * HEAD_DIM)
    torch.testing.assert_close(table, naive(grid, HEAD_DIM, temperature), rtol=0, atol=1e-14)


@pytest.mark.parametrize("grid", [Grid(1, 9), Grid(3, 3)], ids=str)
def test_the_logits_depend_on_the_distance_in_the_sequence_alone(grid):
    table = Rope1d(grid, HEAD_DIM, 20.0).double()(grid)
    q, k = torch.randn(2, 1, HEAD_DIM, dtype=torch.float64)
    turned = [apply_rot_embed_cat(t.expand(grid.tokens, -1), table) for t in (q, k)]
    logits = turned[0] @ turned[1].T
    for offset in range(-8, 9):
        diagonal = logits.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-12)
    assert logits[0].std() > 0.1


def test_a_pair_is_rotated_as_a_complex_number_is_multiplied():
    grid = Grid(1, 5)
    x = torch.randn(5, HEAD_DIM, dtype=torch.float64)
    turned = apply_rot_embed_cat(x, Rope1d(grid, HEAD_DIM).double()(grid))
    speed = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    factor = torch.polar(torch.ones(5, 3, dtype=torch.float64), torch.arange(5.0, dtype=torch.float64)[:, None] * speed)
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * factor).flatten(1)
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-13)


def test_a_longer_sequence_begins_with_the_shorter_and_is_computed():
    encoding = Rope1d(Grid(1, 4), HEAD_DIM)
    longer = encoding(Grid(1, 40))
    assert torch.equal(longer[:4], encoding(Grid(1, 4)))
    encoding.set_grid(Grid(1, 40))
    assert torch.equal(encoding(Grid(1, 40)), longer)
    assert torch.equal(Rope1d(Grid(1, 40), HEAD_DIM)(Grid(1, 40)), longer)
    assert not list(encoding.parameters()) and not encoding.state_dict()
    assert "Grid(1, 40" in repr(encoding)


def test_with_fewer_digits_it_keeps_float32_and_copies_are_their_own():
    encoding = Rope1d(Grid(1, 400), HEAD_DIM)
    other = copy.deepcopy(encoding).bfloat16()
    assert other(Grid(1, 400)).dtype == torch.float32
    assert torch.equal(other(Grid(1, 400)), encoding(Grid(1, 400)))
    assert encoding.double()(Grid(1, 400)).dtype == torch.float64


@in_turn("head_dim", [0, 1, 7])
def test_channels_that_are_no_pairs_are_refused(head_dim):
    with pytest.raises(ValueError, match=f"`head_dim` must be a multiple of 2 .*got {head_dim}"):
        Rope1d(Grid(1, 4), head_dim)
