"""Relative biases of published models: equal to timm's modules with random weights, and hand-computed small cases."""

import math
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from test_biases import irpe_bucket
from timm.layers.pos_embed_rel import RelPosBiasTf, RelPosMlp, resize_rel_pos_bias_table_levit
from timm.models import efficientformer, efficientformer_v2, efficientvit_msra, levit, tiny_vit
from timm.models.beit import Attention as BeitAttention
from timm.models.convit import GPSA
from transformers.models.levit.modeling_levit import LevitAttention

import graticule
from graticule import Grid, LayerPosition
from graticule.encodings.forms.mixing import MixingEncoding
from graticule.encodings.gpsa import Gpsa
from graticule.encodings.gqpe import GqpeBias, QuadraticMixing
from graticule.encodings.irpe import Irpe
from graticule.encodings.mirrored_bias import MirroredBias
from graticule.encodings.mlp_bias import MlpBias
from graticule.encodings.relative_bias import RelativeBias
from graticule.layers.attention import Attention
from in_turn import in_turn
from tiny import assert_same, draw_double, images

DIM, HEADS = 24, 4
HEAD_DIM = DIM // HEADS
SQUARE, WIDE = Grid(4, 4), Grid(3, 5)


def tokens(grid, batch=2):
    return torch.randn(batch, grid.tokens, DIM, dtype=torch.float64)


def attention(reference, **kwargs):
    ours = Attention(DIM, HEADS, qkv_bias=reference.qkv.bias is not None, **kwargs).double().eval()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(reference.get_parameter(name))
    return ours


@pytest.mark.parametrize("grid", [Grid(4, 4, prefix=1), Grid(3, 5, prefix=1), Grid(1, 4, prefix=1)], ids=str)
@torch.no_grad()
def test_attention_with_a_table_is_that_of_beit(grid):
    reference = draw_double(BeitAttention(DIM, HEADS, qkv_bias=False, window_size=grid.shape))
    encoding = RelativeBias(grid, HEADS, prefix_rows=True).double()
    encoding.load_state_dict({"relative_position_bias_table": reference.relative_position_bias_table})
    x = tokens(grid)
    assert_same(attention(reference)(x, LayerPosition(bias=encoding(grid))), reference(x))


@in_turn(
    ("name", "kind", "encoding"),
    [
        ("vit_relpos_base_patch16_224", "mlp", "mlp_bias"),
        ("vit_relpos_base_patch16_clsgap_224", "mlp", "mlp_bias"),
        ("vit_relpos_base_patch16_cls_224", "mlp", "mlp_bias"),
        ("vit_relpos_base_patch16_cls_224", "bias", "relative_bias(prefix_rows=True)"),
        ("vit_relpos_base_patch16_224", "bias", "relative_bias"),
        ("vit_srelpos_small_patch16_224", "mlp", "shared_mlp_bias(hidden=384)"),
        ("vit_srelpos_small_patch16_224", "bias", "shared_relative_bias"),
    ],
)
@in_turn("size", [(32, 32), (32, 48)])
@torch.no_grad()
def test_a_whole_vit_relpos_gives_the_logits_of_timm_under_its_names(name, kind, encoding, size):
    sizes = {"img_size": size, "patch_size": 8, "embed_dim": DIM, "depth": 2, "num_heads": HEADS, "num_classes": 5}
    reference = draw_double(timm.create_model(name, rel_pos_type=kind, **sizes))
    gammas = [name for name in reference.state_dict() if ".ls" in name]  # LayerScale is a factor of the projection
    for parameter in map(reference.get_parameter, gammas):
        parameter.fill_(1.0)
    sizes |= {"qkv_bias": reference.blocks[0].attn.qkv.bias is not None, "class_token": reference.cls_token is not None}
    sizes |= {"global_pool": reference.global_pool, "fc_norm": not isinstance(reference.fc_norm, torch.nn.Identity)}
    model = graticule.create_model("vit_tiny_patch16_224", encoding=encoding, **sizes).double().eval()
    model.load_state_dict({name: value for name, value in reference.state_dict().items() if name not in gammas})
    x = images(*size, dtype=torch.float64)
    # the logarithms of timm's coordinates are rounded to float32
    for module in reference.modules():
        if isinstance(module, RelPosMlp):
            module.rel_coords_log.copy_(MlpBias(model.grid, HEADS).double().coordinates(model.grid))
    assert_same(model(x), reference(x))


