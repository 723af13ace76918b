"""Norms, MLPs, gating units, projections and blocks of other models, each compared with its formula."""

from functools import partial

import pytest
import torch
from torch import nn

import graticule
from graticule import Grid, LayerPosition
from graticule.layers.attention import Attention
from graticule.layers.block import Block, ParallelBlock, ParallelBranchesBlock, PostNormBlock, block_layer_of
from graticule.layers.gating import GatingUnit, mix_tokens
from graticule.layers.parts import act_layer_of, build_mlp, build_projection, norm_layer_of
from graticule.position.windows import Windows
from in_turn import in_turn, refusals
from tiny import assert_same, draw, draw_double, images, tiny

D, HEADS, N = 12, 3, 5


def tokens():
    return torch.randn(2, N, D, dtype=torch.float64)


def test_norms_by_name_have_the_given_epsilon():
    x = tokens()
    layer = norm_layer_of("layernorm(eps=0.5)")(D).double()
    centered = x - x.mean(-1, keepdim=True)
    torch.testing.assert_close(layer(x), centered / (centered.square().mean(-1, keepdim=True) + 0.5).sqrt())
    rms = norm_layer_of("rmsnorm")(D).double()
    torch.testing.assert_close(rms(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())
    assert norm_layer_of(None)(D).eps == 1e-6


def test_activations_by_name_are_their_formulas():
    x = tokens()
    torch.testing.assert_close(act_layer_of("quick_gelu")()(x), x * (1.702 * x).sigmoid())
    torch.testing.assert_close(act_layer_of("silu")()(x), x * x.sigmoid())
    assert act_layer_of("gelu") is nn.GELU


def test_both_gated_mlps_are_the_same_formula():
    x = tokens()
    apart, packed = (draw_double(build_mlp(name, D, 8)) for name in ("swiglu", "swiglu_packed"))
    by_hand = apart.fc2(apart.fc1_g(x) * apart.fc1_g(x).sigmoid() * apart.fc1_x(x))
    assert_same(apart(x), by_hand, 1e-12)
    with torch.no_grad():
        packed.fc1.weight.copy_(torch.cat([apart.fc1_g.weight, apart.fc1_x.weight]))
        packed.fc1.bias.copy_(torch.cat([apart.fc1_g.bias, apart.fc1_x.bias]))
    packed.fc2.load_state_dict(apart.fc2.state_dict())
    assert_same(packed(x), by_hand, 1e-12)


@in_turn("name", ["fused", "no_key_bias", "separate", "separate_no_key_bias"])
@in_turn("bias", [True, False])
def test_every_projection_is_a_linear_map_with_the_biases_that_its_name_says(name, bias):
    projection = draw_double(build_projection(name, D, bias))
    with torch.no_grad():
        of_zero = projection(torch.zeros(D, dtype=torch.float64)).chunk(3)
    there = [part.abs().max().item() > 0 for part in of_zero]
    assert there == ([True, "no_key_bias" not in name, True] if bias else [False] * 3)
    x = tokens()
    assert projection(x).shape == (2, N, 3 * D)
    torch.testing.assert_close(projection(2 * x) - projection(x), projection(x) - projection(0 * x))


def test_norms_of_queries_keys_and_output_are_where_the_formula_has_them():
    attention = draw_double(Attention(D, HEADS, qk_norm=norm_layer_of(None), inner_norm=norm_layer_of("rmsnorm")))
    x = tokens()
    q, k, v = attention.qkv(x).unflatten(-1, (3, HEADS, D // HEADS)).permute(2, 0, 3, 1, 4)
    logits = attention.q_norm(q) @ attention.k_norm(k).mT * (D // HEADS) ** -0.5
    mixed = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
    assert_same(attention(x), attention.proj(attention.norm(mixed)), 1e-12)


def test_other_blocks_are_their_formulas_and_position_enters_before_attention():
    x, inner = tokens(), torch.randn(N, D, dtype=torch.float64)
    position = LayerPosition(after_norm=inner)
    post = draw_double(PostNormBlock(D, HEADS, init_values=0.3))
    middle = x + post.norm1(post.attn(x + inner))
    assert_same(post(x, position), middle + post.norm2(post.mlp(middle)), 1e-12)
    beside = draw_double(ParallelBlock(D, HEADS, init_values=0.3))
    y = beside.norm1(x)
    by_hand = x + beside.ls1.gamma * (beside.attn(y + inner) + beside.mlp(y))
    assert_same(beside(x, position), by_hand, 1e-12)
    branches = draw_double(ParallelBranchesBlock(D, HEADS, init_values=0.3))
    middle = x + sum(branch.ls.gamma * branch.attn(branch.norm(x) + inner) for branch in branches.attns)
    by_hand = middle + sum(branch.ls.gamma * branch.mlp(branch.norm(middle)) for branch in branches.ffns)
    assert_same(branches(x, position), by_hand, 1e-12)


PARTS = {"init_values": 0.1, "qk_norm": True, "scale_attn_norm": True, "scale_mlp_norm": True, "mlp_layer": "swiglu"}
PARTS |= {"norm_layer": "rmsnorm(eps=1e-5)", "qkv_layer": "no_key_bias", "pre_norm": True, "patch_norm": "layernorm"}
PARTS |= {"reg_tokens": 2, "global_pool": "map", "pool_num_heads": 2, "pool_include_prefix": True}


@in_turn("joining", ["default", "lape"])
@in_turn("block", ["pre_norm", "post_norm", "parallel", "parallel_branches"])
def test_a_model_of_all_parts_trains_every_parameter_with_any_joining(block, joining):
    encoding = "learnable(prefix_rows=False) + relative_bias"
    model = draw(tiny(encoding, joining, block_layer=block, **PARTS)).train()
    model(images()).square().sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not without
    model.set_input_size((24, 40))
    assert model.eval()(images(24, 40)).shape == (2, 5)


def test_without_prefix_rows_the_table_is_zero_for_prefix_tokens_at_every_grid():
    model = tiny("learnable(prefix_rows=False)", reg_tokens=2)
    table = model.position.encodings[0]
    assert table.pos_embed.shape == (1, 16, 24)
    for grid in (model.grid, graticule.Grid(3, 5, prefix=3)):
        assert table(grid).shape == (grid.tokens, 24) and not table(grid)[:3].any()
    torch.testing.assert_close(table(model.grid)[3:], table.pos_embed[0])
    plain = tiny("learnable", class_token=False, global_pool="avg")
    plain.position.load_state_dict(model.position.state_dict())
    grid = graticule.Grid(3, 5)
    torch.testing.assert_close(table(graticule.Grid(3, 5, prefix=3))[3:], plain.position.encodings[0](grid))


test_unknown_parts_are_refused_by_name = refusals(
    ({"norm_layer": "layer_norm"}, "`norm_layer` must be one of"),
    ({"norm_layer": "layernorm(epsilon=1)"}, "`norm_layer` must have no options but eps, got layernorm"),
    ({"act_layer": "gelu_fast"}, "`act_layer` must be one of"),
    ({"mlp_layer": "glu"}, "`mlp_layer` must be one of"),
    ({"qkv_layer": "split"}, "`qkv_layer` must be one of"),
    ({"block_layer": "prenorm"}, "`block_layer` must be one of"),
    ({"global_pool": "attention"}, "`global_pool` must be one of"),
    ({"pool_num_heads": 2}, "`pool_num_heads` and `pool_mlp_ratio` must be left out unless `global_pool` is 'map'"),
    ({"pool_num_heads": 5, "global_pool": "map"}, "`pool_num_heads` must divide the 24 channels, got 5"),
    ({"pool_include_prefix": True}, "`pool_include_prefix` must be False with `global_pool` 'token'"),
    ({"name": "ceit_tiny_patch16_224", "mlp_layer": "swiglu"}, "must be left out with CeiT's feed-forward"),
    ({"name": "ceit_tiny_patch16_224", "pre_norm": True}, "`patch_frames` and `fit` must be left out"),
    call=lambda arguments: tiny(**arguments),
)


def test_a_class_of_blocks_is_taken_as_it_is_and_a_map_cannot_come_later():
    assert block_layer_of(PostNormBlock) is PostNormBlock
    with pytest.raises(ValueError, match="`global_pool` must be 'map' from the start"):
        tiny().reset_classifier(3, "map")


@pytest.fixture
def block():
    return draw_double(Block(D, HEADS, norm_layer=partial(nn.LayerNorm, eps=1e-6)))


@pytest.fixture
def x():
    return torch.randn(2, N, D, dtype=torch.float64)


def test_a_table_is_added_after_the_norm_and_a_bias_goes_to_attention(block, x):
    inner, bias = torch.randn(N, D, dtype=torch.float64), torch.randn(HEADS, N, N, dtype=torch.float64)
    for position, attended in (
        (LayerPosition(after_norm=inner), block.attn(block.norm1(x) + inner)),
        (LayerPosition(bias=bias), block.attn(block.norm1(x), LayerPosition(bias=bias))),
    ):
        middle = x + attended
        by_hand = middle + block.mlp(block.norm2(middle))
        assert_same(block(x, position), by_hand, 1e-12)


@torch.no_grad()
def test_what_a_hook_keeps_of_the_norm_is_not_changed(block, x):
    """Also without gradients, by a hook of all modules or of one inside the norm."""
    outputs = []
    expected, position = block.norm1(x), LayerPosition(after_norm=torch.ones(N, D, dtype=torch.float64))
    with nn.modules.module.register_module_forward_hook(lambda _, args, y: outputs.append(y)):
        block(x, position)
    block.norm1 = nn.Sequential(block.norm1)
    with block.norm1[0].register_forward_hook(lambda _, args, y: outputs.append(y)):
        block(x, position)
    assert torch.equal(outputs[0], expected) and torch.equal(outputs[-1], expected)


def test_a_dropped_path_leaves_the_shortcut(x):
    block = Block(D, HEADS, drop_path=0.999999).double().train()
    assert torch.equal(block(x), x) and not torch.equal(block.eval()(x), x)


@pytest.mark.parametrize("windows", [None, Windows(Grid(3, 5), Grid(2, 2), (1, 1))])
def test_an_empty_batch_is_mixed_to_an_empty_batch(windows):
    tokens = 15 if windows is None else 4
    mixed = mix_tokens(torch.rand(0, 15, 6), torch.rand(2, tokens, tokens), torch.rand(tokens), windows)
    assert mixed.shape == (0, 15, 6)


@pytest.mark.parametrize("norm", [None, nn.LayerNorm])
def test_the_halves_of_a_gating_unit_come_together_as_figure_3_draws_them(norm):
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    position = LayerPosition(
        mixing=torch.randn(2, 6, 6, dtype=torch.float64), spatial_bias=torch.randn(6, dtype=torch.float64)
    )

    def mixed(v):
        return mix_tokens(v if norm is None else nn.functional.layer_norm(v, v.shape[-1:]), *position[-2:])

    u, v = x[..., :4], x[..., 4:]
    expected = {
        "gate": u * mixed(v),
        "add": u + mixed(v),
        "concat": torch.cat([u, mixed(v)], -1),
        "nonsplit": x * mixed(x),
    }
    for combine, output in expected.items():
        unit = GatingUnit(8, norm, combine).double()
        assert_same(unit(x, position), output, 1e-12)
        assert unit.out_dim == output.shape[-1]


test_invalid_gating_units_are_refused = refusals(
    (lambda: GatingUnit(7), "`dim` must be even"),
    (lambda: GatingUnit(8, None, "mul"), "`combine`"),
    (lambda: GatingUnit(8)(torch.zeros(1, 4, 8), LayerPosition()), "mixing encoding"),
)
