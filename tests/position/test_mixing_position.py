"""Mixing of tokens: the matrix of all pairs and the product by displacement have equal results."""

import copy

import pytest
import torch
from torch import Tensor

import graticule
from graticule import Grid, fold, unfold
from graticule.encodings.forms.mixing import MixingPosition
from graticule.encodings.gqpe import QuadraticMixing
from graticule.encodings.lrpe import LearnableMixing, MixingSum
from graticule.encodings.sgu import DenseMixing
from graticule.layers.gating import mix_tokens
from graticule.position import displacement as displacement_module
from graticule.position.layer import LayerPosition
from in_turn import in_turn
from tiny import draw, gradients, spec

GMLP = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 16, "num_blocks": 3, "groups": 4, "num_classes": 5}
POSMLP = {
    "img_size": 64,
    "embed_dim": 16,
    "depths": (2, 1, 2, 1),
    "windows": (4, 4, 4, 2),
    "groups": (2, 4, 4, 8),
    "num_classes": 5,
}
MODELS = [("gmlp_s16_224", GMLP, (48, 32)), ("posmlp_tiny_224", POSMLP, (64, 96))]
models = pytest.mark.parametrize(("name", "sizes", "other"), MODELS, ids=["gmlp", "posmlp"])
BY_DISPLACEMENT = ["lrpe", "glrpe", "gqpe", "ggqpe"]
by_displacement = pytest.mark.parametrize("encoding", BY_DISPLACEMENT)
BUILDERS = {
    "sgu": DenseMixing,
    "lrpe": LearnableMixing,
    "glrpe": lambda grid: LearnableMixing(grid, 2),
    "lrpe_m": lambda grid: MixingSum(DenseMixing(grid), LearnableMixing(grid)),
    "gqpe": QuadraticMixing,
    "ggqpe": lambda grid: QuadraticMixing(grid, 2),
}


def built(name, encoding, product, **sizes):
    """Return a model in float64 and evaluation mode with all parameters drawn, centers up to a few patches away."""
    torch.manual_seed(1)
    model = draw(graticule.create_model(name, encoding=spec(encoding, product=product), **sizes))
    with torch.no_grad():
        for part in model.position.modules():
            if isinstance(part, QuadraticMixing):
                part.center.mul_(10)
                part.matrix.mul_(3)
    return model.double().eval()


def image(model, size=None, batch=2):
    """Return images of the model's size, or of another one."""
    return torch.randn(batch, model.in_chans, *(size or model.img_size), dtype=next(model.parameters()).dtype)


def position(encoding, grid, product="auto", **kwargs):
    """Return the position of two layers."""
    return MixingPosition([BUILDERS[encoding](grid) for _ in range(2)], product=product, **kwargs)


def assert_mixes_by(kind, given):
    """Check that tokens are mixed by the 'matrix' of all pairs, or by 'displacement'."""
    ways = [
        "matrix" if isinstance(layer.mixing, Tensor) or layer.mixing.weights is not None else "displacement"
        for layer in given
    ]
    assert ways == [kind] * len(given)


# Equal results


@models
@by_displacement
def test_both_products_give_the_same_output_at_any_size(name, sizes, other, encoding):
    by_matrix, other_way = (built(name, encoding, product, **sizes) for product in ("matrix", "displacement"))
    assert by_matrix.state_dict().keys() == other_way.state_dict().keys()
    for size in (None, other):
        x = image(by_matrix, size)
        assert_mixes_by("matrix", by_matrix.position(by_matrix.grid_at(x.shape[-2:])))
        assert_mixes_by("displacement", other_way.position(other_way.grid_at(x.shape[-2:])))
        torch.testing.assert_close(other_way(x), by_matrix(x), rtol=0, atol=1e-10)


@models
@by_displacement
def test_both_products_give_the_same_gradient_to_every_parameter(name, sizes, other, encoding):
    found = []
    for product in ("matrix", "displacement"):
        model = built(name, encoding, product, **sizes).train()
        torch.manual_seed(2)
        model(image(model)).square().sum().backward()
        found.append(gradients(model))
    for parameter, gradient in found[0].items():
        torch.testing.assert_close(found[1][parameter], gradient, rtol=1e-9, atol=1e-9, msg=parameter)


@by_displacement
@in_turn("bias", [True, False])
def test_a_gating_unit_mixes_by_a_table_as_by_its_matrix(encoding, bias):
    grid = Grid(5, 7)
    made = draw(position(encoding, grid, "displacement", bias=bias)).double()
    x = torch.randn(2, 35, 8, dtype=torch.float64)
    for layer in made(grid):
        assert (layer.spatial_bias is not None) == bias
        expected = mix_tokens(x, layer.mixing.matrix(), layer.spatial_bias)
        torch.testing.assert_close(mix_tokens(x, layer.mixing, layer.spatial_bias), expected, rtol=0, atol=1e-10)


