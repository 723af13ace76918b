"""Position correlations: laws, hand-computed cases, and the values read from a model."""

import numpy as np
import pytest
import torch

import graticule
from graticule.analysis.correlation import norm_coefficients, position_correlations
from graticule.analysis.similarity import Correlations, cosine_similarity, reach, two_dimensionality
from graticule.encodings.forms.absolute import JoinedPosition
from graticule.encodings.learnable import Learnable
from graticule.encodings.sinusoidal import Sinusoidal1d, Sinusoidal2d
from graticule.position.grid import Grid
from graticule.position.position import CombinedPosition
from in_turn import in_turn, refusals

GRIDS = [Grid(4, 4), Grid(3, 5, prefix=1)]


def nano(**kwargs):
    """Return a small model whose norms are not at their initial values."""
    torch.manual_seed(0)
    model = graticule.create_model("vit_nano_patch4_28", **kwargs)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            torch.nn.init.normal_(module.weight, 1, 0.3)
            torch.nn.init.normal_(module.bias, 0, 0.2)
    return model


def patches(table, grid):
    return grid.split(table.detach().double())[1].numpy()


def test_a_row_of_zeros_has_no_cosine():
    s = cosine_similarity(np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]))
    assert np.isnan(s[1]).all() and np.isnan(s[:, 1]).all() and s[0, 2] == pytest.approx(0.5**0.5)


class QueriesKeys(graticule.Joining):
    """Adds w to the inputs of queries and keys in every layer."""

    def join(self, *tables):
        (w,) = tables
        return [graticule.LayerPosition(inputs=lambda x: (x + w, x + w, x))] * self.layers, None


def test_a_table_that_a_joining_adds_to_queries_and_keys_is_compared_as_it_is():
    def build(grid, dim, depth, num_heads):
        return JoinedPosition([Learnable(grid, dim)], QueriesKeys(depth, 2))

    model = nano(position=build)
    result = position_correlations(model, untrained=2)
    w = patches(model.position.encodings[0].pos_embed[0], model.grid)
    assert result.sources[:2] == ("queries_keys",) * 2 and set(result.sources[2:]) == {None}
    for layer in (0, 1):
        np.testing.assert_allclose(result.similarity[layer], cosine_similarity(w), atol=1e-7)
    assert result.untrained.shape == (2,)


def test_reach_by_hand():
    line = Grid(1, 3)
    assert reach(np.eye(3), line) == 0 and reach(np.ones((3, 3)), line) == pytest.approx(8 / 9)
    s = np.array([[1.0, 0.5, 0.0], [0.5, 1.0, -1.0], [0.0, -1.0, 1.0]])  # a negative cosine has no weight
    assert reach(s, line) == pytest.approx((1 / 3 + 1 / 3 + 0) / 3)


def test_two_dimensionality_by_hand():
    grid = Grid(4, 4)
    dy, dx = (offset.abs().numpy() for offset in grid.offsets().unbind(-1))
    s = np.where((dy == 1) & (dx == 0), 0.6, np.where((dy == 0) & (dx == 1), 0.9, 0.0)) + np.eye(16)
    mean = (24 * 0.6 + 24 * 0.9) / 240  # of 16 * 15 ordered pairs, 2 * 12 are neighbors along each axis
    assert two_dimensionality(s, grid) == pytest.approx((0.6 - mean) / (0.9 - mean))


@pytest.mark.parametrize("grid", [Grid(2, 2), Grid(5, 5), Grid(7, 7), Grid(3, 5)])
def test_two_dimensionality_of_a_random_table_is_undefined(grid):
    tables = np.random.default_rng(0).normal(size=(40, grid.patches, 64))
    assert np.isnan([two_dimensionality(cosine_similarity(table), grid) for table in tables]).all()


@pytest.mark.parametrize("grid", GRIDS)
def test_two_dimensionality_of_one_axis_is_0_of_the_axes_1_and_of_a_sequence_between(grid):
    for axis in (0, 1):
        one_hot = np.eye(max(grid.shape))[grid.coordinates()[:, axis].numpy()]
        assert two_dimensionality(cosine_similarity(one_hot), grid) == 0
    tables = (kind(grid, 64)(grid) for kind in (Sinusoidal1d, Sinusoidal2d))
    sequence, axes = (two_dimensionality(cosine_similarity(patches(table, grid)), grid) for table in tables)
    assert axes == pytest.approx(1, abs=1e-5)  # both axes have the same formula
    assert sequence < 0.2


