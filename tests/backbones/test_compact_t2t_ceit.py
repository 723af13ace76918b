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
from graticule.backbones.compact import ConvolutionalTokenizer
from graticule.backbones.t2t import TokenPerformer, TokenTransformer
from in_turn import in_turn, refusals
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
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def mlp(x, module):
    y = x @ module.fc1.weight.T + module.fc1.bias
    y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
    return y @ module.fc2.weight.T + module.fc2.bias


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
    assert model.grid_of(x) == Grid(6, 10) and model.feature_info[0]["reduction"] == 4
    names = published_state_dict(model)
    assert {f"tokenizer.conv_layers.{layer}.0.weight" for layer in range(2)} <= names.keys()


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
    assert_same(layer.w @ layer.w.T, 32 * torch.eye(32), 1e-4)


@torch.no_grad()
def test_a_performer_never_attends_below_float32():
    layer = TokenPerformer(18, 6)
    q, k, v = (torch.randn(1, 9, 6) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer._attend(q, k, v)
    assert inside.dtype == torch.float32 and torch.equal(inside, layer._attend(q, k, v))
    halves = [t.bfloat16() for t in (q, k, v)]
    assert torch.equal(layer._attend(*halves), layer._attend(*[t.float() for t in halves]))


test_parts_and_sizes_that_do_not_fit_are_refused = refusals(
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
)
