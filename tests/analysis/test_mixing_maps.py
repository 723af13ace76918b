"""Mixing maps of gated MLPs: maps are rows of the weights of the layers, numbers by hand, contents of figures."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import graticule
from graticule.analysis.mixing import MixingMap, MixingParts, mixing_maps, mixing_parts, save_mixing
from graticule.encodings.forms.mixing import MixingPosition
from graticule.lab.figures.layers import non_locality_plot
from graticule.lab.figures.mixing_sheet import bias_sheet, mixing_sheet, parts_sheet
from graticule.position.displacement import Displacements
from graticule.position.grid import Grid
from in_turn import in_turn, refusals
from tiny import assert_same, draw, images, render, spec, tiny

ENCODINGS = ["sgu", "lrpe", "lrpe_m", "glrpe", "gqpe", "ggqpe"]
QUADRATIC = ["gqpe", "ggqpe"]
#: A grid of 5 x 7, and grids of 6 x 10 and 3 x 5 in windows of 4 x 4 and 3 x 4.
SIZES = {
    "gmlp_nano_patch4_28": {"img_size": (20, 28), "embed_dim": 16, "num_blocks": 3, "groups": 4},
    "posmlp_nano_32": {"img_size": (24, 40), "embed_dim": 16, "depths": (1, 2), "windows": (4, 4), "groups": (2, 4)},
}
GMLP, POSMLP = SIZES
names = pytest.mark.parametrize("name", SIZES, ids=["gmlp", "posmlp"])


def gated(name=GMLP, encoding="ggqpe", **kwargs):
    return draw(graticule.create_model(name, encoding=encoding, **{**SIZES[name], **kwargs})).double().eval()


def stages(model):
    return [module for module in model.position.modules() if isinstance(module, MixingPosition)]


def full_weights(model, img_size=None):
    layers = [mixing.mixing for mixing in model.position(model.grid_at(img_size or model.img_size))]
    return [(mixing.matrix() if isinstance(mixing, Displacements) else mixing).detach() for mixing in layers]


def one_map(weights, query=(0, 0), **kwargs):
    weights = np.asarray(weights, float)
    values = {"layer": 0, "stage": 0, "softmax": False, "bias": None, "centers": None, "matrices": None} | kwargs
    return MixingMap(grid=Grid(*weights.shape[1:]), query=query, **{"logits": weights, "weights": weights, **values})


@names
@in_turn("encoding", ENCODINGS)
def test_a_map_is_the_row_of_its_query_in_the_weights_of_the_layer_at_any_size(name, encoding):
    model = gated(name, encoding)
    size, grids = {GMLP: ((32, 24), [(8, 6)] * 3), POSMLP: ((16, 32), [(4, 4), (2, 4), (2, 4)])}[name]
    assert [layer.grid.shape for layer in mixing_maps(model, size)] == grids
    for at, query in ((None, (0, 0)), (None, (2, 1)), (None, (1, 3)), (size, (1, 2))):
        positions = model.position(model.grid_at(at or model.img_size))
        maps = mixing_maps(model, at, query)
        for layer, weights, position in zip(maps, full_weights(model, at), positions, strict=True):
            assert layer.query == query and layer.weights.shape == (layer.groups, *layer.grid.shape)
            expected = weights[:, query[0] * layer.grid.width + query[1]].unflatten(-1, layer.grid.shape)
            np.testing.assert_allclose(layer.weights, expected.numpy(), rtol=0, atol=1e-14)
            np.testing.assert_array_equal(layer.bias.ravel(), position.spatial_bias.detach().numpy())


@names
def test_mixed_tokens_are_the_sum_of_the_tokens_by_the_map(name):
    model, seen = gated(name), []
    unit = model.block(0, 0).mlp_channels.gate
    unit.register_forward_hook(lambda module, inputs, out: seen.append((inputs[0], out)))
    model(images(*model.img_size, dtype=torch.float64)[:, :1])
    (layer,) = mixing_maps(model, query=(1, 3), layers=[0])
    height, width = layer.grid.shape  # of the first window
    x, out = (tokens.unflatten(1, model.grid.shape)[:, :height, :width].flatten(1, 2) for tokens in seen[0])
    at = width + 3
    u, v = x.chunk(2, -1)
    v = v.unflatten(-1, (layer.groups, -1))  # (B, N, groups, C / groups)
    mixed = torch.einsum("gn,bngc->bgc", torch.from_numpy(layer.weights).flatten(1), v).flatten(1)
    expected = u[:, at] * (mixed + layer.bias[1, 3])
    assert_same(out[:, at], expected, 1e-12)


@names
def test_layers_are_counted_through_all_stages_and_the_query_is_the_center_of_the_window_by_default(name):
    maps = mixing_maps(gated(name))
    assert [layer.layer for layer in maps] == [0, 1, 2]
    grids, at, groups, centers = {
        GMLP: ([(5, 7)] * 3, [0, 0, 0], [4, 4, 4], [(2, 3)] * 3),
        POSMLP: ([(4, 4), (3, 4), (3, 4)], [0, 1, 1], [2, 4, 4], [(2, 2), (1, 2), (1, 2)]),
    }[name]
    assert [layer.grid.shape for layer in maps] == grids and [layer.query for layer in maps] == centers
    assert [layer.stage for layer in maps] == at and [layer.groups for layer in maps] == groups


@names
@in_turn("encoding", ENCODINGS)
def test_logits_give_the_weights_and_a_folded_model_has_the_same_maps(name, encoding):
    model = gated(name, encoding)
    maps = mixing_maps(model, query=(1, 2))
    for layer, folded in zip(maps, mixing_maps(graticule.fold(model), query=(1, 2)), strict=True):
        assert layer.softmax == (encoding in QUADRATIC)
        if layer.softmax:
            powers = np.exp(layer.logits)
            np.testing.assert_allclose(layer.weights, powers / powers.sum((1, 2), keepdims=True), rtol=1e-12)
            np.testing.assert_allclose(layer.weights.sum((1, 2)), 1, rtol=1e-12)
        else:
            assert layer.centers is None and layer.matrices is None
            np.testing.assert_array_equal(layer.logits, layer.weights)
        np.testing.assert_array_equal(layer.weights, folded.weights)
        np.testing.assert_array_equal(layer.bias, folded.bias)


def test_logits_are_the_quadratic_form_around_the_center_seen_from_the_query_up_to_its_value_there():
    model = gated()
    (layer,) = mixing_maps(model, query=(1, 2), layers=[1])
    encoding = stages(model)[0].encodings[1]
    np.testing.assert_array_equal(layer.centers, encoding.center.detach().numpy())
    np.testing.assert_allclose(layer.matrices, (encoding.matrix @ encoding.matrix.mT).detach().numpy(), rtol=1e-12)
    for group in range(4):
        for row in range(5):
            for column in range(7):
                away = np.array([column - 2, row - 1]) - layer.centers[group]  # (x, y)
                center = layer.centers[group]  # at delta = 0 a logit is 0
                expected = (center @ layer.matrices[group] @ center - away @ layer.matrices[group] @ away) / 2
                assert layer.logits[group, row, column] == pytest.approx(expected, rel=1e-10, abs=1e-12)


@in_turn("query", [(3, 0), (0, 4), (-1, 0), (0, -1)])
def test_a_query_outside_is_refused_with_its_stage(query):
    model = gated(POSMLP)
    stage, grid = (1, "3 x 4") if query == (3, 0) else (0, "4 x 4")  # the first stage has a fourth row
    with pytest.raises(ValueError, match=rf"`query`.* inside the {grid} tokens that stage {stage} .*{query[0]}, "):
        mixing_maps(model, query=query)
    if stage == 1:  # it can be asked of the layers that have it
        (layer,) = mixing_maps(model, query=query, layers=[0])
        assert layer.query == query


test_unreadable_models_and_invalid_drawings_are_refused = refusals(
    (lambda maps: mixing_maps(gated(), layers=[3]), "`layers` must be from 0 to 2, got 3"),
    (lambda maps: mixing_maps(gated(), layers=[0, -1]), "got -1"),
    (lambda maps: mixing_maps(gated(), (20, 30)), "`img_size`"),
    (lambda maps: mixing_maps(tiny("learnable")), "`model` must mix its tokens by position.*VisionTransformer"),
    (lambda maps: mixing_maps(graticule.create_model("pvt_tiny")), "PyramidVisionTransformer"),
    (lambda maps: mixing_maps(nn.Linear(2, 2)), "Linear"),
    (lambda maps: mixing_sheet([]), "`maps` must have at least one layer"),
    (lambda maps: mixing_sheet(maps, values="logit"), "`values` must be weights or logits, got 'logit'"),
    (lambda maps: mixing_sheet(maps, groups=[4]), "`groups` must be from 0 to 3, got 4"),
    (lambda maps: mixing_sheet(maps, groups=[0, -1]), "got -1"),
    (lambda maps: bias_sheet([]), "`maps` must have a bias"),
    (lambda maps: bias_sheet([one_map(np.ones((1, 2, 3)))]), "option `bias` of the encoding is off"),
    (lambda maps: non_locality_plot({}), "at least one model"),
    call=lambda act: act(mixing_maps(gated(POSMLP))),
)


def test_the_distance_by_hand():
    assert one_map([[[0.25, 0.5, 0.25]]], (0, 1)).distance() == pytest.approx(0.5)
    assert one_map([[[0.25, 0.5, 0.25]]], (0, 0)).distance() == pytest.approx(1.0)
    uniform = one_map(np.full((1, 2, 3), 1 / 6), (0, 0))
    assert uniform.distance() == pytest.approx((0 + 1 + 2 + 1 + math.sqrt(2) + math.sqrt(5)) / 6)


def non_locality(*matrices):
    return one_map(np.zeros((len(matrices), 1, 1)), matrices=np.asarray(matrices, float)).non_locality()


def test_non_locality_by_hand():
    assert non_locality([[4.0, 0.0], [0.0, 1.0]]) == (pytest.approx(2.0), 1)
    assert non_locality([[2.0, 1.0], [1.0, 2.0]]) == (pytest.approx(math.sqrt(3 * 1)), 1)  # eigenvalues 3 and 1
    # a mean over groups of roots, not a root of a mean
    assert non_locality([[4.0, 0.0], [0.0, 1.0]], [[0.5, 0.0], [0.0, 0.5]]) == (pytest.approx(1.25), 2)


@pytest.mark.parametrize(
    ("form", "learned", "expected"),
    [
        ("alpha", [0.5, 2.0], (0.5 + 2.0) / 2),
        # the antisymmetric part has no effect in a quadratic form: [[2, 1], [1, 2]] and [[1, 0], [0, 4]] remain
        ("gamma", [[[2.0, 3.0], [-1.0, 2.0]], [[1.0, 5.0], [-5.0, 4.0]]], (math.sqrt(3) + 2) / 2),
        # the root of det(Gamma Gamma^T) is |det Gamma|
        ("gamma_gamma_t", [[[1.0, 2.0], [0.0, 3.0]], [[0.0, 2.0], [1.0, 5.0]]], (3 + 2) / 2),
    ],
)
def test_non_locality_is_of_the_matrix_in_the_quadratic_form(form, learned, expected):
    model = gated(groups=2, num_blocks=1, encoding=spec("ggqpe", form=form))
    stages(model)[0].encodings[0].matrix.data = torch.tensor(learned, dtype=torch.float64)
    (layer,) = mixing_maps(model)
    assert layer.non_locality() == (pytest.approx(expected), 2)


def test_the_arrays_are_saved_by_layer_and_are_those_of_the_maps(tmp_path):
    maps = mixing_maps(gated(POSMLP), layers=[0, 2])
    path = save_mixing(maps, tmp_path / "new" / "mixing.npz")
    parts = ("weights", "logits", "bias", "centers", "matrices")
    with np.load(path, allow_pickle=False) as arrays:
        assert set(arrays) == {f"layer{layer}_{part}" for layer in (0, 2) for part in parts}
        for layer_map in maps:
            for part in parts:
                np.testing.assert_array_equal(arrays[f"layer{layer_map.layer}_{part}"], getattr(layer_map, part))
        shapes = [arrays[f"layer2_{part}"].shape for part in parts]
    assert shapes == [(4, 3, 4), (4, 3, 4), (3, 4), (4, 2), (4, 2, 2)]


def panels(figure, rows, columns):
    """Return the panels of a sheet, one list per row, and the axes of its color bars."""
    axes = figure.axes
    return [axes[row * columns : (row + 1) * columns] for row in range(rows)], axes[rows * columns :]


def test_a_sheet_has_a_row_per_layer_and_a_column_per_group():
    maps = mixing_maps(gated(), layers=[0, 2])
    figure = render(mixing_sheet(maps, title="a model"))
    lines, bars = panels(figure, 2, 4)
    for line, layer in zip(lines, maps, strict=True):
        for group, ax in enumerate(line):
            np.testing.assert_array_equal(ax.images[0].get_array(), layer.weights[group])
            assert ax.get_title() == f"group {group} of 4"
        assert [ax.get_ylabel() for ax in line] == [f"layer {layer.layer}\n5 × 7", "", "", ""]
    assert [bar.get_ylabel() for bar in bars] == ["weight", "weight"] and figure.get_suptitle() == "a model"


def test_biases_are_drawn_in_a_panel_per_layer_on_one_scale():
    maps = mixing_maps(gated(POSMLP))
    figure = render(bias_sheet(maps, "a model"))
    (line,), (bar,) = panels(figure, 1, 3)
    for ax, layer in zip(line, maps, strict=True):
        np.testing.assert_array_equal(ax.images[0].get_array(), layer.bias)
        height, width = layer.grid.shape
        assert ax.get_title() == f"layer {layer.layer}"
        assert ax.get_xlabel() == f"{height} × {width}, mean {layer.bias.mean():.2f}"
    (limits,) = {ax.images[0].get_clim() for ax in line}
    assert limits == (min(layer.bias.min() for layer in maps), max(layer.bias.max() for layer in maps))
    assert bar.get_ylabel() == "bias b" and bar.get_ylim() == limits and figure.get_suptitle() == "a model"


def test_each_model_has_a_line_of_g_and_the_distance_of_every_layer():
    maps = {"gqpe": mixing_maps(gated(encoding="gqpe")), "ggqpe": mixing_maps(gated(POSMLP))}
    figure = render(non_locality_plot(maps, "two models"))
    left, right = figure.axes
    for index, layers in enumerate(maps.values()):
        assert list(left.lines[index].get_xdata()) == list(right.lines[index].get_xdata()) == [0, 1, 2]
        np.testing.assert_array_equal(left.lines[index].get_ydata(), [layer.non_locality()[0] for layer in layers])
        np.testing.assert_array_equal(right.lines[index].get_ydata(), [layer.distance() for layer in layers])
    assert "g" in left.get_title() and "distance" in right.get_title()
    assert left.get_xlabel() == right.get_xlabel() == "layer"
    assert "1 / patches²" in left.get_ylabel() and "patches" in right.get_ylabel()
    assert left.get_ylim()[0] == right.get_ylim()[0] == 0
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["gqpe", "ggqpe"]
    assert figure.get_suptitle() == "two models" and not left.texts


@names
@pytest.mark.parametrize("folded", [False, True])
def test_the_parts_of_lrpe_m_add_up_to_the_mixing_weights(name, folded):
    model = gated(name, "lrpe_m")
    weights = full_weights(model)
    model = graticule.fold(model) if folded else model
    parts = mixing_parts(model, query=(1, 3))
    assert [layer.layer for layer in parts] == [0, 1, 2]
    encodings = [part for stage in stages(model) for part in stage.encodings]
    for layer, total, encoding in zip(parts, weights, encodings, strict=True):
        assert layer.grid == encoding.grid and layer.query == (1, 3)
        np.testing.assert_array_equal(layer.dense[0], encoding.first.weight.detach())
        by_displacement = encoding.second.displacements(layer.grid).matrix().detach()
        np.testing.assert_array_equal(layer.relative, by_displacement)
        np.testing.assert_allclose(layer.total, total, rtol=0, atol=1e-14)


def by_hand(dense, relative):
    """Return the parts of a row of two tokens."""
    return MixingParts(0, 0, Grid(1, 2), (0, 1), np.array(dense, float), np.array(relative, float))


def test_the_share_of_the_table_is_that_of_the_squares_of_both():
    assert by_hand([[[3, 0], [0, 0]]], [[[0, 0], [4, 0]]]).relative_share() == pytest.approx(16 / 25)
    two_groups = [[[0, 0], [4, 0]], [[0, 3], [0, 0]]]  # the one dense matrix counts for both groups
    assert by_hand([[[3, 0], [0, 0]]], two_groups).relative_share() == pytest.approx(25 / 43)
    assert by_hand([[[0, 0], [0, 0]]], [[[0, 0], [0, 0]]]).relative_share() == 0.0


def test_a_sheet_of_parts_draws_both_their_sum_and_a_row_of_each_on_one_scale():
    parts = [
        by_hand([[[3, 0], [0, 1]]], [[[0, 0], [4, 0]], [[0, 0], [5, 7]]]),
        by_hand([[[1, 0], [0, 0]]], [[[0, 2], [0, 0]]]),
    ]
    figure = parts_sheet(parts, group=1, title="two layers")
    panels = [ax for ax in figure.axes if ax.images or len(ax.lines) > 2]
    images = [ax.images[0] for ax in panels if ax.images]
    assert len(images) == 6
    for first, layer in ((0, parts[0]), (3, parts[1])):
        group = min(1, len(layer.relative) - 1)
        drawn = layer.dense[0], layer.relative[group], layer.total[group]
        for image, values in zip(images[first : first + 3], drawn, strict=True):
            np.testing.assert_array_equal(image.get_array(), values)
            assert image.norm.vmax == -image.norm.vmin == (8 if first == 0 else 2)
    lines = [ax.lines[:3] for ax in panels if not ax.images]
    assert [line.get_ydata().tolist() for line in lines[0]] == [[0, 1], [5, 7], [5, 8]]
