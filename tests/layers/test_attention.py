"""Attention compared with the formula, with every form of position that it supports."""

import copy

import pytest
import torch
from torch import Tensor, nn

from graticule import LayerPosition
from graticule.backbones.ceit import ClassAttentionOfLayers
from graticule.layers.attention import Attention, CausalAttention, KeyValueCache
from graticule.position.rotation import PairRotation
from in_turn import case, in_turn, refusals
from tiny import assert_same, draw_double

B, N, D, HEADS = 2, 7, 24, 3
HEAD = D // HEADS


@pytest.fixture
def attention():
    return draw_double(Attention(D, HEADS))


@pytest.fixture
def x():
    return torch.randn(B, N, D, dtype=torch.float64)


class FromQueries(nn.Module):
    """A bias that depends on content: every query times one embedding per pair of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(N, N, HEAD, dtype=torch.float64))

    def forward(self, q: Tensor) -> Tensor:
        return torch.einsum("bhid,ijd->bhij", q, self.keys)


def rotation(angle):
    """Rotate neighboring pairs of channels by angle: (N, d/2)."""
    return PairRotation(torch.cat([angle.sin().repeat_interleave(2, -1), angle.cos().repeat_interleave(2, -1)], -1))


def by_complex_numbers(angle):
    """Compute the same rotation as a product of complex numbers."""

    def turn(t):
        pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    return turn


def forms():
    """Return a position of every form, and the bias from scaled queries, the angles and the inputs of its formula."""
    maps, bias = torch.randn(3, D, D, dtype=torch.float64), torch.randn(HEADS, N, N, dtype=torch.float64)
    angle, angles = (torch.randn(*heads, N, HEAD // 2, dtype=torch.float64) for heads in ((), (HEADS,)))
    function = FromQueries()

    def inputs(x):
        return tuple(x @ map_ for map_ in maps)

    return {
        "nothing": (LayerPosition(), None, None, None),
        "bias": (LayerPosition(bias=bias), lambda q: bias, None, None),
        "bias in another dtype": (LayerPosition(bias=bias.float()), lambda q: bias.float().double(), None, None),
        "function": (LayerPosition(bias=function), function, None, None),
        "angles of each head": (LayerPosition(rotary=rotation(angles)), None, angles, None),
        "inputs": (LayerPosition(inputs=inputs), None, None, inputs),
        "all": (LayerPosition(bias=function, rotary=rotation(angle), inputs=inputs), function, angle, inputs),
    }


@in_turn("qkv_bias", [True, False])
def test_attention_with_each_form_of_position_is_its_formula(qkv_bias, x):
    attention = draw_double(Attention(D, HEADS, qkv_bias=qkv_bias))
    for form, (position, bias, angle, inputs) in forms().items():
        with case(form):
            q, k, v = (
                attention.qkv(y).chunk(3, -1)[i].unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
                for i, y in enumerate(inputs(x) if inputs else (x, x, x))
            )
            q, k = (q, k) if angle is None else map(by_complex_numbers(angle), (q, k))
            weights = (q @ k.mT / HEAD**0.5 + (bias(q / HEAD**0.5) if bias else 0.0)).softmax(-1)
            assert_same(attention.weights(x, position), weights)
            output = attention(x, position)
            assert_same(output, attention.proj((weights @ v).transpose(1, 2).flatten(2)))
            if isinstance(bias, FromQueries):
                output.sum().backward()
                assert bias.keys.grad.abs().gt(0).all()


test_heads_that_do_not_divide_the_channels_and_a_scale_of_cosines_are_refused = refusals(
    *(({"num_heads": heads}, f"`num_heads`.*, got (24 with )?{heads}") for heads in (0, 5)),
    ({"num_heads": HEADS, "scale": 1.0, "cosine": True}, "`scale` must be left out with `cosine`"),
    call=lambda kwargs: Attention(D, **kwargs),
)


class Wrapped(nn.Module):
    """A module that wraps a projection, without an attribute `weight`, like adapters and quantization."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)