@pytest.mark.parametrize("grid", [SQUARE, WIDE, Grid(1, 4)], ids=str)
@torch.no_grad()
def test_a_table_of_maxvit_is_turned_into_ours(grid):
    reference = draw_double(RelPosBiasTf(grid.shape, HEADS))
    reference.reset_parameters()
    draw_double(reference)
    encoding = RelativeBias(grid, HEADS).double()
    table = encoding.fit_parameter("relative_position_bias_table", reference.relative_position_bias_table)
    encoding.load_state_dict({"relative_position_bias_table": table})
    assert_same(encoding(grid), reference.get_bias()[0] if reference.get_bias().ndim == 4 else reference.get_bias())


@in_turn(
    ("kind", "shape"),
    [
        *((kind, shape) for kind in (levit.Attention, tiny_vit.Attention) for shape in ((4, 4), (3, 5), (14, 2))),
        (efficientformer.Attention, (3, 5)),
        (efficientformer_v2.Attention2d, (3, 5)),
        (efficientvit_msra.CascadedGroupAttention, 4),
        (LevitAttention, 4),
    ],
)
@torch.no_grad()
def test_the_bias_of_absolute_offsets_is_that_of_levit_and_its_successors(kind, shape):
    """facebookresearch/LeViT#9, #17, #6 and #25: the order of the table, and images that are not square."""
    more = {"attn_ratio": 1} if kind is not LevitAttention else {"attention_ratio": 1}
    sizes = (DIM, HEAD_DIM, HEADS) if kind is not efficientvit_msra.CascadedGroupAttention else (DIM, 8, HEADS)
    reference = kind(*sizes, **more, resolution=shape)
    assert not reference.attention_biases.any()  # as ours starts
    reference.double().attention_biases.normal_()
    grid = Grid(*shape, prefix=1) if isinstance(shape, tuple) else Grid(shape, shape, prefix=1)
    encoding = MirroredBias(grid, HEADS).double()
    assert not encoding.attention_biases.any()
    encoding.load_state_dict({"attention_biases": reference.attention_biases})
    assert torch.equal(encoding(grid)[:, 1:, 1:], reference.get_attention_biases(torch.device("cpu")))
    assert not encoding(grid)[:, 0].any() and not encoding(grid)[:, :, 0].any()


@in_turn("shape", [(6, 6), (3, 7), (9, 4)])
@torch.no_grad()
def test_a_table_of_absolute_offsets_is_resampled_as_by_timm(shape):
    """huggingface/pytorch-image-models#1540 and snap-research/EfficientFormer#19; timm computes in float32."""
    encoding = draw_double(MirroredBias(Grid(4, 4), HEADS))
    table = F.interpolate(encoding.attention_biases.view(1, HEADS, 4, 4), shape, mode="bicubic", antialias=True)
    moved = draw_double(MirroredBias(Grid(*shape), HEADS))
    fitted = moved.fit_parameter("attention_biases", encoding.attention_biases)
    assert_same(fitted, table.reshape(HEADS, -1), 1e-12)
    if shape[0] == shape[1]:
        assert_same(fitted, resize_rel_pos_bias_table_levit(encoding.attention_biases.T, (36, HEADS)).T, 1e-5)
    moved.load_state_dict({"attention_biases": fitted})
    assert_same(encoding(Grid(*shape)), moved(Grid(*shape)))


@torch.no_grad()
def test_a_bias_of_absolute_offsets_is_the_same_in_opposite_directions_and_its_first_entry_stays_with_corners():
    corners = "bicubic(antialias=False, align_corners=True)"
    encoding, grid = draw_double(MirroredBias(Grid(4, 5), HEADS, resampler=corners)), Grid(7, 3)
    bias = encoding(grid).view(HEADS, 7, 3, 7, 3)
    assert torch.equal(bias, bias.flip(1, 3)) and torch.equal(bias, bias.flip(2, 4))
    assert_same(bias[:, 2, 1, 2, 1], encoding.attention_biases[:, 0], 1e-12)
    assert_same(bias[:, 0, 0, 6, 2], encoding.attention_biases[:, -1], 1e-12)