@in_turn("product", ["matrix", "displacement"])
@in_turn("encoding", BY_DISPLACEMENT)
def test_the_shapes_are_those_that_are_documented(encoding, product):
    grid = Grid(3, 4)
    groups = 2 if encoding.startswith("g") and encoding != "gqpe" else 1
    for at in (grid, Grid(5, 2)):
        for layer in position(encoding, grid, product)(at):
            assert layer.spatial_bias.shape == (at.patches,)
            assert layer.mixing.table.shape == (groups, 2 * at.height - 1, 2 * at.width - 1)
            assert layer.mixing.grid == at
            if product == "matrix":
                assert layer.mixing.weights.shape == (groups, at.patches, at.patches)


# Choice of the two


@by_displacement
@in_turn(("grid", "kind"), [(Grid(31, 33), "matrix"), (Grid(32, 32), "displacement")])
def test_auto_mixes_by_displacement_from_1024_patches_on(encoding, grid, kind):
    assert_mixes_by(kind, position(encoding, grid)(grid))


@pytest.mark.parametrize("encoding", ["lrpe", "ggqpe"])
def test_auto_follows_the_grid_that_comes_in(encoding):
    small, large = Grid(3, 4), Grid(16, 64)
    for own, other, kind, others in (
        (small, large, "matrix", "displacement"),
        (large, small, "displacement", "matrix"),
    ):
        made = position(encoding, own)
        assert_mixes_by(kind, made(own))
        assert_mixes_by(others, made(other))
        made.set_grid(other)
        assert_mixes_by(others, made(other))
        assert_mixes_by(kind, made(own))


def test_auto_counts_the_patches_of_a_window():
    made = MixingPosition([QuadraticMixing(Grid(32, 32))])
    assert_mixes_by("displacement", made(Grid(64, 64).in_windows([32])))
    assert_mixes_by("matrix", made(Grid(31, 64).in_windows([32])))  # windows of 31 x 32
    assert_mixes_by("matrix", made(Grid(64, 64).in_windows([7])))


@in_turn("product", ["matrix", "displacement"])
@in_turn("encoding", BY_DISPLACEMENT)
def test_a_product_that_is_chosen_stays_at_any_size(encoding, product):
    for own, other in ((Grid(3, 4), Grid(32, 32)), (Grid(32, 32), Grid(3, 4))):
        made = position(encoding, own, product)
        for at in (own, other):
            assert_mixes_by(product, made(at))
        made.set_grid(other)
        for at in (own, other):
            assert_mixes_by(product, made(at))


@in_turn("encoding", ["sgu", "lrpe_m"])
@in_turn("product", ["auto", "matrix", "displacement"])
def test_what_has_no_table_of_displacements_is_always_a_matrix(encoding, product):
    grid, other = Grid(3, 4), Grid(4, 5)
    made, plain = draw(position(encoding, grid, product)), position(encoding, grid, "matrix")
    plain.load_state_dict(made.state_dict())
    for at in (grid, other):
        assert_mixes_by("matrix", made(at))
        assert all(torch.equal(a.mixing, b.mixing) for a, b in zip(made(at), plain(at), strict=True))


@pytest.mark.parametrize("encoding", BUILDERS)
def test_no_index_of_all_pairs_is_held_or_made(encoding, monkeypatch):
    """An index of 1,024 patches takes 8 MB, and longer to compute than the weights."""
    made = position(encoding, Grid(4, 5))
    assert not list(made.buffers())
    monkeypatch.setattr(Grid, "offsets", None)
    monkeypatch.setattr(displacement_module, "displacement_index", None)
    assert len(made(Grid(4, 5))) == len(made(Grid(5, 6))) == 2


@pytest.mark.parametrize("product", ["auto", "displacement"])
def test_a_dense_matrix_of_1024_patches_is_a_matrix_too(product):
    grid = Grid(32, 32)
    assert_mixes_by("matrix", MixingPosition([DenseMixing(grid)], product=product)(grid))


# Folding


def held_tables(model):
    """Return the mixing weights of each layer of a folded model."""
    return [layer.mixing for layer in model.position(model.grid)]


