"""Attention compared with the formula, with every form of position that it supports."""

import copy

import pytest
import torch
from torch import Tensor, nn

from graticule import LayerPosition
from graticule.backbones.ceit import ClassAttentionOfLayers
from graticule.layers.attention import Attention
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
