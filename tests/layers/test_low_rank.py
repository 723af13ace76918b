"""Laws of a bias in two factors: it equals its table in attention, in sums, in parts, folded and trained."""

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import graticule
from graticule import Grid
from graticule.analysis.position_maps import bias_maps
from graticule.encodings.alibi import Alibi
from graticule.encodings.forms import bias as biases
from graticule.encodings.forms.bias import squared_distance_factors
from graticule.encodings.sandwich import Sandwich
from graticule.layers.attention import Attention, CausalAttention
from graticule.position.bias import LowRank
from graticule.position.layer import LayerPosition
from in_turn import in_turn
from tiny import assert_same, draw, images, tiny

GRID, HEADS, DIM = Grid(3, 5, prefix=1), 3, 12


def random_factors(rank=4, heads=HEADS):
    return LowRank(
        torch.randn(heads, GRID.tokens, rank, dtype=torch.float64),
        torch.randn(1, GRID.tokens, rank, dtype=torch.float64),
    )


@pytest.fixture
def everywhere(monkeypatch):
    """Use factors for every bias that supports them, also on small grids."""
    monkeypatch.setattr(biases, "LOW_RANK_TOKENS", 1)


@in_turn("grid", [GRID, Grid(4, 2), Grid(1, 7, prefix=2)])
def test_the_factors_of_an_encoding_multiply_to_its_table(grid):
    for encoding, rank in ((Sandwich(GRID, HEADS, channels=8), 17), (Alibi(GRID, HEADS, distance="squared"), 4)):
        factors = encoding.double().low_rank(grid)
        assert factors.rank == rank
        assert_same(factors.table(), encoding(grid), 1e-12)
    assert all(Alibi(GRID, 3, distance=name).low_rank(grid) is None for name in ("euclidean", "manhattan"))


@pytest.mark.parametrize("kind", [Attention, CausalAttention])
def test_attention_with_factors_equals_attention_with_the_table_and_so_do_gradients(kind):
    torch.manual_seed(0)
    attention = kind(DIM, HEADS).double()
    x = torch.randn(2, GRID.tokens, DIM, dtype=torch.float64, requires_grad=True)
    factors = LowRank(*(f.requires_grad_() for f in random_factors()))
    wanted = [x, *factors, *attention.parameters()]
    output = torch.randn(2, GRID.tokens, DIM, dtype=torch.float64)
    actual = []
    for bias in (factors, factors.queries @ factors.keys.mT):
        y = attention(x, LayerPosition(bias=bias))
        actual.append([y, *torch.autograd.grad((y * output).sum(), wanted)])
        actual[-1].append(attention.weights(x, LayerPosition(bias=bias)))
    for gradient, expected in zip(*actual, strict=True):
        assert_same(gradient, expected, 1e-12)


def test_large_grids_of_few_channels_get_factors_and_others_a_table():
    def kind(encoding, side):
        grid = Grid(side, side)
        position = graticule.build_position(grid, dim=DIM, depth=2, num_heads=HEADS, encoding=encoding)
        first, second = position(grid)
        assert first.bias is second.bias
        return type(first.bias)

    assert kind("sandwich(channels=6)", 31) is torch.Tensor and kind("sandwich(channels=6)", 32) is LowRank
    assert kind("sandwich(channels=8)", 32) is torch.Tensor


SQUARED = "alibi(distance='squared')"


@in_turn("encoding", ["sandwich(channels=2)", SQUARED, f"{SQUARED} + sandwich(channels=2)"])
def test_a_model_computes_the_same_with_factors_and_folding_keeps_them(encoding, monkeypatch):
    monkeypatch.setattr(biases, "LOW_RANK_TOKENS", 1024)
    model = draw(tiny(encoding)).double().eval()
    x = images().double()
    expected = model(x)
    maps = bias_maps(model).bias
    monkeypatch.setattr(biases, "LOW_RANK_TOKENS", 1)
    assert isinstance(model.position(model.grid)[0].bias, LowRank)
    assert_same(model(x), expected, 1e-12)
    assert_same(torch.tensor(bias_maps(model).bias), torch.tensor(maps), 1e-12)
    folded = graticule.fold(copy.deepcopy(model))
    assert isinstance(folded.position(model.grid)[0].bias, LowRank) and torch.equal(folded(x), model(x))


def test_with_sixteen_bits_attention_uses_the_table_of_factors_that_stay_wide(everywhere):
    model = draw(tiny("sandwich(channels=2)")).eval()
    low = copy.deepcopy(model).bfloat16()
    folded = graticule.fold(copy.deepcopy(model)).bfloat16()
    for model_form in (low, folded):
        bias = model_form.position(model.grid)[0].bias
        assert bias.queries.dtype == bias.keys.dtype == torch.float32
    x = images().bfloat16()
    assert torch.equal(low(x), folded(x))
    attention, tokens = Attention(DIM, HEADS).bfloat16(), torch.randn(2, GRID.tokens, DIM).bfloat16()
    factors = squared_distance_factors(GRID, -torch.rand(HEADS))
    with_table = attention(tokens, LayerPosition(bias=factors.table()))
    assert torch.equal(attention(tokens, LayerPosition(bias=factors)), with_table)
    with torch.autocast("cpu", torch.bfloat16):
        assert factors.table().dtype == torch.float32


def test_attention_with_factors_runs_in_the_fused_kernel():
    attention, x = Attention(DIM, HEADS), torch.randn(2, GRID.tokens, DIM)
    factors = squared_distance_factors(GRID, -torch.rand(HEADS))
    for kind in (attention, CausalAttention(DIM, HEADS)):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.no_grad():  # an error if it cannot
            output = kind(x, LayerPosition(bias=factors))
        torch.testing.assert_close(output, kind(x, LayerPosition(bias=factors.table())))
