"""Causal attention: no token attends to later ones, with and without a bias, at once and token by token."""

import pytest
import torch
from torch import nn

from graticule import LayerPosition
from graticule.layers.attention import Attention, CausalAttention, KeyValueCache
from graticule.position.rotation import PairRotation
from in_turn import in_turn
from tiny import assert_same

B, N, D, HEADS = 2, 7, 24, 3
F64 = torch.float64


def scores(queries, start=0, stop=None):
    """Return a bias that depends on the queries: the bias of key j is a channel of the query."""
    table = torch.linspace(-2, 2, N * D // HEADS, dtype=F64).view(D // HEADS, N)
    return (queries @ table)[..., :stop]


POSITIONS = {
    "nothing": LayerPosition(),
    "bias": LayerPosition(bias=torch.linspace(-3, 3, HEADS * N * N, dtype=F64).sin().view(HEADS, N, N)),
    "function": LayerPosition(bias=scores),
    "rotary": LayerPosition(rotary=PairRotation(torch.linspace(0, 9, N * 16, dtype=F64).sin().view(N, 16))),
}
POSITIONS["all"] = POSITIONS["bias"].merge(POSITIONS["rotary"]).merge(POSITIONS["function"])

positions = in_turn("position", POSITIONS.values())


@pytest.fixture
def attention():
    module = CausalAttention(D, HEADS).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.requires_grad_(False)


@pytest.fixture
def x():
    return torch.randn(B, N, D, dtype=F64)


@positions
def test_it_is_attention_with_minus_infinity_above_the_diagonal(attention, x, position):
    plain = Attention(D, HEADS).double().eval()
    plain.load_state_dict(attention.state_dict(), strict=True)
    above = torch.full((HEADS, N, N), -torch.inf, dtype=F64).triu(1)
    masked = position.merge(LayerPosition(bias=above))
    assert_same(attention(x, position), plain(x, masked), 1e-12)
    assert_same(attention.weights(x, position), plain.weights(x, masked), 1e-12)


@positions
@in_turn("chunks", [(7,), (1,) * 7, (4, 1, 1, 1), (2, 3, 2), (1, 6)])
def test_with_a_cache_any_number_of_tokens_at_a_time_is_the_same(attention, x, position, chunks):
    cache, pieces, start = KeyValueCache(N), [], 0
    for count in chunks:
        stop = start + count
        pieces.append(attention(x[:, start:stop], position.part(start, stop), cache))
        start = stop
    assert_same(torch.cat(pieces, 1), attention(x, position), 1e-12)


def test_a_bias_is_masked_once_for_all_samples(attention, x):
    bias = attention._masked(attention._project(x, POSITIONS["bias"])[3], N, x[:, None])
    assert bias.shape == (1, HEADS, N, N)


def test_a_gradient_reaches_the_bias_below_the_diagonal_and_none_above():
    attention = CausalAttention(D, HEADS)
    bias = torch.randn(HEADS, N, N, requires_grad=True)
    attention(torch.randn(B, N, D), LayerPosition(bias=bias)).square().sum().backward()
    assert bias.grad.isfinite().all() and not bias.grad.triu(1).any()
    assert (bias.grad.tril() != 0).sum() == HEADS * (N * (N + 1) // 2 - 1)  # the first token attends only to itself


def test_a_cache_holds_what_it_is_given_in_memory_linear_in_its_capacity():
    small, large = KeyValueCache(10), KeyValueCache(30)
    assert small.bytes == 0
    k, v = torch.randn(2, B, HEADS, 4, 8)
    for cache in (small, large):
        keys, values = cache.append(k, v)
        assert torch.equal(keys, k) and torch.equal(values, v) and cache.length == 4
        keys, values = cache.append(v[:, :, :1], k[:, :, :1])
        assert keys.shape == (B, HEADS, 5, 8) and torch.equal(keys[:, :, 4:], v[:, :, :1])
    assert small.bytes == 2 * B * HEADS * 10 * 8 * 4 and large.bytes == 3 * small.bytes


def test_a_full_cache_and_one_for_nothing_are_refused():
    cache = KeyValueCache(3)
    with pytest.raises(ValueError, match="`keys` must leave the cache at 3 tokens at most, got 4"):
        cache.append(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2))
    with pytest.raises(ValueError, match="`capacity` must be at least 1, got 0"):
        KeyValueCache(0)