@models
@by_displacement
@in_turn("product", ["matrix", "displacement"])
def test_folding_holds_the_tables_and_changes_neither_output_nor_state(name, sizes, other, encoding, product):
    model = built(name, encoding, product, **sizes)
    x, state = image(model), {key: value.clone() for key, value in model.state_dict().items()}
    before = model(x)
    fold(model)
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-12)
    assert_mixes_by(product, model.position(model.grid))
    buffers = {id(buffer) for buffer in model.position.buffers()}
    held = [part for mixing in held_tables(model) for part in (mixing.table, mixing.weights) if part is not None]
    assert all(id(part) in buffers and not part.requires_grad for part in held)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    unfold(model)
    assert torch.equal(model(x), before)
    assert all(held.table.requires_grad for held in held_tables(model))


@by_displacement
def test_a_folded_model_makes_no_table_anew(encoding):
    model = fold(built("gmlp_s16_224", encoding, "displacement", **GMLP))
    tables = [mixing.table for mixing in held_tables(model)]
    assert all(mixing.table is table for mixing, table in zip(held_tables(model), tables, strict=True))


@models
@by_displacement
def test_a_folded_model_folds_again_when_a_state_is_loaded_or_another_size_is_set(name, sizes, other, encoding):
    model, source = (built(name, encoding, "displacement", **sizes) for _ in range(2))
    draw(source)
    x = image(model)
    fold(model).load_state_dict(source.state_dict())
    torch.testing.assert_close(model(x), source(x), rtol=0, atol=1e-12)
    x = image(model, other)
    there = source(x)
    model.set_input_size(other)
    torch.testing.assert_close(model(x), there, rtol=0, atol=1e-12)
    source.set_input_size(other)
    torch.testing.assert_close(source(x), there, rtol=0, atol=1e-12)


# Behavior as a module


@models
@by_displacement
def test_in_bfloat16_it_is_as_close_to_float64_as_the_matrix_is(name, sizes, other, encoding):
    """Only the rounding of tokens and linear layers remains: at most twice the mean error of the matrix."""
    errors = []
    for product in ("matrix", "displacement"):
        model = built(name, encoding, product, **sizes).bfloat16()
        x = image(model, batch=8)
        exact = copy.deepcopy(model).double()(x.double())
        y = model(x)
        assert y.dtype == torch.bfloat16 and y.isfinite().all()
        errors.append((y - exact).abs().mean())
    assert errors[1] < 2 * errors[0]


@pytest.mark.parametrize(
    ("name", "sizes", "encoding"),
    [("gmlp_s16_224", GMLP, "lrpe"), ("gmlp_s16_224", GMLP, "ggqpe"), ("posmlp_tiny_224", POSMLP, "gqpe")],
)
def test_a_whole_model_is_one_graph_with_the_same_gradients(name, sizes, encoding):
    two_stages = {"depths": (1, 1), "windows": (4, 4), "groups": (2, 2), "mlp_ratios": (2, 2)}
    small = sizes | ({"num_blocks": 1} if name.startswith("gmlp") else two_stages)
    model = built(name, encoding, "displacement", **small)
    x = image(model)
    model(x).square().sum().backward()
    eager = {key: gradient.clone() for key, gradient in gradients(model).items()}
    model.zero_grad()
    output = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(output, model(x), rtol=0, atol=1e-12)
    output.square().sum().backward()
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, eager[key], rtol=1e-10, atol=1e-10, msg=key)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("encoding", ["lrpe", "ggqpe"])
def test_a_whole_model_is_exported(encoding, folded):
    model = built("gmlp_s16_224", encoding, "displacement", **GMLP | {"num_blocks": 1})
    model = fold(model) if folded else model
    x = image(model)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x), rtol=0, atol=1e-12)


# Refusals


@in_turn("product", ["fourier", "", "Matrix", 3])
def test_a_product_that_is_none_is_refused_by_name(product):
    with pytest.raises((ValueError, TypeError), match=r"`product` must be one of auto, matrix, displacement[,;] got"):
        MixingPosition([LearnableMixing(Grid(3, 4))], product=product)
    with pytest.raises(ValueError, match=r"`product` of encoding ggqpe .*'auto', 'matrix' or 'displacement'.*got"):
        graticule.create_model("gmlp_s16_224", encoding=spec("ggqpe", product=product), **GMLP)


def test_no_encodings_are_refused():
    with pytest.raises(ValueError, match="`encodings` must be one per layer, got none"):
        MixingPosition([])


def test_a_layer_takes_one_mixing_encoding_by_table_too():
    layer = LayerPosition(mixing=LearnableMixing(Grid(3, 4)).displacements(Grid(3, 4)))
    with pytest.raises(ValueError, match="`mixing` must be given by one encoding at most"):
        layer.merge(LayerPosition(mixing=torch.zeros(1, 12, 12)))