def test_two_dimensionality_is_undefined_where_no_axis_is_known():
    for similarity, grid in ((np.eye(6), Grid(2, 3)), (np.ones((6, 6)), Grid(2, 3)), (np.ones((6, 6)), Grid(1, 6))):
        assert np.isnan(two_dimensionality(similarity, grid))


def correlations(*shares, untrained=None):
    """Return layers from each token similar only to itself, 0, to all tokens equal, 1; NaN without position."""
    layers = np.stack([s * np.ones((6, 6)) + (1 - s) * np.eye(6) for s in shares])
    others = None if untrained is None else np.array(untrained)
    return Correlations(Grid(2, 3), layers, ("after_norm",) * len(shares), untrained=others)


def test_hierarchy_is_the_rank_correlation_of_reach_with_depth():
    for expected, shares in (
        (1, (0.1, 0.2, 0.5, 0.9)),
        (-1, (0.9, 0.5, 0.2)),
        (0.5, (0.1, 0.5, 0.2)),
        (1, (np.nan, 0.1, 0.2, 0.5)),
        (np.nan, (0.1, 0.9)),
        (np.nan, (0.5, 0.5, 0.5 + 1e-9)),  # rounding is not a hierarchy
    ):
        assert correlations(*shares).hierarchy == pytest.approx(expected, nan_ok=True)


def test_the_p_value_is_the_share_of_untrained_models_with_as_large_a_range_of_reach():
    assert correlations(0, np.nan, 1).reach_range == pytest.approx(1)  # as a share of a uniform map's
    assert np.isnan(correlations(0.5).reach_range)
    shares = (0.2, 0.4, 0.8)
    size = correlations(*shares).reach_range
    assert correlations(*shares, untrained=[size / 2, size, 2 * size]).p_value == pytest.approx(3 / 4)
    beyond = correlations(*shares, untrained=[0.0] * 39)
    assert beyond.p_value == pytest.approx(1 / 40) and "p = 0.025, 39 untrained models" in beyond.verdict
    assert "rank correlation with depth +1.00" in beyond.verdict
    drowned = correlations(*shares, untrained=[1.0] * 39).verdict
    assert "within what untrained models show (p = 1)" in drowned and "rank correlation" not in drowned
    # equal layers are like untrained ones, despite rounding
    assert correlations(0.5, 0.5 + 1e-12, untrained=[0.0] * 39).p_value == 1