@pytest.mark.parametrize("heads", [4, 9])
@torch.no_grad()
def test_gates_start_as_those_of_convit(heads):
    reference = GPSA(heads * 2, heads, locality_strength=0.7)
    reference.local_init()
    ours = Gpsa(Grid(4, 4), heads, locality=0.7)
    assert_same(ours.pos_proj.weight, reference.pos_proj.weight, 1e-6)
    assert torch.equal(ours.gating_param, reference.gating_param)


@torch.no_grad()
def test_each_head_begins_as_a_position_of_a_convolution():
    grid = Grid(5, 7)
    weights = Gpsa(grid, 9, locality=20.0).double()(grid).positional.weights[:, grid.center].unflatten(-1, grid.shape)
    at = [divmod(int(head.argmax()), 7) for head in weights]
    assert at == [(2 + dy, 3 + dx) for dx in (-1, 0, 1) for dy in (-1, 0, 1)]
    assert weights.amax((1, 2)).min() > 1 - 1e-8


@pytest.mark.parametrize("prefix", [0, 1, 2])
@torch.no_grad()
def test_blended_weights_sum_to_one_and_prefix_tokens_attend_by_content_alone(prefix):
    grid = Grid(3, 5, prefix=prefix)
    encoding, layer, x = draw_double(Gpsa(grid, HEADS)), draw_double(Attention(DIM, HEADS)), tokens(grid)
    weights, content = layer.weights(x, encoding(grid)), layer.weights(x)
    assert_same(weights.sum(-1), torch.ones(2, HEADS, grid.tokens, dtype=torch.float64), 1e-12)
    assert torch.equal(weights[:, :, :prefix], content[:, :, :prefix])
    assert (weights[:, :, prefix:, prefix:] != content[:, :, prefix:, prefix:]).all()
    values = layer.qkv(x).chunk(3, -1)[2].unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
    assert_same(layer(x, encoding(grid)), layer.proj((weights @ values).transpose(1, 2).flatten(2)), 1e-12)


def test_a_closed_gate_leaves_content_alone_and_an_open_one_position():
    grid = Grid(3, 5)
    layer, x = draw_double(Attention(DIM, HEADS)), tokens(grid)
    shut, wide = (Gpsa(grid, HEADS, gate=gate).double()(grid) for gate in (-1000.0, 1000.0))
    assert_same(layer(x, shut), layer(x), 1e-12)
    assert torch.equal(layer.weights(x, wide)[0], wide.positional.weights)


def test_dropout_of_a_blend_drops_content_and_position_together():
    grid = Grid(3, 5)
    layer, x = draw_double(Attention(DIM, HEADS, attn_drop=0.5)), tokens(grid)
    position = draw_double(Gpsa(grid, HEADS))(grid)
    torch.manual_seed(0)
    actual = layer.train()(x, position)
    torch.manual_seed(0)
    weights = F.dropout(layer.weights(x, position), 0.5)
    values = layer.qkv(x).chunk(3, -1)[2].unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
    assert_same(actual, layer.proj((weights @ values).transpose(1, 2).flatten(2)), 1e-12)


@in_turn("form", ["gamma_gamma_t", "gamma", "gamma_released", "alpha", "alpha_released"])
@in_turn("grid", [WIDE, Grid(4, 2)])
def test_with_queries_of_zero_a_head_attends_with_the_weights_of_gqpe(form, grid):
    encoding = draw_double(GqpeBias(WIDE, HEADS, form=form))
    mixing: MixingEncoding = QuadraticMixing(WIDE, HEADS, form).double()
    mixing.load_state_dict(encoding.gaussian.state_dict())
    assert_same(encoding(grid).softmax(-1), mixing(grid), 1e-12)


