"""ViT-Lite, CVT, CCT, T2T-ViT and CeiT: sizes and names of their code, and every part against its equation."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import graticule
from graticule import Grid, published_state_dict
from graticule.backbones.ceit import ClassAttentionOfLayers, LocallyEnhancedFeedForward
from graticule.backbones.compact import CompactBlock, ConvolutionalTokenizer
from graticule.backbones.t2t import TokenPerformer, TokensToToken, TokenTransformer
from graticule.position.layer import LayerPosition
from in_turn import in_turn
from tiny import assert_same, count, draw, images

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
FACTS = json.loads((GOLDEN / "facts.json").read_text())
ROWS = [row for row in FACTS if row.startswith(("t2t_vit", "ceit", "vit_lite", "cvt", "cct"))]
SMALL = {"embed_dim": 24, "depth": 3, "num_heads": 3, "mlp_ratio": 2.0, "num_classes": 5}
T2T = {**SMALL, "img_size": 64, "depth": 2, "token_dim": 8}
#: A small model of every family, like the recorded cases: name, arguments, case.
FAMILIES = {
    "vit_lite": ("vit_lite_7_4_32", SMALL, "vit_lite_learnable"),
    "cvt": ("cvt_7_4_32", {**SMALL, "encoding": "sinusoidal_1d"}, "cvt_sine"),
    "cct": ("cct_7_3x1_32", SMALL, "cct_learnable"),
    "t2t": ("t2t_vit_7", T2T, "t2t_performer"),
    "ceit": ("ceit_tiny_patch16_224", {**SMALL, "img_size": 32, "mlp_ratio": 4.0}, "ceit"),
}
#: (height, width) of images, and the resulting grid of each family.
SIZES = {
    "vit_lite": [((32, 32), (8, 8)), ((24, 40), (6, 10)), ((64, 20), (16, 5))],
    "cvt": [((32, 32), (8, 8)), ((24, 40), (6, 10)), ((64, 20), (16, 5))],
    "cct": [((32, 32), (16, 16)), ((24, 40), (12, 20)), ((17, 9), (9, 5))],
    "t2t": [((64, 64), (4, 4)), ((48, 80), (3, 5)), ((96, 32), (6, 2))],
    "ceit": [((32, 32), (2, 2)), ((48, 80), (3, 5)), ((96, 32), (6, 2))],
}
sizes = in_turn(("family", "size", "grid"), [(family, *row) for family, rows in SIZES.items() for row in rows])


def build(family, **kwargs):
    name, arguments, _ = FAMILIES[family]
    return graticule.create_model(name, **{**arguments, **kwargs})


def exact(family, **kwargs):
    """Return a small model with every weight drawn, in float64 and evaluation mode."""
    model = draw(build(family, **kwargs)).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model


def wide(height, width, batch=2):
    return images(height, width, batch, torch.float64)


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def layer_norm(x, norm):
    """Compute LayerNorm over the channels by its formula."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def mlp(x, module):
    """Compute two linear layers with an exact GELU between them."""
    y = x @ module.fc1.weight.T + module.fc1.bias
    y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
    return y @ module.fc2.weight.T + module.fc2.bias


# Sizes


def full_size(row):
    name, *classes = row.split(".")
    arguments = {"num_classes": int(classes[0].removeprefix("cifar"))} if classes else {}
    with torch.device("meta"):
        return graticule.create_model(name, **arguments).eval()


@in_turn("row", ROWS)
def test_a_full_size_has_the_parameters_and_multiply_adds_of_the_reference(row):
    model, facts = full_size(row), FACTS[row]
    assert count(model) == facts["parameters"]
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == facts["trainable"]
    model.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, facts["size"], facts["size"], device=model.head.weight.device))
    assert counter.get_total_flops() / 2e9 == pytest.approx(facts["gmacs"], rel=5e-3)


