"""Attention maps are the weights of the forward pass, for every family, and computing them changes nothing."""

import weakref

import numpy as np
import pytest
import torch
from torch import nn

import graticule
from graticule.analysis.attention import attention_maps, attention_summary
from graticule.external.attention_map import AttentionMap
from graticule.external.traced_model import view_of
from graticule.lab.figures.attention_sheet import attention_on_image, attention_sheet
from graticule.position.grid import Grid
from in_turn import in_turn, refusals
from tiny import assert_same, draw, images, tiny

SWIN = {"img_size": 64, "embed_dim": 12, "num_heads": (1, 2, 3, 4), "depths": (2, 2, 1, 1), "window_size": 4}


@in_turn("encoding", ["none", "learnable", "relative_bias", "shaw", "peg", "convolutional_projection"])
def test_the_weights_are_those_that_mix_the_values(encoding):
    model = draw(tiny(encoding)).double().eval()
    x = images(24, 40, dtype=torch.float64)
    mixed = []
    attention = model.blocks[1].attn
    inputs = []
    attention.register_forward_pre_hook(lambda module, args: inputs.append(args))
    attention.register_forward_hook(lambda module, args, output: mixed.append(output))
    (layer,) = attention_maps(model, x, [1])
    tokens, position, _ = inputs[-1]
    seen = tokens if position.inputs is None else position.inputs(tokens)[2]
    v = nn.functional.linear(seen, attention.qkv.weight.chunk(3)[2], attention.qkv.bias.chunk(3)[2])
    v = v.unflatten(-1, (3, 8)).transpose(1, 2)
    again = attention.proj((torch.from_numpy(layer.weights) @ v).transpose(1, 2).flatten(2))
    assert_same(again, mixed[-1], 1e-12)
    np.testing.assert_allclose(layer.weights.sum(-1), 1, atol=1e-12)
    assert layer.weights.shape == (2, 3, 16, 16) and layer.queries == Grid(3, 5, prefix=1) == layer.keys


def test_without_position_a_permutation_of_the_patches_permutes_the_map():
    model = draw(tiny("learnable")).double().eval()
    x = images(dtype=torch.float64)
    turned = x.roll(8, -1)  # one patch
    (plain,) = attention_maps(model, x, [1], without_position=True)
    (moved,) = attention_maps(model, turned, [1], without_position=True)
    order = torch.arange(16).view(4, 4).roll(1, 1).flatten().numpy()
    for head in range(3):
        np.testing.assert_allclose(moved.patches(head), plain.patches(head)[order][:, order], atol=1e-12)
    (told,) = attention_maps(model, turned, [1])
    assert np.abs(told.weights - moved.weights).max() > 1e-3


def one_map(weights, queries, keys=None, layer=0):
    return AttentionMap(layer, np.asarray(weights, float), queries, keys or queries)


def test_the_distance_is_that_of_the_hand():
    line = Grid(1, 3)
    itself = one_map(np.eye(3)[None, None], line)
    uniform = one_map(np.full((1, 1, 3, 3), 1 / 3), line)
    assert itself.distance(0) == 0 and uniform.distance(0) == pytest.approx((1 + 2 + 1 + 1 + 2 + 1) / 9)
    # a key of two patches lies between them
    coarse = one_map(np.ones((1, 1, 2, 1)), Grid(1, 2), Grid(1, 1))
    assert coarse.distance(0) == pytest.approx(0.5)


def test_the_sheet_has_a_row_per_layer_and_a_column_per_model_and_head():
    x = images()
    maps = {name: attention_maps(tiny(name), x, [0, 1]) for name in ("learnable", "peg", "none")}
    figure = attention_sheet(maps, heads=[0, 2], title="title")
    panels = [ax for ax in figure.axes if ax.images]
    assert len(panels) == 3 * 2 * 2
    np.testing.assert_array_equal(panels[0].images[0].get_array(), maps["learnable"][0].patches(0))
    np.testing.assert_array_equal(panels[-1].images[0].get_array(), maps["none"][1].patches(2))
    assert panels[0].get_title() == "head 0" and panels[0].get_ylabel() == "layer 0"
    assert [text.get_text() for text in figure.texts] == ["learnable", "peg", "none", "title"]
    scales = [[panel.images[0].get_clim() for panel in panels[start : start + 6]] for start in (0, 6)]
    for row, layer in zip(scales, (0, 1), strict=True):  # one color scale per head, for all models
        for head, of_head in zip((0, 2), (row[::2], row[1::2]), strict=True):
            end = max(np.quantile(layers[layer].patches(head), 0.995) for layers in maps.values())
            assert of_head == [(0, pytest.approx(end))] * 3
    assert panels[1].get_xlabel().endswith(f"\n0 to {scales[0][1][1]:.2g}")


