"""ConViT: equality with timm's, a class token inserted after the gated layers, and other grids."""

import pytest
import timm
import torch
from timm.models.convit import GPSA

import graticule
from graticule import Grid, LayerPosition, published_state_dict
from graticule.encodings.gpsa import Gpsa
from graticule.hub.config import take_position
from graticule.testing.methods import check_backbone
from tiny import assert_same, draw, images, tiny

SIZE = {"patch_size": 8, "depth": 4, "num_heads": 3, "num_classes": 5}
GATED = "learnable + gpsa(layers=2)"


def both(side=32, **kwargs):
    timms = draw(timm.create_model("convit_tiny", embed_dim=8, local_up_to_layer=2, img_size=side, **SIZE, **kwargs))
    ours = graticule.create_model("convit_tiny", embed_dim=24, encoding=GATED, img_size=side, **SIZE, **kwargs)
    ours.double().eval().load_state_dict(timms.double().eval().state_dict())
    return ours, timms


@pytest.mark.parametrize(
    ("side", "kwargs"), [(32, {}), (48, {}), (32, {"global_pool": "avg"}), (32, {"qkv_bias": True})]
)
@torch.no_grad()
def test_it_is_timms_with_every_weight_drawn(side, kwargs):
    ours, reference = both(side, **kwargs)
    x = images(side, side, dtype=torch.float64)
    assert_same(ours(x), reference(x))
    assert_same(ours.forward_intermediates(x)[0], reference.forward_features(x))
    published = published_state_dict(ours)
    assert published.keys() == reference.state_dict().keys()
    assert all(torch.equal(published[name], value) for name, value in reference.state_dict().items())


@torch.no_grad()
def test_a_grid_that_is_not_square_has_timms_formula_with_its_own_coordinates():
    ours, reference = both((32, 48))  # timm takes the root of the number of patches for the side
    grid = Grid(4, 6)
    dy, dx = (-grid.offsets().double()).unbind(-1)
    indices = torch.stack([dx, dy, dx**2 + dy**2], -1)[None]
    for module in reference.modules():
        if isinstance(module, GPSA):
            module.rel_indices = indices
    x = images(32, 48, dtype=torch.float64)
    assert_same(ours(x), reference(x))


@torch.no_grad()
def test_the_class_token_joins_after_the_last_layer_with_gates_and_gets_no_position():
    ours, _ = both()
    tokens, grids = zip(*ours.each_layer(images(dtype=torch.float64)), strict=True)
    assert [tokens_of_layer.shape[1] for tokens_of_layer in tokens] == [16, 16, 17, 17]
    assert [grid.prefix for grid in grids] == [0, 0, 1, 1]
    assert graticule.create_model("convit_tiny", encoding="rope", embed_dim=24, **SIZE).joins_at == 0


def test_the_values_start_as_the_tokens_where_there_are_gates():
    model = graticule.create_model("convit_tiny", encoding=GATED, embed_dim=24, **SIZE)
    assert all(torch.equal(model.blocks[layer].attn.qkv.v.weight, torch.eye(24)) for layer in range(2))


def test_gates_in_the_last_layer_are_refused():
    with pytest.raises(ValueError, match="`encoding` must leave the last of the 4 layers without positional attention"):
        graticule.create_model("convit_tiny", encoding="gpsa", embed_dim=24, **SIZE)


def test_a_position_that_cannot_be_built_leaves_the_present_one():
    model = tiny("learnable + gpsa(layers=1)", name="convit_tiny")
    before = model.position
    with pytest.raises(ValueError, match="`encoding` must keep the channels"):
        model.replace_position(take_position({"encoding": "pope"}))
    assert model.position is before


def test_it_keeps_the_contract():
    sizes = {"img_size": (24, 40), "patch_size": 8, "num_heads": 3, "depth": 3, "embed_dim": 24}
    check_backbone("convit_tiny", encoding=GATED, **sizes, compiled=False)
    check_backbone("convit_tiny", encoding="rope + shaw", **sizes, compiled=False)
    check_backbone("convit_tiny", encoding="peg + learnable", joining="lape", **sizes, compiled=False)


@torch.no_grad()
def test_a_bias_of_the_scores_changes_nothing():
    with_bias = draw(Gpsa(Grid(2, 3), 4, bias=True)).double()
    without = Gpsa(Grid(2, 3), 4).double()
    without.load_state_dict({n: v for n, v in with_bias.state_dict().items() if n != "pos_proj.bias"})
    actual, expected = (encoding(Grid(2, 3)).positional.weights for encoding in (with_bias, without))
    assert_same(actual, expected)


@torch.no_grad()
def test_further_tokens_before_those_of_the_grid_are_left_alone():
    d = torch.float64
    bias, rows, scale = torch.randn(2, 3, 3, dtype=d), torch.randn(3, 4, dtype=d), torch.rand(2, 3, dtype=d)
    position = LayerPosition(
        added_to_stream=rows,
        bias=bias,
        query_scale=scale,
        map_after=lambda x: 2 * x,
        inputs=lambda x: (x, 2 * x, 3 * x),
    )
    wide = position.with_prefix(2)
    assert torch.equal(wide.added_to_stream, torch.cat([torch.zeros(2, 4, dtype=d), rows]))
    assert torch.equal(wide.bias[:, 2:, 2:], bias) and not wide.bias[:, :2].any() and not wide.bias[..., :2].any()
    assert torch.equal(wide.query_scale[:, :2], torch.ones(2, 2, dtype=d))
    x = torch.randn(1, 5, 4, dtype=d)
    assert torch.equal(wide.map_after(x), torch.cat([x[:, :2], 2 * x[:, 2:]], 1))
    assert torch.equal(wide.inputs(x)[2], torch.cat([x[:, :2], 3 * x[:, 2:]], 1))
    with pytest.raises(ValueError, match="`mixing` must be None for further tokens"):
        LayerPosition(mixing=bias).with_prefix(1)
