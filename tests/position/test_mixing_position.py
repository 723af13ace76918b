"""Mixing of tokens: the matrix of all pairs and the product by displacement have equal results."""

import pytest
import torch
from torch import Tensor

import graticule
from graticule import Grid, fold
from graticule.encodings.forms.mixing import MixingPosition
from graticule.encodings.gqpe import QuadraticMixing
from graticule.encodings.lrpe import LearnableMixing, MixingSum
from graticule.encodings.sgu import DenseMixing
from graticule.position.layer import LayerPosition
from in_turn import in_turn
from tiny import draw, gradients, spec

GMLP = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 16, "num_blocks": 2, "groups": 4, "num_classes": 5}
POSMLP = {
    "img_size": 64,
    "embed_dim": 16,
    "depths": (2, 1, 1, 1),
    "windows": (4, 4, 4, 2),
    "groups": (2, 4, 4, 8),
    "num_classes": 5,
}
MODELS = [
    (name, sizes, other, encoding)
    for name, sizes, other in (("gmlp_s16_224", GMLP, (48, 32)), ("posmlp_tiny_224", POSMLP, (64, 96)))
    for encoding in ("lrpe", "glrpe")
]
models = in_turn(("name", "sizes", "other", "encoding"), MODELS)
BUILDERS = {
    "sgu": DenseMixing,
    "lrpe": LearnableMixing,
    "glrpe": lambda grid: LearnableMixing(grid, 2),
    "lrpe_m": lambda grid: MixingSum(DenseMixing(grid), LearnableMixing(grid)),
    "gqpe": QuadraticMixing,
    "ggqpe": lambda grid: QuadraticMixing(grid, 2),
}


def built(name, encoding, product, **sizes):
    """Return a model in float64 and evaluation mode with all parameters drawn."""
    torch.manual_seed(1)
    return draw(graticule.create_model(name, encoding=spec(encoding, product=product), **sizes)).double().eval()


def image(model, size=None, batch=2):
    """Return images of the model's size, or of another one."""
    return torch.randn(batch, model.in_chans, *(size or model.img_size), dtype=next(model.parameters()).dtype)


def position(encoding, grid, product="auto", **kwargs):
    """Return the position of two layers."""
    return MixingPosition([BUILDERS[encoding](grid) for _ in range(2)], product=product, **kwargs)


def way(layers):
    """Return how tokens are mixed in all layers: by the 'matrix' of all pairs, or by 'displacement'."""
    (name,) = {
        "matrix" if isinstance(layer.mixing, Tensor) or layer.mixing.weights is not None else "displacement"
        for layer in layers
    }
    return name


@models
def test_both_products_give_the_same_output_and_gradients_at_any_size(name, sizes, other, encoding):
    by_matrix, by_displacement = (built(name, encoding, product, **sizes) for product in ("matrix", "displacement"))
    for size in (None, other):
        x = image(by_matrix, size)
        for model, product in ((by_matrix, "matrix"), (by_displacement, "displacement")):
            assert way(model.position(model.grid_at(x.shape[-2:]))) == product
            model.zero_grad()
            model(x).square().sum().backward()
        torch.testing.assert_close(by_displacement(x), by_matrix(x), rtol=0, atol=1e-10)
        expected = gradients(by_matrix)
        for parameter, gradient in gradients(by_displacement).items():
            torch.testing.assert_close(gradient, expected[parameter], rtol=1e-9, atol=1e-9, msg=parameter)


SMALL, LARGE = Grid(31, 33), Grid(32, 32)


@in_turn(
    ("encoding", "product", "small", "large"),
    [
        ("lrpe", "auto", "matrix", "displacement"),
        ("glrpe", "matrix", "matrix", "matrix"),
        ("glrpe", "displacement", "displacement", "displacement"),
        *(("ggqpe", product, "matrix", "matrix") for product in ("auto", "displacement")),  # a softmax
        *((encoding, "displacement", "matrix", "matrix") for encoding in ("sgu", "lrpe_m")),  # no table
    ],
)
def test_auto_mixes_by_displacement_from_1024_patches_on_without_a_softmax(encoding, product, small, large):
    for first, other in ((SMALL, LARGE), (LARGE, SMALL)):
        made = position(encoding, first, product)
        for _ in range(2):
            assert (way(made(SMALL)), way(made(LARGE))) == (small, large)
            made.set_grid(other)


def test_auto_counts_the_patches_of_a_window():
    made = MixingPosition([LearnableMixing(LARGE)])
    grids = {Grid(64, 64).in_windows([32]), Grid(31, 64).in_windows([32]), Grid(64, 64).in_windows([7])}
    assert {way(made(grid)) for grid in grids} == {"displacement", "matrix"}
    assert way(made(Grid(64, 64).in_windows([32]))) == "displacement"


@pytest.mark.parametrize("encoding", BUILDERS)
def test_no_index_of_all_pairs_is_held_or_made(encoding, monkeypatch):
    """An index of 1,024 patches takes 8 MB, and longer to compute than the weights."""
    made = position(encoding, Grid(4, 5))
    assert not list(made.buffers())
    monkeypatch.setattr(Grid, "offsets", None)
    monkeypatch.setattr(Grid, "offset_index", None)
    assert len(made(Grid(4, 5))) == len(made(Grid(5, 6))) == 2


@pytest.mark.parametrize("encoding", [pytest.param("lrpe", marks=pytest.mark.slow), "ggqpe"])
def test_a_whole_model_is_one_graph_with_the_same_gradients_and_is_exported(encoding):
    model = built("gmlp_s16_224", encoding, "displacement", **GMLP | {"num_blocks": 1})
    x = image(model)
    model(x).square().sum().backward()
    eager = {key: gradient.clone() for key, gradient in gradients(model).items()}
    model.zero_grad()
    output = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(output, model(x), rtol=0, atol=1e-12)
    output.square().sum().backward()
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, eager[key], rtol=1e-10, atol=1e-10, msg=key)
    for exported in (model, fold(model)):
        program = torch.export.export(exported, (x,)).module()
        torch.testing.assert_close(program(x), exported(x), rtol=0, atol=1e-12)


@in_turn(
    ("call", "message"),
    [
        (
            lambda: MixingPosition([LearnableMixing(Grid(3, 4))], product="fourier"),
            "`product` must be one of auto, matrix, displacement[,;] got",
        ),
        (
            lambda: graticule.create_model("gmlp_s16_224", encoding="ggqpe(product='Matrix')", **GMLP),
            "`product` of encoding ggqpe .*'auto', 'matrix' or 'displacement'.*got",
        ),
        (lambda: MixingPosition([]), "`encodings` must be one per layer, got none"),
        (
            lambda: LayerPosition(mixing=LearnableMixing(Grid(3, 4)).displacements(Grid(3, 4))).merge(
                LayerPosition(mixing=torch.zeros(1, 12, 12))
            ),
            "`mixing` must be given by one encoding at most",
        ),
    ],
)
def test_what_cannot_be_mixed_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
