"""Maps of attention biases: equal to those that the layers receive, their numbers by hand, and the sheet."""

import math

import numpy as np
import pytest
import torch

import graticule
from graticule import Grid
from graticule.analysis.position_maps import BiasMaps, bias_maps
from graticule.encodings.forms.bias import BiasEncoding
from graticule.lab.figures.position_sheets import bias_map_sheet
from graticule.lab.figures.save import png
from graticule.position.position import ENCODINGS
from in_turn import in_turn
from tiny import images, layers, tiny

#: Encodings whose bias depends only on parameters and grid.
NAMES = [
    name
    for name, kind in ENCODINGS.items()
    if issubclass(kind, BiasEncoding) and isinstance(layers(name)[0].bias, torch.Tensor)
]


@in_turn("encoding", NAMES)
@torch.no_grad()
def test_a_map_is_the_bias_of_a_layer_between_patches(encoding):
    model = tiny(encoding, img_size=(24, 40))
    maps = bias_maps(model)
    assert maps.grid == Grid(3, 5)
    assert maps.layers == (((0, 1, 2),) if ENCODINGS[encoding].shared else ((0,), (1,), (2,)))
    assert maps.bias.shape == (len(maps.layers), 3, 15, 15)
    for group, values in zip(maps.layers, maps.bias, strict=True):
        for layer in group:
            expected = model.position(model.grid)[layer].bias[:, 1:, 1:].double()
            np.testing.assert_array_equal(values, expected.masked_fill(expected.isneginf(), torch.nan))


@pytest.mark.parametrize("encoding", ["relative_bias", "continuous_bias"])
def test_a_map_after_lapes_norm_is_the_normalized_bias(encoding):
    model = tiny(encoding, "lape").double()
    for module in model.position.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-14  # far below the variance of a bias at its start
    maps = bias_maps(model)
    np.testing.assert_allclose(maps.bias.mean(-1), 0, atol=1e-12)
    np.testing.assert_allclose(maps.spread, 1, atol=1e-6)


def test_a_bias_beside_a_table_and_beside_one_of_the_queries_is_read_and_others_have_none():
    beside = tiny("learnable+relative_bias")
    assert bias_maps(beside).layers == ((0,), (1,), (2,))
    both = tiny("shaw+bucketed_bias")
    bias = both.position(both.grid)[0].bias.constant[:, 1:, 1:].detach()
    np.testing.assert_array_equal(bias_maps(both).bias, bias.double()[None])
    for encoding in ("learnable", "none", "shaw", "irpe", "rope", "peg"):
        assert bias_maps(tiny(encoding)) is None
    assert bias_maps(tiny("relative_bias", "default(layers=2)")).layers == ((0,), (1,))


def test_a_window_has_the_maps_of_the_window_in_every_stage():
    model = graticule.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, embed_dim=12, depths=(2, 1), num_heads=(3, 6), window_size=3
    )
    first, second = (bias_maps(model, stage=stage) for stage in (0, 1))
    assert first.grid == Grid(3, 3) and first.layers == ((0,), (1,)) and first.bias.shape[1] == 3
    assert second.grid == Grid(3, 3) and second.layers == ((0,),) and second.bias.shape[1] == 6
    assert model(images()).shape == (2, 1000)
    with pytest.raises(ValueError, match="`stage` must be from 0 to 1"):
        bias_maps(model, stage=2)


def test_keys_after_a_query_of_a_text_are_not_seen():
    model = graticule.create_language_model("lm_nano", vocab_size=9, context=4, encoding="bucketed_bias")
    with torch.no_grad():  # the farther, the less
        model.position.encoding.relative_attention_bias.copy_(-torch.arange(32.0)[:, None])
    maps = bias_maps(model)
    assert maps.grid.shape == (1, 4) and maps.unit == "tokens"
    assert np.isnan(maps.bias[0, 0][np.triu_indices(4, 1)]).all()
    assert np.isfinite(maps.bias[0, 0][np.tril_indices(4)]).all()
    # query i without a bias looks back over i / 2 tokens
    assert maps.uniform_distance == pytest.approx((0 + 0.5 + 1 + 1.5) / 4)
    assert (maps.reach < maps.uniform_distance).all()


def test_the_numbers_of_a_map_by_hand():
    step = math.log(2)
    maps = BiasMaps(Grid(1, 2), ((0, 1),), np.array([[[[0, 0], [0, 0]], [[step, 0], [0, step]]]]))
    # softmax of (ln 2, 0) is (2/3, 1/3); the other token is one away
    np.testing.assert_allclose(maps.reach, [[1 / 2, 1 / 3]])
    np.testing.assert_allclose(maps.spread, [[0, step / 2]])
    assert maps.uniform_distance == pytest.approx(1 / 2)
    assert maps.summary()[1] == ("0-1", "0.000 to 0.347", "0.33 to 0.50", "67 to 100 %")


@pytest.mark.parametrize(("encoding", "rows"), [("relative_bias", 3), ("bucketed_bias", 1)])
def test_a_sheet_has_a_row_per_map_and_two_panels_per_head(encoding, rows):
    figure = bias_map_sheet(bias_maps(tiny(encoding, img_size=(24, 40))), "a model")
    assert len(figure.axes) == rows * (2 * 3 + 1)  # plus the color scale
    assert png(figure).startswith(b"\x89PNG")