@pytest.mark.parametrize("size", [28, (20, 32)])
def test_the_default_joining_sees_the_table_through_each_blocks_norm(size):
    model = nano(img_size=size)
    result = position_correlations(model)
    w = model.position(model.grid)[0].added_to_stream
    np.testing.assert_allclose(result.initial, cosine_similarity(patches(w, model.grid)))
    for layer, block in enumerate(model.blocks):
        seen = patches(torch.nn.functional.layer_norm(w, (64,), block.norm1.weight, block.norm1.bias, 1e-6), model.grid)
        np.testing.assert_allclose(result.similarity[layer], cosine_similarity(seen), atol=1e-5)
    assert result.sources == ("stream",) * 6 and result.similarity.dtype == np.float64
    assert result.center_maps.shape == (6, *model.grid.shape)
    np.testing.assert_allclose(result.center_maps[:, model.grid.height // 2, model.grid.width // 2], 1)


@in_turn("joining", ["lape", "lape_sharing"])
@in_turn("encoding", ["learnable", "sinusoidal_1d", "sinusoidal_2d"])
def test_layers_with_lape_see_its_tables(joining, encoding):
    model = nano(joining=joining, encoding=encoding)
    result = position_correlations(model)
    for layer, position in enumerate(model.position(model.grid)):
        seen = patches(position.after_norm, model.grid)
        np.testing.assert_allclose(result.similarity[layer], cosine_similarity(seen))
    assert result.sources == ("after_norm",) * 6
    table = model.position.encodings[0](model.grid)
    np.testing.assert_allclose(result.initial, cosine_similarity(patches(table, model.grid)))


def test_a_layer_with_both_sees_their_sum():
    model, other = nano(), nano(joining="lape(layers=3)")
    model.position = CombinedPosition([model.position, other.position])
    result = position_correlations(model)
    assert result.sources == ("stream + after_norm",) * 3 + ("stream",) * 3
    first, second, *_ = model.position(model.grid)
    seen = patches(model.blocks[1].norm1(first.added_to_stream) + second.after_norm, model.grid)
    np.testing.assert_allclose(result.similarity[1], cosine_similarity(seen), atol=1e-5)
    assert result.initial is None


test_another_model_and_a_negative_number_of_untrained_models_are_refused = refusals(
    (lambda: position_correlations(torch.nn.Linear(2, 2)), "`model` must be a backbone"),
    (lambda: position_correlations(nano(), untrained=-1), "`untrained` must be at least 0, got -1"),
)


@pytest.mark.parametrize("kwargs", [{}, {"joining": "unshared"}, {"joining": "lape(layers=2)"}])
def test_a_saved_file_has_all_numbers(tmp_path, kwargs):
    result = position_correlations(nano(**kwargs), untrained=2)
    path = result.save(tmp_path / "new" / "found.npz")
    assert [p.name for p in path.parent.iterdir()] == ["found.npz"]
    with np.load(path, allow_pickle=False) as arrays:  # without the library
        assert tuple(arrays["grid"]) == (*result.grid.shape, result.grid.prefix)
        assert [source or None for source in arrays["sources"]] == list(result.sources)
        assert ("initial" in arrays) == (result.initial is not None)
        for name in arrays.keys() - {"grid", "sources"}:
            np.testing.assert_array_equal(arrays[name], np.array(getattr(result, name)))


@pytest.mark.parametrize("joining", ["default", "unshared", "lape"])
def test_layers_of_a_language_model_see_their_tables(joining):
    torch.manual_seed(0)
    model = graticule.create_language_model("lm_nano", vocab_size=7, context=12, joining=joining).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    result = position_correlations(model)
    assert result.grid == Grid(1, 12) and result.unit == "tokens" and result.summary()[0][2] == "reach (tokens)"
    stream = torch.zeros(12, 64, dtype=torch.float64)
    for layer, (block, position) in enumerate(zip(model.blocks, model.positions(12), strict=True)):
        if position.added_to_stream is not None:
            stream = stream + position.added_to_stream
        seen = block.norm1(stream) if position.after_norm is None else position.after_norm
        np.testing.assert_allclose(result.similarity[layer], cosine_similarity(seen.detach().numpy()), atol=1e-12)
    assert result.sources == (("after_norm",) if joining == "lape" else ("stream",)) * 4


@in_turn("joining", ["default", "shared", "lape_sharing", "lape"])
@in_turn("encoding", ["learnable", "sinusoidal_2d"])
def test_untrained_norms_explain_themselves(encoding, joining):
    torch.manual_seed(3)
    model = graticule.create_model("vit_nano_patch4_28", img_size=20, depth=4, encoding=encoding, joining=joining)
    assert position_correlations(model, untrained=3).verdict.endswith("within what untrained models show (p = 1)")
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            torch.nn.init.normal_(module.weight, 1, 0.02)
            torch.nn.init.normal_(module.bias, 0, 0.02)
    before = torch.random.get_rng_state()
    result = position_correlations(model, untrained=19)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert result.untrained.shape == (19,) and result.p_value >= 0.05
    # however small, the differences have ranks, and the ranks a correlation with depth
    assert result.reach_range < 0.03 and np.isfinite(result.hierarchy)


def test_layers_without_position_have_no_correlation():
    result = position_correlations(nano(joining="lape(layers=4)"))
    assert result.sources == ("after_norm",) * 4 + (None, None)
    assert np.isfinite(result.similarity[:4]).all() and np.isnan(result.similarity[4:]).all()
    assert np.isfinite(result.reach[:4]).all() and np.isnan(result.reach[4:]).all() and np.isfinite(result.hierarchy)
    nothing = position_correlations(nano(encoding="none"))
    assert nothing.sources == (None,) * 6 and nothing.initial is None
    assert np.isnan(nothing.similarity).all() and np.isnan(nothing.hierarchy)


def small(encoding="learnable", joining="default", name="vit_nano_patch4_28", **kwargs):
    """Return a model of two layers in float64, for images of 8 x 12 pixels, with large random weights."""
    sizes = {"img_size": (8, 12), "embed_dim": 8, "num_heads": 2, "depth": 2, "in_chans": 1, "num_classes": 3}
    torch.manual_seed(0)
    model = graticule.create_model(name, encoding=encoding, joining=joining, **{**sizes, **kwargs}).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@torch.no_grad()
def test_the_coefficients_of_two_channels_by_hand():
    # over two channels the standard deviation is half the distance: 1 for (0, 2), 2 for (1, 5), 3 for their sum (1, 7);
    # for (2, 0) + (1, 5) = (3, 5) it is 1 and 2 and 1
    model = small(img_size=(4, 8), embed_dim=2, num_heads=1, depth=1, global_pool="avg", class_token=False)
    model.patch_embed.proj.weight.zero_()[:, 0, 0, 0] = torch.tensor([-1.0, 1.0])
    model.patch_embed.proj.bias.fill_(1.0)
    model.position.encodings[0].pos_embed[:] = torch.tensor([1.0, 5.0])
    images = torch.zeros(1, 1, 4, 8, dtype=torch.float64)
    images[0, 0, 0, ::4] = torch.tensor([1.0, -1.0])
    result = norm_coefficients(model, images)
    expected = [[1 / 3, 1.0]], [[2 / 3, 2.0]], [[0.0, -2.0]]
    for value, numbers in zip(result, expected, strict=True):
        torch.testing.assert_close(value, torch.tensor([numbers], dtype=torch.float64))


@torch.no_grad()
def test_the_parts_of_every_layer_add_up_to_its_normalized_input():
    model, images, seen = small("learnable(std=1)"), torch.randn(3, 1, 8, 12, dtype=torch.float64), []
    norms = [model.block(0, index).norm1 for index in range(2)]
    hooks = [norm.register_forward_hook(lambda module, inputs, out: seen.append((inputs[0], out))) for norm in norms]
    for norm in norms:
        norm.eps = 0.0
    result = norm_coefficients(model.train(), images)
    assert model.training and result.tokens.shape == (2, 3, 7)  # 2 x 3 patches and a class token
    for hook in hooks:
        hook.remove()
    w = model.position(model.grid)[0].added_to_stream
    for norm, (inputs, out), *parts in zip(norms, seen, *result, strict=True):
        tokens, position, bias = (part[..., None] for part in parts)
        whole = tokens * norm(inputs - w) + position * norm(w) + bias * norm.bias
        torch.testing.assert_close(whole, out, rtol=1e-9, atol=1e-9)


test_coefficients_need_one_table_on_the_residual_stream = refusals(
    (lambda: torch.nn.Linear(2, 2).double(), "`model` must be a backbone of one stage, got Linear"),
    (lambda: graticule.create_model("pvt_tiny", img_size=32).double(), "`model` must be a backbone of one stage"),
    (lambda: small("learnable", "lape"), "one table to the embedded tokens.*got after_norm in the first layer"),
    (lambda: small("learnable", "shared"), "`model` must add one table to the embedded tokens"),
    (lambda: small("rope"), "`model` must add one table to the embedded tokens"),
    (lambda: small("none"), "got none in the first layer"),
    (lambda: small(pre_norm=True), "`model` must have blocks x \\+ f\\(LN\\(x\\)\\) and no norm before the first"),
    (lambda: small(block_layer="post_norm"), "`model` must have blocks"),
    (lambda: small(name="vit_lite_7_4_32"), "`model` must have blocks"),
    call=lambda model: norm_coefficients(model(), torch.randn(1, 1, 8, 12, dtype=torch.float64)),
)