@sizes
@torch.no_grad()
def test_an_image_of_another_size_gives_a_grid_of_its_own(family, size, grid):
    model = exact(family)
    before = copy.deepcopy(model.state_dict())
    x = wide(*size)
    assert model.grid_of(x).shape == grid
    assert model.embed(x).shape == (2, math.prod(grid) + model.num_prefix_tokens, 24)
    assert model(x).shape == (2, 5) and model(x).isfinite().all()
    assert_same(model(x.flip(0)), model(x).flip(0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# The head


@pytest.mark.parametrize(("family", "prefix"), [("cct", 0), ("cvt", 0), ("vit_lite", 1)])
@torch.no_grad()
def test_sequence_pooling_is_a_mean_of_the_patches_by_a_softmax_of_their_scores(family, prefix):
    model = exact(family)
    if family == "vit_lite":
        model.reset_classifier(5, "seq")
    tokens = rand(2, prefix + 13, 24)
    pooled = []
    for sample in tokens:
        weights = [
            math.exp(float(patch @ model.attn_pool.weight[0] + model.attn_pool.bias)) for patch in sample[prefix:]
        ]
        total = sum(w * patch for w, patch in zip(weights, sample[prefix:], strict=True))
        pooled.append(total / sum(weights))
    assert_same(model.forward_head(tokens, pre_logits=True), torch.stack(pooled))
    assert_same(model.forward_head(tokens), model.head(torch.stack(pooled)))


@torch.no_grad()
def test_sequence_pooling_comes_and_goes_with_the_classifier():
    model = exact("vit_lite")
    x = wide(32, 32)
    tokens = model.forward_features(x)
    assert model.attn_pool is None
    model.reset_classifier(4, "seq")
    assert model.attn_pool.weight.dtype == torch.float64 and model.attn_pool.weight.shape == (1, 24)
    assert model(x).shape == (2, 4)
    model.reset_classifier(4, "avg")
    assert model.attn_pool is None
    assert_same(model.forward_head(tokens, pre_logits=True), tokens[:, 1:].mean(1))
    model.reset_classifier(4, "token")
    assert_same(model.forward_head(tokens, pre_logits=True), tokens[:, 0])
    with pytest.raises(ValueError, match="`class_token` must be True where `global_pool` is 'token'"):
        exact("cct").reset_classifier(4, "token")


# Compact transformers


@in_turn("kernel", [1, 3, 4, 5, 7])
@in_turn("layers", [1, 2, 3])
@in_turn(("stride", "padding"), [(None, None), (1, 1), (2, 0), (3, 2), (2, 3)])
@torch.no_grad()
def test_the_grid_of_convolutions_is_that_of_their_output(kernel, layers, stride, padding):
    tokenizer = ConvolutionalTokenizer((64, 64), (kernel, kernel), 3, 4, layers, stride, padding)
    for size in ((64, 64), (32, 45), (33, 31), (17, 128), (9, 10), (1, 2)):
        try:
            maps = tokenizer.conv_layers(torch.zeros(1, 3, *size))
        except RuntimeError:  # the image is too small
            with pytest.raises(ValueError, match=f"`img_size` must be large enough for one token, got {size[0]} x"):
                tokenizer.grid(size)
            continue
        assert tokenizer.grid(size).shape == maps.shape[-2:]
        assert tokenizer(torch.zeros(1, 3, *size)).shape == (1, maps.shape[-2] * maps.shape[-1], 4)


@torch.no_grad()
def test_two_convolutions_each_with_relu_and_pooling_make_ccts_tokens():
    model = draw(graticule.create_model("cct_2_3x2_32", **{**SMALL, "depth": 1})).double().eval()
    first, second = (model.patch_embed.conv_layers[layer][0] for layer in range(2))
    assert [tuple(conv.weight.shape) for conv in (first, second)] == [(64, 3, 3, 3), (24, 64, 3, 3)]
    assert first.bias is None and second.bias is None
    x = wide(24, 40)
    y = F.max_pool2d(F.conv2d(x, first.weight, padding=1).clamp(min=0), 3, 2, 1)
    y = F.max_pool2d(F.conv2d(y, second.weight, padding=1).clamp(min=0), 3, 2, 1)
    assert y.shape == (2, 24, 6, 10)
    assert_same(model.patch_embed(x), y.flatten(2).transpose(1, 2))
    assert model.grid_of(x) == Grid(6, 10)
    assert model.feature_info[0]["reduction"] == 4
    names = published_state_dict(model)
    assert {f"tokenizer.conv_layers.{layer}.0.weight" for layer in range(2)} <= names.keys()


@torch.no_grad()
def test_the_second_norm_of_a_compact_block_stands_on_the_residual_stream():
    block = draw(CompactBlock(24, 3, 2.0, qkv_bias=False)).double().eval()
    x, inner = rand(2, 7, 24), rand(7, 24)
    y = layer_norm(x, block.norm1) + inner
    q, k, v = (y @ block.attn.qkv.weight.T).chunk(3, -1)
    heads = []
    for head in range(3):
        at = slice(8 * head, 8 * head + 8)
        weights = (q[..., at] @ k[..., at].transpose(1, 2) / math.sqrt(8)).softmax(-1)
        heads.append(weights @ v[..., at])
    attended = torch.cat(heads, -1) @ block.attn.proj.weight.T + block.attn.proj.bias
    stream = layer_norm(x + attended, block.norm2)
    assert_same(block(x, LayerPosition(after_norm=inner)), stream + mlp(stream, block.mlp))


# T2T-ViT


def windows(maps, side, step, padding):
    """Cut maps (B, C, H, W) into overlapping windows, each flattened channel by channel, in a loop."""
    padded = F.pad(maps, (padding,) * 4)
    rows = [
        padded[..., top : top + side, left : left + side].flatten(1)
        for top in range(0, padded.shape[-2] - side + 1, step)
        for left in range(0, padded.shape[-1] - side + 1, step)
    ]
    return torch.stack(rows, 1)


@pytest.mark.parametrize("tokens_type", ["performer", "transformer"])
@torch.no_grad()
def test_the_tokens_of_t2t_are_three_soft_splits_with_small_transformers_between(tokens_type):
    stem = draw(TokensToToken((48, 80), (16, 16), 3, 24, 8, tokens_type)).double().eval()
    x = wide(48, 80)
    y = windows(x, 7, 4, 2)
    assert y.shape == (2, 12 * 20, 147)
    y = stem.attention1(y).transpose(1, 2).unflatten(-1, (12, 20))
    y = stem.attention2(windows(y, 3, 2, 1)).transpose(1, 2).unflatten(-1, (6, 10))
    assert_same(stem(x), stem.project(windows(y, 3, 2, 1)))
    assert stem(x).shape == (2, 15, 24)


@torch.no_grad()
def test_a_token_transformer_has_one_head_and_its_values_for_a_shortcut():
    layer = draw(TokenTransformer(18, 6)).double().eval()
    x = rand(2, 11, 18)
    q, k, v = (layer_norm(x, layer.norm1) @ layer.attn["qkv"].weight.T).chunk(3, -1)
    expected = []
    for sample in range(2):
        rows = []
        for query in q[sample]:
            weights = torch.stack([(query @ key / math.sqrt(18)).exp() for key in k[sample]])
            rows.append((weights[:, None] * v[sample]).sum(0) / weights.sum())
        expected.append(torch.stack(rows))
    y = v + torch.stack(expected) @ layer.attn["proj"].weight.T + layer.attn["proj"].bias
    assert_same(layer(x), y + mlp(layer_norm(y, layer.norm2), layer.mlp))


def test_the_features_of_a_performer_start_orthogonal_and_are_not_learned():
    layer = TokenPerformer(147, 64)
    assert layer.w.shape == (32, 64) and not layer.w.requires_grad
    torch.testing.assert_close(layer.w @ layer.w.T, 32 * torch.eye(32), rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_performer_never_attends_below_float32():
    layer = TokenPerformer(18, 6)
    q, k, v = (torch.randn(1, 9, 6) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer._attend(q, k, v)
    assert inside.dtype == torch.float32 and torch.equal(inside, layer._attend(q, k, v))
    halves = [t.bfloat16() for t in (q, k, v)]
    assert torch.equal(layer._attend(*halves), layer._attend(*[t.float() for t in halves]))


# CeiT


@pytest.mark.parametrize("prefix", [0, 1, 2])
@torch.no_grad()
def test_leff_mixes_the_patches_of_a_window_of_three_and_lets_prefix_tokens_pass(prefix):
    grid = Grid(3, 5, prefix=prefix)
    leff = draw(LocallyEnhancedFeedForward(4, 6)).double().eval()
    norms = (leff.bn1, leff.bn2, leff.bn3)
    for norm in norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)

    def normed(x, norm):
        return (x - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias

    x = rand(2, grid.tokens, 4)
    actual = leff(x, grid)
    assert torch.equal(actual[:, :prefix], x[:, :prefix])
    hidden = F.gelu(normed(x[:, prefix:] @ leff.conv1.weight[..., 0, 0].T + leff.conv1.bias, leff.bn1))
    hidden = hidden.unflatten(1, grid.shape)
    for row in range(3):
        for column in range(5):
            total = leff.conv2.bias.expand(2, 6).clone()
            for dy in (-1, 0, 1):
                for dx in (-1, 0, 1):
                    if 0 <= row + dy < 3 and 0 <= column + dx < 5:
                        total += hidden[:, row + dy, column + dx] * leff.conv2.weight[:, 0, dy + 1, dx + 1]
            pixel = F.gelu(normed(total, leff.bn2))
            pixel = normed(pixel @ leff.conv3.weight[..., 0, 0].T + leff.conv3.bias, leff.bn3)
            assert_same(actual[:, prefix + row * 5 + column], pixel)


@pytest.mark.parametrize("qkv_bias", [True, False])
@torch.no_grad()
def test_the_last_class_token_asks_those_of_all_layers(qkv_bias):
    lca = draw(ClassAttentionOfLayers(24, 3, 2.0, qkv_bias, 0.0, 0.0, nn.LayerNorm)).double().eval()
    x = rand(2, 5, 24)
    y = layer_norm(x, lca.norm1) @ lca.attn.qkv.weight.T
    q, k, v = (y + lca.attn.qkv.bias if qkv_bias else y).chunk(3, -1)
    attended = torch.zeros(2, 1, 24, dtype=torch.float64)
    for sample in range(2):
        for head in range(3):
            at = slice(8 * head, 8 * head + 8)
            weights = torch.stack([q[sample, -1, at] @ k[sample, layer, at] for layer in range(5)]) / math.sqrt(8)
            attended[sample, 0, at] = (weights.softmax(0)[:, None] * v[sample, :, at]).sum(0)
    last = x[:, -1:] + attended @ lca.attn.proj.weight.T + lca.attn.proj.bias
    assert_same(lca(x), last + mlp(layer_norm(last, lca.norm2), lca.feedforward))


@torch.no_grad()
def test_the_features_of_ceit_are_what_the_class_tokens_of_all_layers_say():
    model = exact("ceit")
    x = wide(48, 80)
    tokens = torch.stack([tokens[:, 0] for tokens, _ in model.each_layer(x)], 1)
    assert tokens.shape == (2, 3, 24)
    features = layer_norm(model.lca(tokens + model.pos_layer_embed), model.norm)
    assert_same(model.forward_features(x), features)
    assert_same(model(x), model.head(features[:, 0]))


@torch.no_grad()
def test_the_stem_of_ceit_is_a_convolution_norm_and_pooling_before_its_patches():
    stem = exact("ceit").patch_embed
    x = wide(48, 80)
    y = F.conv2d(x, stem.conv.weight, stride=2, padding=3)
    shape = (1, -1, 1, 1)
    mean, var = stem.bn.running_mean.view(shape), stem.bn.running_var.view(shape)
    y = (y - mean) / (var + stem.bn.eps).sqrt() * stem.bn.weight.view(shape) + stem.bn.bias.view(shape)
    y = F.max_pool2d(y, 3, 2, 1).unfold(2, 4, 4).unfold(3, 4, 4)  # (B, 64, H, W, 4, 4)
    y = torch.einsum("bchwij,dcij->bhwd", y, stem.proj.weight).flatten(1, 2) + stem.proj.bias
    assert_same(stem(x), y)


@in_turn(
    ("act", "message"),
    [
        (lambda: build("cct", tokenizer="splits"), "`tokenizer` must be one of patches, convolutions; got 'splits'"),
        (lambda: build("cct", patch_size=(3, 5)), "`patch_size` must be square and `layers` at least 1"),
        (lambda: build("cct", conv_layers=0), "`conv_layers` must be at least 1, got 0"),
        (lambda: build("cct").set_input_size(32, 5), "`patch_size` must stay 3 x 3 in ConvolutionalTokenizer, got 5"),
        (lambda: build("t2t", img_size=72), "`img_size` must be a positive multiple of the patch size, got height 72"),
        (lambda: build("t2t").set_input_size((64, 100)), "got width 100"),
        (lambda: build("t2t")(images(8, 8)), "got height 8"),
        (lambda: build("t2t", patch_size=8), r"`patch_size` must be 16, which the three splits make, got \(8, 8\)"),
        (lambda: build("t2t").set_input_size(64, 8), "`patch_size` must stay 16 x 16 in TokensToToken, got 8 x 8"),
        (lambda: build("t2t", tokens_type="convolution"), "`tokens_type` must be one of performer, transformer; got"),
        (lambda: build("ceit", global_pool="avg"), "`global_pool` must be one of 'token'"),
        (lambda: build("ceit", class_token=False), "`class_token` must be True"),
    ],
)
def test_parts_and_sizes_that_do_not_fit_are_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()
