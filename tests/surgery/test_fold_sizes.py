"""Folding for every new size: only the constants of the most recent sizes are kept."""

import copy

import pytest
import timm
import torch

import graticule
from graticule import fold, unfold
from graticule.encodings.forms.absolute import JoinedPosition
from graticule.position.folded import FoldedSizes
from tiny import SIZE, assert_same, draw, images, tiny

SIZES = [(32, 32), (24, 40), (40, 24), (16, 16)]


@pytest.fixture(scope="module")
def cases():
    """Return a model, an image of every size, and the model's outputs."""
    torch.manual_seed(0)
    model = draw(tiny("learnable + peg", "lape")).double().eval()
    batch = [images(*size, dtype=torch.float64) for size in SIZES]
    return model, [(x, model(x).detach()) for x in batch]


@pytest.fixture
def folded(cases):
    """Return a copy of the model that keeps the constants of two sizes."""
    return fold(copy.deepcopy(cases[0]), sizes=2)


def test_it_computes_the_same_at_every_size_there_and_back(folded, cases):
    assert isinstance(folded.position, FoldedSizes)
    for x, expected in [*cases[1], *reversed(cases[1])]:
        assert_same(folded(x), expected)


def test_each_size_is_folded_once_and_the_last_ones_are_kept(folded, cases, monkeypatch):
    made = []
    inner = JoinedPosition.stage

    def stage(self, grid, table):
        made.append(grid.shape)
        return inner(self, grid, table)

    monkeypatch.setattr(JoinedPosition, "stage", stage)
    first, second, third = ((4, 4), (3, 5), (5, 3))
    for index, calls in ((0, [first]), (0, []), (1, [second]), (0, []), (2, [third]), (0, []), (1, [second])):
        made.clear()
        folded(cases[1][index][0])
        assert sorted(set(made)) == calls, (index, made)
        assert len(folded.position._kept) <= 2


def test_windows_of_another_size_are_another_grid():
    small = {"img_size": 64, "depths": (2, 2), "embed_dim": 12, "num_heads": (3, 3), "window_size": 4, "num_classes": 5}
    model = draw(graticule.create_model("swin_tiny_patch4_window7_224", **small)).double().eval()
    other = copy.deepcopy(model)
    x = images(64, 64, dtype=torch.float64)
    fold(model, sizes=2)
    assert_same(model(x), other(x))
    for each in (model, other):
        each.set_input_size(64, window_size=8)
    assert_same(model(x), other(x))


def test_its_constants_follow_the_parameters_that_are_loaded_moved_and_copied(folded, cases):
    x, _ = cases[1][0]
    folded(x)
    trained = draw(copy.deepcopy(cases[0]))
    folded.load_state_dict(trained.state_dict())
    assert_same(folded(x), trained(x))
    assert list(folded.state_dict()) == list(trained.state_dict())
    other = copy.deepcopy(folded)
    draw(unfold(other))
    assert_same(folded(x), trained(x))
    assert not torch.allclose(other(x), trained(x))
    low = folded.float()(x.float())
    assert low.dtype == torch.float32
    assert_same(low.double(), trained(x), 1e-4)


def test_it_is_unfolded_folded_for_one_size_and_resized(folded, cases):
    for x, expected in cases[1][:2]:
        assert_same(folded(x), expected)
    graticule.resize(folded, (24, 40))
    assert_same(folded(cases[1][1][0]), cases[1][1][1])
    assert isinstance(folded.position, FoldedSizes)
    assert_same(fold(folded)(cases[1][1][0]), cases[1][1][1])
    assert not isinstance(folded.position, FoldedSizes)
    assert_same(unfold(fold(folded, sizes=1))(cases[1][1][0]), cases[1][1][1])


def test_a_new_size_leaves_batch_norm_in_evaluation():
    model = draw(tiny("peg(layers=2)")).double().train()
    folded = fold(copy.deepcopy(model), sizes=2)
    for size in SIZES[:2]:
        x = images(*size, dtype=torch.float64)
        assert_same(folded(x), model.eval()(x))


def test_it_compiles_as_one_graph_that_computes_position(cases):
    model = fold(copy.deepcopy(cases[0]), sizes=2)
    del model.blocks[1:]
    x = cases[1][0][0]
    model.depths = (1,)
    expected = model(x)
    assert_same(torch.compile(model, fullgraph=True, backend="eager")(x), expected)


def test_an_attached_position_is_folded_for_every_size(cases):
    model = timm.create_model("vit_tiny_patch16_224", **SIZE, dynamic_img_size=True).double().eval()
    graticule.attach(model, "learnable", "lape")
    expected = [model(x) for x, _ in cases[1]]
    fold(model, sizes=3)
    for (x, _), value in zip(cases[1], expected, strict=True):
        assert_same(model(x), value)
    assert len(model.graticule.position._kept) == 3


def test_sizes_that_make_no_sense_are_refused():
    model = tiny()
    language = graticule.create_language_model("lm_nano", vocab_size=5, context=8, embed_dim=12, depth=1, num_heads=3)
    for one, options, error, message in (
        (model, {"sizes": 0}, ValueError, "`sizes` must be at least 1, got 0"),
        (model, {"sizes": 2, "img_size": 32}, ValueError, "`sizes` must be left out with `img_size`"),
        (language, {"sizes": 2}, ValueError, "`sizes` must be left out for a language model, which has one size"),
        (model, {"sizes": "2"}, TypeError, "`sizes` must be a whole number"),
    ):
        with pytest.raises(error, match=message):
            fold(one, **options)
        assert not isinstance(one.position, FoldedSizes)