def test_cosine_attention_does_not_change_with_the_length_of_queries_and_keys():
    layer, x = draw_double(Attention(DIM, HEADS, cosine=True)), tokens(WIDE)
    weights = layer.weights(x)
    with torch.no_grad():
        layer.qkv.weight[: 2 * DIM].mul_(3)
        layer.qkv.bias[: 2 * DIM].mul_(3)
    assert_same(layer.weights(x), weights, 1e-12)
    layer.weights(x).square().sum().backward()
    assert layer.logit_scale.grad.all()


def buckets(method, dy, dx, ratio):
    middle = int(2 * ratio)
    if method == "product":
        return [(irpe_bucket(dy, ratio) + middle) * (2 * middle + 1) + irpe_bucket(dx, ratio) + middle]
    if method == "cross":
        return [irpe_bucket(dy, ratio) + middle, irpe_bucket(dx, ratio) + middle]
    square = dy * dy + dx * dx
    return [irpe_bucket(square if method == "quant" else round(math.sqrt(square)), ratio) + middle]


def vector(encoding, letter, i, j, head):
    places, prefix = encoding.grid.coordinates().tolist(), encoding.grid.prefix
    tables = list(getattr(encoding, f"rpe_{letter}"))
    if encoding.mode == "contextual" and letter != "v":
        tables = [table.mT for table in tables]  # (heads, buckets, d)
    if i < prefix or j < prefix:
        at = [-1] * len(tables)
    else:
        (yi, xi), (yj, xj) = places[i - prefix], places[j - prefix]
        at = buckets(encoding.method, yi - yj, xi - xj, encoding.ratio)
    return sum(table[0 if len(table) == 1 else head, b] for table, b in zip(tables, at, strict=True))


@in_turn("mode", ["contextual", "bias"])
@in_turn("shared", [True, False])
@in_turn("method", ["product", "cross", "euclidean", "quant"])
@torch.no_grad()
def test_attention_with_irpe_on_queries_keys_and_values_is_that_of_the_formula(method, shared, mode):
    grid, heads = Grid(2, 5, prefix=1), 2
    on = "qkv" if mode == "contextual" else "qk"
    encoding = draw_double(Irpe(grid, heads, 3, method, on, mode, ratio=1.4, shared_heads=shared))
    layer, x = draw_double(Attention(6, heads)), torch.randn(1, grid.tokens, 6, dtype=torch.float64)
    q, k, v = (part.unflatten(-1, (heads, 3)) for part in layer.qkv(x)[0].chunk(3, -1))  # (N, h, d)
    mixed = torch.zeros(grid.tokens, heads, 3, dtype=torch.float64)
    for head in range(heads):
        of = partial(vector, encoding, head=head)
        for i in range(grid.tokens):
            logits = []
            for j in range(grid.tokens):
                content, of_k, of_q = q[i, head] @ k[j, head], of("k", i, j), of("q", j, i)
                if mode == "contextual":
                    logits.append((content + q[i, head] @ of_k + k[j, head] @ of_q) / 3**0.5)
                else:
                    logits.append(content / 3**0.5 + of_k + of_q)
            weights = torch.stack(logits).softmax(0)
            mixed[i, head] = weights @ v[:, head]
            if mode == "contextual":
                mixed[i, head] += sum(weights[j] * of("v", i, j) for j in range(grid.tokens))
    assert_same(layer(x, encoding(grid)), layer.proj(mixed.flatten(1))[None], 1e-12)


@pytest.mark.parametrize("method", ["product", "cross", "euclidean", "quant"])
def test_a_table_of_irpe_has_as_many_buckets_as_published(method):
    encoding = Irpe(Grid(14, 14, prefix=1), 3, 8, method, "qkv")
    buckets = 50 if method == "product" else 8
    assert [table.shape for table in encoding.rpe_k] == [(1, 8, buckets)] * (1 + (method == "cross"))
    assert [table.shape for table in encoding.rpe_v] == [(1, buckets, 8)] * (1 + (method == "cross"))
    names = {encoding.published_names(name)[-1] for name, _ in encoding.named_parameters()}
    tables = [".rp_rows", ".rp_cols"] if method == "cross" else [""]
    assert names == {f"rpe_{letter}{table}.lookup_table_weight" for letter in "qkv" for table in tables}
