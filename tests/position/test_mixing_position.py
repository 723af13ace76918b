"""Positions that mix tokens: without an index of pairs, as one graph, and what they refuse."""

import pytest
import torch

import graticule
from graticule import Grid, fold
from graticule.encodings.forms.mixing import MixingPosition
from graticule.encodings.gqpe import QuadraticMixing
from graticule.encodings.lrpe import LearnableMixing, MixingSum
from graticule.encodings.sgu import DenseMixing
from graticule.position.layer import LayerPosition
from in_turn import refusals
from tiny import assert_same, draw, gradients

GMLP = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 16, "num_blocks": 2, "groups": 4, "num_classes": 5}
BUILDERS = {
    "sgu": DenseMixing,
    "lrpe": LearnableMixing,
    "glrpe": lambda grid: LearnableMixing(grid, 2),
    "lrpe_m": lambda grid: MixingSum(DenseMixing(grid), LearnableMixing(grid)),
    "gqpe": QuadraticMixing,
    "ggqpe": lambda grid: QuadraticMixing(grid, 2),
}


@pytest.mark.parametrize("encoding", BUILDERS)
def test_no_index_of_all_pairs_is_held_or_made(encoding, monkeypatch):
    """An index of 1,024 patches takes 8 MB, and longer to compute than the weights."""
    made = MixingPosition([BUILDERS[encoding](Grid(4, 5)) for _ in range(2)])
    assert not list(made.buffers())
    monkeypatch.setattr(Grid, "offsets", None)
    monkeypatch.setattr(Grid, "offset_index", None)
    assert len(made(Grid(4, 5))) == len(made(Grid(5, 6))) == 2


@pytest.mark.parametrize("encoding", [pytest.param("lrpe", marks=pytest.mark.slow), "ggqpe", "global_filter"])
def test_a_whole_model_is_one_graph_with_the_same_gradients_and_is_exported(encoding):
    torch.manual_seed(1)
    model = draw(graticule.create_model("gmlp_s16_224", encoding=encoding, **GMLP | {"num_blocks": 1})).double().eval()
    x = torch.randn(2, 3, *model.img_size, dtype=torch.float64)
    model(x).square().sum().backward()
    eager = {key: gradient.clone() for key, gradient in gradients(model).items()}
    model.zero_grad()
    output = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert_same(output, model(x), 1e-12)
    output.square().sum().backward()
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, eager[key], rtol=1e-10, atol=1e-10, msg=key)
    for exported in (model, fold(model)):
        program = torch.export.export(exported, (x,)).module()
        assert_same(program(x), exported(x), 1e-12)


test_what_cannot_be_mixed_is_refused = refusals(
    (lambda: MixingPosition([]), "`encodings` must be one per layer, got none"),
    (
        lambda: LayerPosition(mixing=LearnableMixing(Grid(3, 4)).displacements(Grid(3, 4))).merge(
            LayerPosition(mixing=torch.zeros(1, 12, 12))
        ),
        "`mixing` must be given by one encoding at most",
    ),
)