@pytest.mark.parametrize("share", [(0.0, 0.0), (0.5, 0.4), (0.99, 0.99)])
def test_the_map_of_a_query_is_its_row(share):
    model = draw(tiny("learnable")).eval()
    (layer,) = attention_maps(model, images(24, 40), [1])
    row, column = int(3 * share[0]), int(5 * share[1])
    weights, place, shape = layer.of_query(2, share, 24 / 40, 1)
    assert place == (row, column) and shape == (3, 5)
    np.testing.assert_array_equal(weights.ravel(), layer.weights[1, 2, 1 + 5 * row + column, 1:])


def test_the_map_of_a_query_in_a_window_has_no_color_outside_of_it():
    model = draw(graticule.create_model("swin_tiny_patch4_window7_224", num_classes=5, **SWIN)).eval()
    (layer,) = attention_maps(model, images(64, 64), [0])
    weights, place, shape = layer.of_query(0, (0.5, 0.25), 1.0, 1)
    assert shape == (16, 16) and place == (8, 4)
    known = np.zeros((16, 16), bool)
    known[8:12, 4:8] = True  # windows of 4 that are not shifted
    np.testing.assert_array_equal(np.isfinite(weights), known)
    np.testing.assert_allclose(weights[known], layer.weights[16 + 2 * 4 + 1, 0, 0])


def test_attention_is_drawn_over_the_image_with_the_query_marked():
    model = draw(tiny("learnable")).eval()
    maps = {"a": attention_maps(model, images(24, 40), [0, 2])}
    pixels = np.random.default_rng(0).random((24, 40, 3))
    figure = attention_on_image(maps, pixels, (0.5, 0.5), heads=[0, 1])
    panels = [ax for ax in figure.axes if len(ax.images) == 2]
    assert len(panels) == 4
    background, weights = panels[0].images
    np.testing.assert_allclose(background.get_array(), 0.35 + 0.65 * pixels.mean(-1))
    np.testing.assert_array_equal(weights.get_array(), maps["a"][0].of_query(0, (0.5, 0.5), 0.6)[0])
    box = panels[0].patches[-1]
    assert (box.get_x(), box.get_y(), box.get_width(), box.get_height()) == (15.5, 7.5, 8, 8)
    ends = [np.quantile(np.asarray(panel.images[1].get_array()), 0.995) for panel in panels]
    assert [panel.images[1].get_clim()[1] for panel in panels] == pytest.approx(ends)  # each head has its own scale
    with pytest.raises(ValueError, match="`query`"):
        attention_on_image(maps, pixels, (1.0, 0.5))


test_invalid_requests_are_refused = refusals(
    (lambda: attention_maps(tiny("peg"), images(), [3]), "from 0 to 2, got 3"),
    (lambda: attention_maps(tiny("peg"), images(), [-1]), "got -1"),
    (lambda: attention_maps(nn.Linear(2, 2), images()), "Linear"),
    (lambda: attention_sheet({}), "`maps`"),
    (lambda: attention_sheet({"a": attention_maps(tiny("peg"), images(), [0])}, heads=[3]), "`heads`"),
    (
        lambda: attention_sheet(
            {"a": attention_maps(tiny("peg"), images(), [0]), "b": attention_maps(tiny("peg"), images(), [1])}
        ),
        "same layers",
    ),
)


def test_a_summary_keeps_the_weights_of_the_first_image_alone(monkeypatch):
    view, weights, alive = view_of(tiny()), [], []
    attention = view.attention

    def watched(image):
        alive.append(sum(weight() is not None for weight in weights))
        maps = attention(image)
        weights.append(weakref.ref(maps[0].weights))
        return maps

    monkeypatch.setattr(view, "attention", watched)
    attention_summary(view, images(batch=4))
    assert alive == [0, 1, 1, 1]
