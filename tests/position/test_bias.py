"""The forms of a bias: sums, some heads, other tokens; and a new form, which is one class."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from graticule import Grid
from graticule.encodings.forms.bias import squared_distance_factors
from graticule.layers.attention import Attention
from graticule.position.bias import Bias, BiasSum, LowRank
from graticule.position.folded import FoldedPosition
from graticule.position.layer import LayerPosition
from graticule.position.position import Position

GRID, HEADS = Grid(2, 4), 3
N, F64 = GRID.tokens, torch.float64


class Diagonal(NamedTuple("Diagonal", [("values", Tensor)]), Bias):
    """A bias of each token for itself, from values (heads, N)."""

    @property
    def constant(self):
        return self.values.diag_embed()


class Products(NamedTuple("Products", [("scale", Tensor)]), Bias):
    """The products of queries times a learned scale per head, (heads, 1, 1)."""

    @property
    def function(self):
        return lambda queries: self.scale * queries @ queries.mT


def forms():
    """Return a bias of every form, by name; two of them are new."""
    table = torch.randn(HEADS, N, N, dtype=F64)
    return {
        "table": table,
        "factors": squared_distance_factors(GRID, torch.rand(HEADS, dtype=F64)),
        "function": lambda queries: queries @ queries.mT,
        "sum": BiasSum(table, lambda queries: queries @ queries.mT),
        "diagonal": Diagonal(torch.randn(HEADS, N, dtype=F64)),
        "products": Products(torch.randn(HEADS, 1, 1, dtype=F64)),
    }


@pytest.fixture
def queries():
    return torch.randn(2, HEADS, N, 4, dtype=F64)


def values(bias, queries):
    return Bias.of(bias).table(queries).expand(len(queries), -1, -1, -1)


def test_a_layer_holds_a_table_and_a_function_as_they_are():
    for name, bias in forms().items():
        assert Bias.of(bias).as_field is bias, name


def test_the_sum_of_any_two_forms_is_the_sum_of_their_tables(queries):
    for form in forms().values():
        for two in forms().values():
            merged = LayerPosition(bias=form).merge(LayerPosition(bias=two)).bias
            torch.testing.assert_close(values(merged, queries), values(form, queries) + values(two, queries))


def test_two_in_factors_stay_in_factors():
    factors = forms()["factors"]
    both = LayerPosition(bias=factors).merge(LayerPosition(bias=factors)).bias
    assert isinstance(both, LowRank) and both.rank == 2 * factors.rank


def test_tokens_without_a_position_get_no_bias(queries):
    for bias in forms().values():
        full = values(bias, queries)
        ahead = LayerPosition(bias=bias).with_prefix(1).bias
        shifted = values(ahead, torch.cat([queries[:, :, :1], queries], 2))
        assert torch.equal(shifted[..., 1:, 1:], full) and not shifted[..., 0, :].any() and not shifted[..., 0].any()


def test_attention_adds_any_form_to_the_logits_compiled_or_not():
    torch.manual_seed(0)
    attention, x = Attention(12, HEADS).double(), torch.randn(2, N, 12, dtype=F64)
    q, k = (attention.qkv(x).chunk(3, -1)[i].unflatten(-1, (HEADS, -1)).transpose(1, 2) for i in range(2))
    for bias in forms().values():
        position = LayerPosition(bias=bias)
        scaled = q * attention.scale
        expected = (scaled @ k.mT + values(bias, scaled)).softmax(-1)
        torch.testing.assert_close(attention.weights(x, position), expected)
        compiled = torch.compile(attention, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x, position), attention(x, position))


def test_two_factors_have_a_shape_without_values_too():
    factors = torch.empty(1, 3, 4, 2, device="meta")
    assert LowRank(factors, factors).constant.shape == (1, 3, 4, 4)


def test_the_tensors_of_a_new_form_are_folded():
    class Learned(Position):
        def __init__(self):
            super().__init__()
            self.values = torch.nn.Parameter(torch.rand(HEADS, N))

        def forward(self, grid):
            return [LayerPosition(bias=Diagonal(2 * self.values))]

        def set_grid(self, grid):
            pass

    position = Learned()
    folded = FoldedPosition(position, GRID).eval()
    assert [name for name, _ in folded.named_buffers()] == ["layer0_bias_values"]
    (shifted,) = folded(GRID)
    assert isinstance(shifted.bias, Diagonal) and torch.equal(shifted.bias.constant, 2 * position.values.diag_embed())
