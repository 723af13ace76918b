"""A subset of the tokens has the rows of the whole: attention among them is that of all without seeing the others."""

import pytest
import torch

import graticule
from graticule import Grid
from graticule.layers.attention import Attention
from graticule.position.layer import LayerPosition
from graticule.position.tokens import Subset
from tiny import assert_same

GRID, HEADS, DIM = Grid(3, 4, prefix=1), 3, 12
N, F64 = GRID.tokens, torch.float64
INDICES = {"one for all": torch.tensor([0, 7, 2, 11]), "one per sample": torch.tensor([[0, 7, 2, 11], [0, 1, 5, 12]])}
ENCODINGS = [
    *("relative_bias", "shaw", "rope", "rope_mixed", "pope", "liere", "log_n", "sandwich(channels=4)"),
    *("irpe(on='qkv')", "alibi + shaw", "decomposed"),
]


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_attention_of_a_subset_is_that_of_all_tokens_without_the_others(encoding, index):
    torch.manual_seed(0)
    position = graticule.build_position(GRID, dim=DIM, depth=1, num_heads=HEADS, encoding=encoding).double()
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    attention = Attention(DIM, HEADS).double()
    x = torch.randn(2, N, DIM, dtype=F64, requires_grad=True)
    (full,) = position(GRID)
    tokens = Subset(index, N)
    actual = attention(tokens.of(x), full.take(tokens))
    for sample in range(2):
        rows = index if index.ndim == 1 else index[sample]
        hidden = torch.full((HEADS, N, N), -1e300, dtype=F64)
        hidden[:, :, rows] = 0
        expected = attention(x[sample : sample + 1], full.merge(LayerPosition(bias=hidden)))[0, rows]
        assert_same(actual[sample], expected, 1e-10)
        weights = torch.randn_like(expected)
        outputs, other = (
            torch.autograd.grad((y * weights).sum(), [x, *position.parameters()], retain_graph=True, allow_unused=True)
            for y in (actual[sample], expected)
        )
        for output, wanted in zip(outputs, other, strict=True):
            assert (output is None) == (wanted is None)
            if output is not None:
                assert_same(output, wanted, 1e-9)


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_what_is_added_to_a_subset_are_its_rows(index):
    table = torch.randn(N, DIM)
    taken = LayerPosition(added_to_stream=table, after_norm=table, queries_keys=table).take(Subset(index, N))
    assert all(
        torch.equal(tensor, table[index]) for tensor in (taken.added_to_stream, taken.after_norm, taken.queries_keys)
    )


def test_fields_of_the_whole_grid_and_wrong_indices_are_refused():
    tokens = Subset(torch.tensor([0, 1]), N)
    for field in ("map_before", "map_after", "inputs", "positional", "mixing", "spatial_bias"):
        with pytest.raises(ValueError, match=f"`{field}` must be None for a subset of the tokens"):
            LayerPosition(**{field: torch.square}).take(tokens)
    for index, rule in (
        (torch.tensor([1, 1]), "each token at most once"),
        (torch.tensor([0, N]), f"from 0 to {N - 1}, got 0 to {N}"),
        (torch.tensor([-1, 0]), f"from 0 to {N - 1}, got -1 to 0"),
        (torch.tensor([0.0]), "int64"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), "or"),
    ):
        with pytest.raises(ValueError, match=f"`index` must .*{rule}"):
            Subset(index, N)
