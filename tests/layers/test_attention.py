"""Attention compared with the formula, with every form of position that it supports."""

import copy

import pytest
import torch
from torch import Tensor, nn

from graticule import LayerPosition
from graticule.backbones.ceit import ClassAttentionOfLayers
from graticule.layers.attention import Attention
from graticule.position.rotation import PairRotation
from in_turn import in_turn
from tiny import assert_same

B, N, D, HEADS = 2, 7, 24, 3
HEAD = D // HEADS


@pytest.fixture
def attention():
    module = Attention(D, HEADS).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


@pytest.fixture
def x():
    return torch.randn(B, N, D, dtype=torch.float64)


def naive(attention, x, bias=0.0, turn=lambda t: t):
    """Compute softmax(q k^T / sqrt(d) + bias) v head by head."""
    q, k, v = attention.qkv(x).split(D, -1)
    heads = []
    for head in range(HEADS):
        at = slice(head * HEAD, (head + 1) * HEAD)
        logits = turn(q[..., at]) @ turn(k[..., at]).transpose(-2, -1) / HEAD**0.5
        logits = logits + (bias if isinstance(bias, float) else bias[..., head, :, :])
        heads.append(logits.softmax(-1) @ v[..., at])
    return attention.proj(torch.cat(heads, -1))


def test_attention_is_its_formula(attention, x):
    y = attention(x)
    assert y.shape == (B, N, D)
    assert_same(y, naive(attention, x))


def test_a_bias_in_another_dtype_is_taken(attention, x):
    bias = torch.randn(HEADS, N, N)
    assert_same(attention(x, LayerPosition(bias=bias)), naive(attention, x, bias.double()))


class FromQueries(nn.Module):
    """A bias that depends on content: every query times one embedding per pair of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(N, N, HEAD, dtype=torch.float64))

    def forward(self, q: Tensor) -> Tensor:
        return torch.einsum("bhid,ijd->bhij", q, self.keys)


def test_a_bias_that_depends_on_content_is_made_from_the_scaled_queries(attention, x):
    module = FromQueries()
    q = attention.qkv(x)[..., :D].unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
    bias = torch.einsum("bhid,ijd->bhij", q, module.keys) / HEAD**0.5
    y = attention(x, LayerPosition(bias=module))
    assert_same(y, naive(attention, x, bias))
    y.sum().backward()
    assert module.keys.grad.abs().gt(0).all()


def rotation(angle):
    """Rotate neighboring pairs of channels by angle: (N, d/2)."""
    return PairRotation(torch.cat([angle.sin().repeat_interleave(2, -1), angle.cos().repeat_interleave(2, -1)], -1))


def by_complex_numbers(angle):
    """Compute the same rotation as a product of complex numbers."""

    def turn(t):
        pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    return turn


def test_every_head_can_turn_by_angles_of_its_own(attention, x):
    angles = torch.randn(HEADS, N, HEAD // 2, dtype=torch.float64)
    ours = attention(x, LayerPosition(rotary=rotation(angles)))
    q, k, v = (t.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for t in attention.qkv(x).split(D, -1))
    turn = by_complex_numbers(angles)
    mixed = (turn(q) @ turn(k).transpose(-2, -1) / HEAD**0.5).softmax(-1) @ v
    assert_same(ours, attention.proj(mixed.transpose(1, 2).flatten(2)))


def test_bias_and_rotation_go_together(attention, x):
    angle = torch.randn(N, HEAD // 2, dtype=torch.float64)
    bias = torch.randn(HEADS, N, N, dtype=torch.float64)
    ours = attention(x, LayerPosition(bias=bias, rotary=rotation(angle)))
    assert_same(ours, naive(attention, x, bias, by_complex_numbers(angle)))


@in_turn("heads", [0, 5])
def test_heads_that_do_not_divide_the_channels_are_refused(heads):
    with pytest.raises(ValueError, match=f"`num_heads`.*, got (24 with )?{heads}"):
        Attention(D, heads)


def positions():
    """Return a position of every form that attention supports, by name."""
    first, second, third = (torch.randn(D, D, dtype=torch.float64) for _ in range(3))
    angle = torch.randn(N, HEAD // 2, dtype=torch.float64)
    bias = torch.randn(HEADS, N, N, dtype=torch.float64)
    return {
        "nothing": LayerPosition(),
        "bias": LayerPosition(bias=bias),
        "function": LayerPosition(bias=FromQueries()),
        "rotary": LayerPosition(rotary=rotation(angle)),
        "inputs": LayerPosition(inputs=lambda x: (x @ first, x @ second, x @ third)),
        "all": LayerPosition(
            bias=FromQueries(), rotary=rotation(angle), inputs=lambda x: (x @ first, x @ second, x @ third)
        ),
    }


@in_turn("form", ["nothing", "bias", "function", "rotary", "inputs", "all"])
def test_weights_times_values_are_what_forward_returns(form, attention, x):
    position = positions()[form]
    values = x if position.inputs is None else position.inputs(x)[2]
    v = attention.qkv(values)[..., 2 * D :].unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
    weights = attention.weights(x, position)
    assert weights.shape == (B, HEADS, N, N)
    assert_same(weights.sum(-1), torch.ones(B, HEADS, N, dtype=torch.float64))
    assert_same(attention.proj((weights @ v).transpose(1, 2).flatten(2)), attention(x, position))


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_queries_keys_and_values_can_each_have_inputs_of_their_own(qkv_bias, x):
    attention = Attention(D, HEADS, qkv_bias=qkv_bias).double().eval()
    if qkv_bias:
        nn.init.normal_(attention.qkv.bias)
    inputs = [x @ torch.randn(D, D, dtype=torch.float64) for _ in range(3)]
    q, k, v = (
        attention.qkv(y)[..., i * D : (i + 1) * D].unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        for i, y in enumerate(inputs)
    )
    mixed = (q @ k.transpose(-2, -1) / HEAD**0.5).softmax(-1) @ v
    ours = attention(x, LayerPosition(inputs=lambda _: tuple(inputs)))
    assert_same(ours, attention.proj(mixed.transpose(1, 2).flatten(2)))


class Wrapped(nn.Module):
    """A module that wraps a projection, without an attribute `weight`, like adapters and quantization."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)


def halves(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs in which queries and keys share one tensor, as from a PEG on queries and keys."""
    return (y := x / 2), y, x


def test_a_module_that_replaces_the_projection_takes_effect_whatever_the_inputs_are(attention, x):
    for position in (LayerPosition(), LayerPosition(inputs=halves), LayerPosition(inputs=lambda x: (x, x / 2, x / 4))):
        doubled = Attention(D, HEADS).double().eval()
        doubled.load_state_dict(attention.state_dict())
        with torch.no_grad():
            doubled.qkv.weight.mul_(2), doubled.qkv.bias.mul_(2)
        wrapped = Attention(D, HEADS).double().eval()
        wrapped.load_state_dict(attention.state_dict())
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