def saved_bytes(attention: Attention, x: Tensor, position: LayerPosition) -> int:
    """Return the bytes that autograd keeps for the backward pass, besides parameters and positions."""
    known = {part.untyped_storage().data_ptr() for part in (*attention.parameters(), *(position.rotary or ())[:1])}
    saved: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.untyped_storage().data_ptr(), t), id):
        attention(x, position)
    return sum(part.untyped_storage().nbytes() for at, part in saved.items() if at not in known)


def test_a_fixed_rotation_keeps_no_further_copy_for_the_backward_pass(attention, x):
    rotary = PairRotation(torch.randn(N, 2 * HEAD, dtype=torch.float64))
    assert saved_bytes(attention, x, LayerPosition(rotary=rotary)) == saved_bytes(attention, x, LayerPosition())


def test_a_module_that_replaces_the_projection_takes_effect_whatever_the_inputs_are(attention, x):
    shared = LayerPosition(inputs=lambda x: (y := x / 2, y, x))  # by queries and keys, as from a PEG on both
    for position in (LayerPosition(), shared, LayerPosition(inputs=lambda x: (x, x / 2, x / 4))):
        doubled, wrapped = copy.deepcopy(attention), copy.deepcopy(attention)
        with torch.no_grad():
            doubled.qkv.weight.mul_(2), doubled.qkv.bias.mul_(2)
        wrapped.qkv = Wrapped(wrapped.qkv)
        assert_same(wrapped(x, position), doubled(x, position))


def test_a_module_that_replaces_the_projection_of_ceits_last_layer_takes_effect(x):
    layer = ClassAttentionOfLayers(D, HEADS, 2.0, True, 0.0, 0.0, nn.LayerNorm).double().eval()
    doubled = copy.deepcopy(layer)
    with torch.no_grad():
        doubled.attn.qkv.weight.mul_(2), doubled.attn.qkv.bias.mul_(2)
    before = layer(x)
    layer.attn.qkv = Wrapped(layer.attn.qkv)
    assert_same(layer(x), doubled(x))
    assert (layer(x) - before).abs().max() > 1e-6


# Causal attention: no token attends to later ones, at once and token by token


def scores(queries, start=0, stop=None):
    """Return a bias that depends on the queries: the bias of key j is a channel of the query."""
    table = torch.linspace(-2, 2, N * D // HEADS, dtype=torch.float64).view(D // HEADS, N)
    return (queries @ table)[..., :stop]


POSITIONS = {
    "nothing": LayerPosition(),
    "bias": LayerPosition(bias=torch.linspace(-3, 3, HEADS * N * N, dtype=torch.float64).sin().view(HEADS, N, N)),
    "function": LayerPosition(bias=scores),
    "rotary": LayerPosition(rotary=PairRotation(torch.linspace(0, 9, N * 16, dtype=torch.float64).sin().view(N, 16))),
}
POSITIONS["all"] = POSITIONS["bias"].merge(POSITIONS["rotary"]).merge(POSITIONS["function"])

positions = in_turn("position", POSITIONS.values())


@pytest.fixture
def causal():
    module = CausalAttention(D, HEADS).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.requires_grad_(False)


@positions
def test_causal_attention_is_attention_with_minus_infinity_above_the_diagonal(causal, x, position):
    plain = Attention(D, HEADS).double().eval()
    plain.load_state_dict(causal.state_dict(), strict=True)
    above = torch.full((HEADS, N, N), -torch.inf, dtype=torch.float64).triu(1)
    masked = position.merge(LayerPosition(bias=above))
    assert_same(causal(x, position), plain(x, masked), 1e-12)
    assert_same(causal.weights(x, position), plain.weights(x, masked), 1e-12)


@positions
@in_turn("chunks", [(7,), (1,) * 7, (4, 1, 1, 1), (2, 3, 2), (1, 6)])
def test_causal_attention_with_a_cache_of_any_number_of_tokens_at_a_time_is_the_same(causal, x, position, chunks):
    cache, pieces, start = KeyValueCache(N), [], 0
    for count in chunks:
        stop = start + count
        pieces.append(causal(x[:, start:stop], position.part(start, stop), cache))
        start = stop
    assert_same(torch.cat(pieces, 1), causal(x, position), 1e-12)


def test_a_bias_is_masked_once_for_all_samples(causal, x):
    bias = causal._masked(causal._project(x, POSITIONS["bias"])[3], N, x[:, None])
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
