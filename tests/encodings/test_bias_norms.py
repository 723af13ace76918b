"""LaPE's norm of a relative bias: over the keys of a query, and, our variant, over the heads of a pair."""

import pytest
import torch
import torch.nn.functional as F

import graticule
from graticule import Grid
from graticule.encodings.build import build_position
from graticule.encodings.forms.bias import BiasPosition, HeadNormalizedBias, NormalizedBias
from graticule.encodings.mlp_bias import ContinuousBias
from graticule.encodings.relative_bias import RelativeBias
from in_turn import in_turn, refusals
from tiny import DEPTH, assert_same, draw, images, tiny

HEADS = 3
BUILT, OTHER = Grid(3, 5, prefix=1), Grid(6, 4, prefix=1)
BIASES = {
    "relative": lambda grid=BUILT, heads=HEADS: RelativeBias(grid, heads),
    "continuous": lambda grid=BUILT, heads=HEADS: ContinuousBias(grid, heads, hidden=16),
}
biases = in_turn("kind", BIASES)


def drawn(encoding):
    for parameter in encoding.double().parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return encoding


def split(bias):
    """Return the bias between patches, after a check that prefix tokens get none."""
    assert not bias[:, :1].any() and not bias[..., :1].any()
    return bias[:, 1:, 1:]


@torch.no_grad()
@biases
@in_turn(("norm", "axis"), [(NormalizedBias, -1), (HeadNormalizedBias, 0)])
@in_turn("eps", [1e-5, 0.1])
def test_the_norm_over_the_keys_or_the_heads_by_hand(kind, norm, axis, eps):
    encoding = drawn(norm(BIASES[kind](), eps))
    plain = encoding.bias.patch_bias(BUILT)
    mean, variance = plain.mean(axis, keepdim=True), plain.var(axis, correction=0, keepdim=True)
    shape = [1, 1, 1]
    shape[axis] = -1
    weight, shift = (parameter.view(shape) for parameter in (encoding.norm.weight, encoding.norm.bias))
    assert_same(split(encoding(BUILT)), (plain - mean) / (variance + eps).sqrt() * weight + shift, 1e-10)


@torch.no_grad()
@biases
def test_at_another_grid_scale_and_shift_of_keys_are_resampled_as_maps_and_those_of_heads_stay(kind):
    over_keys, over_heads = drawn(NormalizedBias(BIASES[kind]())), drawn(HeadNormalizedBias(BIASES[kind]()))
    torch.nn.init.constant_(over_keys.norm.weight, 1.5)
    torch.nn.init.constant_(over_keys.norm.bias, -0.25)
    plain = over_keys.bias.patch_bias(OTHER)
    assert_same(split(over_keys(OTHER)), F.layer_norm(plain, (24,)) * 1.5 - 0.25, 1e-10)
    for encoding, sides in ((over_keys, (24,)), (over_heads, (HEADS,))):
        bias = encoding(OTHER)
        encoding.set_grid(OTHER)
        assert encoding.grid == OTHER and encoding.norm.weight.shape == sides
        assert_same(encoding(OTHER), bias, 1e-12)


def test_the_norm_leaves_a_bias_that_starts_at_zero_at_zero():
    """As in LaPE's released code; another start is noise of a spread of 1 after the norm."""
    for std, spread in ((0, 0), (0.02, 1)):
        encoding = f"relative_bias(std={std})"
        position = build_position(Grid(4, 5, prefix=1), dim=8, depth=2, num_heads=2, encoding=encoding, joining="lape")
        for layer in position(Grid(4, 5, prefix=1)):
            bias = layer.bias[:, 1:, 1:]
            assert float(bias.detach().std()) == pytest.approx(spread, abs=0.05)
            bias.square().sum().backward()
        assert all(values.grad.isfinite().all() for values in position.parameters())


def test_only_the_norm_of_a_bias_is_resampled_and_not_other_vectors_of_a_checkpoint():
    """The hidden layer of a continuous bias has a vector of 256 numbers, which is also that of a grid of 16 x 16."""
    position = BiasPosition([NormalizedBias(ContinuousBias(Grid(4, 4), 2, hidden=256))], 1)
    hidden = torch.randn(256)
    assert position.fit("encodings.0.bias.cpb_mlp.0.bias", hidden) is hidden
    assert position.fit("encodings.0.norm.weight", hidden).shape == (16,)


@in_turn("encoding", ["relative_bias", "continuous_bias"])
@in_turn(
    ("joining", "kind"),
    [("lape", NormalizedBias), ("lape(over='keys')", NormalizedBias), ("lape(over='heads')", HeadNormalizedBias)],
)
def test_a_model_normalizes_its_bias_over_the_keys_unless_over_names_the_heads(encoding, joining, kind):
    model = draw(tiny(encoding, joining)).double().eval()
    assert [type(module) for module in model.position.encodings] == [kind] * DEPTH
    beside = tiny(f"{encoding}+peg", joining)
    assert [type(module) for module in beside.position.parts[0].encodings] == [kind] * DEPTH
    for layer, module in zip(model.position(model.grid), model.position.encodings, strict=True):
        assert_same(layer.bias, module(model.grid), 0)
    x = images(24, 40, dtype=torch.float64)
    before = model(x)
    assert_same(graticule.fold(model, (24, 40))(x), before, 1e-12)


test_a_norm_without_lape_or_beside_a_table_is_refused = refusals(
    (("relative_bias", "default(over='keys')"), "`joining` default must not have the option 'over'"),
    *(
        ((name, f"lape(over='{axis}')"), "`over` must be left out unless a relative bias is joined, without an abs")
        for name in ("learnable", "learnable+relative_bias", "sinusoidal_2d+continuous_bias")
        for axis in ("keys", "heads")
    ),
    (("relative_bias", "lape(over='head')"), r"`over` of joining lape must be .*'keys' or 'heads'.*got 'head'"),
    call=lambda names: tiny(*names),
)
test_a_norm_over_one_head_is_refused = refusals(
    (lambda: HeadNormalizedBias(RelativeBias(BUILT, 1)), "`over` must be 'keys' with one head"),
    (lambda: tiny("relative_bias", "lape(over='heads')", num_heads=1), "`over` must be 'keys' with one head"),
)


def test_one_head_is_normalized_over_the_keys():
    assert isinstance(tiny("relative_bias", "lape", num_heads=1).position.encodings[0], NormalizedBias)
