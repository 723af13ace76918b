"""Folding gives the same outputs from constants, and can be undone."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

import graticule
from graticule import fold, unfold
from graticule.encodings.conditional import ConvolutionalProjection, Peg
from graticule.encodings.decomposed import Decomposed
from graticule.encodings.forms.absolute import JoinedPosition
from graticule.encodings.irpe import Irpe
from graticule.encodings.learnable import Learnable
from graticule.encodings.shaw import ShawBias
from graticule.position.folded import FoldedPosition, FoldedSizes
from graticule.position.joining import Joining
from graticule.position.layer import LayerPosition
from in_turn import in_turn
from tiny import COVER, DEPTH, SIZE, assert_same, draw, images, tiny

PEGS = [(f"peg({options})", "default") for options in ("places=[-1, 0, 2]", "acts_on='queries_keys'", "layers=2")]
each = pytest.mark.parametrize(("encoding", "joining"), [*COVER, *PEGS])


@each
def test_a_folded_model_computes_the_same_at_every_size_and_unfolds_exactly(encoding, joining):
    model = draw(tiny(encoding, joining)).double().eval()
    x, wide = images(dtype=torch.float64), images(24, 40, dtype=torch.float64)
    before, before_wide = model(x), model(wide)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    position = model.position
    assert fold(model) is model
    assert isinstance(model.position, FoldedPosition)
    assert_same(model(x), before)
    assert_same(fold(model, img_size=(24, 40))(wide), before_wide)
    assert_same(fold(model, img_size=32)(x), before)  # folding again starts from the original
    assert sum(value.numel() for value in model.state_dict().values()) == sum(v.numel() for v in state.values())
    assert unfold(model) is model
    assert model.position is position
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(x), before)
    assert torch.equal(model(wide), before_wide)
    fold(model).set_input_size((24, 40))
    assert_same(model(wide), before_wide)
    assert_same(unfold(model)(wide), before_wide)


@each
def test_a_folded_model_is_loaded_copied_and_moved_as_any_other(encoding, joining):
    trained = draw(tiny(encoding, joining)).eval()
    x = images()
    expected = trained(x).detach()
    for state in (trained.state_dict(), graticule.published_state_dict(trained), fold(trained).state_dict()):
        model = fold(tiny(encoding, joining))
        model.load_state_dict(state, strict=True)
        assert_same(model(x), expected, 1e-6)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(other(x), expected, 1e-6)
        with torch.no_grad():
            for parameter in unfold(other).parameters():
                parameter.zero_()
        assert_same(model(x), expected, 1e-6)
    for dtype, rounding in ((torch.float64, 1e-5), (torch.bfloat16, 0.15)):
        logits = model.to(dtype)(x.to(dtype))
        assert logits.dtype == dtype
        assert_same(logits.float(), expected, rounding * expected.abs().max().item())
    assert unfold(model)(x.bfloat16()).dtype == torch.bfloat16


@each
def test_a_folded_model_refuses_to_be_trained_and_has_no_gradient_but_of_functions_of_the_tokens(encoding, joining):
    model = fold(draw(tiny(encoding, joining)))
    x = images()
    model.train()
    with pytest.raises(RuntimeError, match=r"the model is folded.*graticule.unfold\(model\).*model.eval\(\)"):
        model(x)
    model.eval()(x).sum().backward()
    kinds = (Peg, ConvolutionalProjection, ShawBias, Irpe, Decomposed)
    made = [module for module in model.position.modules() if isinstance(module, kinds)]
    functions = {id(parameter) for module in made for parameter in module.parameters()}
    assert bool(functions) == any(
        name in encoding for name in ("peg", "convolutional_projection", "shaw", "irpe", "decomposed")
    )
    for name, parameter in model.position.named_parameters():
        assert (parameter.grad is not None) == (id(parameter) in functions), name
    assert not any(buffer.requires_grad for buffer in model.position.buffers())
    assert model.head.weight.grad is not None
    assert unfold(model).train()(x).requires_grad


def test_folding_ends_training_and_keeps_which_parameters_are_trained():
    model = tiny("learnable", "lape").train()
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert not any(module.training for module in fold(model).modules())
    unfold(model)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before


def test_modes_of_modules_within_a_folded_position_are_kept():
    model = fold(tiny("learnable", "lape"))
    norm = next(module for module in model.position.modules() if isinstance(module, nn.LayerNorm)).train()
    model.load_state_dict(model.state_dict())  # folds again
    assert [module for module in unfold(model).modules() if module.training] == [norm]


class Adds(nn.Module):
    """Adds a table stored as a plain attribute, which changes of dtype do not affect."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, x):
        return x + self.table


CAPTURED = {
    "closure": lambda table: lambda x: x + table,
    "partial": lambda table: partial(torch.add, table),
    "nested": lambda table: partial(lambda add, x: add(x), lambda x, table=table: x + table),
    "dictionary": lambda table: (lambda values: lambda x: x + values["w"])({"w": table}),
    "method": lambda table: Adds(table).forward,
}


class Capturing(Joining):
    """Gives a layer a function that captures the table, in one of Python's ways."""

    def __init__(self, how):
        super().__init__(3)
        self.how = how

    def join(self, *tables):
        return [LayerPosition(added_to_stream=tables[0], map_before=CAPTURED[self.how](tables[0]))], None


def build_capturing(grid, dim, depth, num_heads, how, **within):
    return JoinedPosition([Learnable(grid, dim)], Capturing(how))


def capturing(how):
    position = partial(build_capturing, how=how)
    return draw(graticule.create_model("vit_tiny_patch16_224", position=position, **SIZE)).eval()


@in_turn("how", CAPTURED)
def test_a_captured_table_follows_a_change_of_dtype(how):
    model = capturing(how)
    x = images(dtype=torch.float64)
    expected = copy.deepcopy(model).double()(x)
    folded = fold(model).double()
    assert_same(folded(x), expected)
    half = folded.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16


def test_a_captured_table_follows_a_copy_and_a_pickle():
    model = fold(capturing("closure").double())
    x = images(dtype=torch.float64)
    expected = model(x)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        unfold(model).position.encodings[0].pos_embed.normal_()
    for other in copies:
        assert_same(other(x), expected)
        assert_same(unfold(other)(x), expected)
    assert not torch.allclose(model(x), expected)


def test_a_folded_model_that_was_moved_is_one_graph_and_the_tracer_leaves_nothing_in_it():
    model = fold(capturing("closure")).double()
    x = images(dtype=torch.float64)
    graph = torch.compile(copy.deepcopy(model), fullgraph=True, backend="eager")
    exported = torch.export.export(model, (x,), strict=False).module()
    assert_same(graph(x), model(x))
    assert_same(exported(x), model(x))


def test_the_original_of_a_folded_position_moves_with_it():
    model = fold(graticule.create_model("posmlp_nano_32", encoding="sgu")).to("meta")
    assert all(buffer.is_meta for buffer in unfold(model).buffers())


@in_turn("size", [33, (0, 32), -32])
@in_turn("folded", [False, True])
def test_a_refused_fold_leaves_training_mode_constants_and_outputs(size, folded):
    model = fold(tiny("learnable", "lape")) if folded else tiny("learnable", "lape").train()
    before, x = model.position, images()
    expected = model(x)
    with pytest.raises(ValueError, match="`img_size` must be"):
        fold(model, img_size=size)
    assert model.position is before and torch.equal(model(x), expected)
    assert all(module.training is not folded for module in model.modules())


@pytest.mark.parametrize(
    ("encoding", "joining", "sizes"),
    [
        ("peg+sinusoidal_2d+relative_bias", "lape", None),
        ("learnable + peg", "lape", 2),  # it computes position
        pytest.param("shaw+convolutional_projection+learnable", "default", None, marks=pytest.mark.slow),
    ],
)
def test_a_folded_model_is_one_graph(encoding, joining, sizes):
    model = fold(draw(tiny(encoding, joining, depth=2)), sizes=sizes)
    x = images()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), model(x))


def test_a_table_that_every_layer_shares_is_kept_once():
    shared = fold(tiny("learnable", "shared"))
    positions = shared.position(shared.grid)
    assert len(list(shared.position.named_buffers(recurse=False))) == 1
    assert {position.added_to_stream.data_ptr() for position in positions} == {positions[0].added_to_stream.data_ptr()}
    separate = fold(tiny("learnable", "lape"))
    assert len(dict(separate.position.named_buffers(recurse=False))) == DEPTH


def test_backbones_inside_another_module_fold_too():
    pair = nn.ModuleDict({"student": tiny("learnable", "lape"), "teacher": tiny("relative_bias", img_size=40)})
    x, y = images(), images(40, 40)
    pair.eval()
    before = pair["student"](x), pair["teacher"](y)
    fold(pair)
    assert all(isinstance(model.position, FoldedPosition) for model in pair.values())
    assert_same(pair["student"](x), before[0], 1e-6)
    assert_same(pair["teacher"](y), before[1], 1e-6)
    unfold(pair)
    assert not any(isinstance(module, FoldedPosition) for module in pair.modules())


def test_a_model_without_position_is_refused_and_one_that_is_not_folded_stays():
    with pytest.raises(ValueError, match="`model` must be or contain a backbone with a `position`, got Linear"):
        fold(nn.Linear(2, 2))
    model = tiny("learnable", "lape")
    position = model.position
    assert unfold(model).position is position


@in_turn("encoding", ["peg", "convolutional_projection", "learnable"])
def test_a_folded_model_refuses_another_grid_also_without_any_constant(encoding):
    model = fold(tiny(encoding))
    assert bool(list(model.position.named_buffers(recurse=False))) == (encoding == "learnable")
    with pytest.raises(ValueError, match=r"folded for a grid of \(4, 4\) patches with 1 prefix .*got one of \(3, 5\)"):
        model(images(24, 40))


def drawn_again(model):
    """Return a copy with other weights, not folded."""
    return draw(unfold(copy.deepcopy(model)))


@torch.no_grad()
def step(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model


@torch.inference_mode()
def in_inference_mode(model):
    return step(model)


def stochastic_average(model):
    average = AveragedModel(model)
    for _ in range(2):
        average.update_parameters(draw(copy.deepcopy(model)))  # a folded model, too, whose constants are buffers
    return average.module


def vector(model):
    vector_to_parameters(parameters_to_vector(drawn_again(model).parameters()).clone(), model.parameters())
    return model


def loaded(model, part="", **options):
    """Load other weights into a part, past the hooks of the model."""
    state = drawn_again(model).get_submodule(part).state_dict()
    nn.Module.load_state_dict(model.get_submodule(part), state, **options)
    return model


def replaced(model):
    """Replace every parameter by another one."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.randn_like(parameter)))
    return model


CHANGES = {
    "optimizer": step,
    "inference mode": in_inference_mode,
    "stochastic average": stochastic_average,
    "vector": vector,
    "loaded": loaded,
    "assigned": partial(loaded, assign=True),
    "position loaded": partial(loaded, part="position"),
    "copy": lambda model: step(copy.deepcopy(step(model))),
    "dtype": lambda model: step(model).float().double(),
    "replaced": replaced,
}
LARGE = {"img_size": 32, "embed_dim": 12, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4, "num_classes": 5}
CHANGED = {
    "ViT, lape": lambda: tiny("learnable", "lape"),
    "ViT, biases": lambda: tiny("relative_bias + shaw", "default"),
    "Swin, merged": lambda: graticule.create_model(
        "swin_tiny_patch4_window7_224", encoding="learnable + relative_bias", joining="lape", **LARGE
    ),
}


@in_turn("sizes", [None, 2])
@in_turn("change", CHANGES)
@pytest.mark.parametrize(
    "of", [pytest.param(of, marks=pytest.mark.slow) if of != "ViT, biases" else of for of in CHANGED]
)
def test_a_folded_model_follows_changes_of_its_parameters_in_place(of, change, sizes):
    """Outputs equal the model with the same weights that is not folded, also in a second call and in threads."""
    folded, x = fold(draw(CHANGED[of]()).double(), sizes=sizes), images(dtype=torch.float64)
    with torch.no_grad():
        before = folded(x)
    changed = CHANGES[change](folded)
    plain = unfold(copy.deepcopy(changed))
    with torch.no_grad():
        expected = plain(x)
        assert (before - expected).abs().max() > 1e-3
        with ThreadPoolExecutor(4) as threads:
            for logits in [*threads.map(changed, [x] * 4), changed(x)]:
                assert_same(logits, expected)


@pytest.mark.parametrize("of", CHANGED)
def test_a_functional_call_of_a_folded_model_computes_and_differentiates_with_its_parameters(of):
    folded, x = fold(draw(CHANGED[of]()).double()), images(dtype=torch.float64)
    other = drawn_again(folded)
    parameters = {name: value.detach().clone().requires_grad_() for name, value in other.named_parameters()}
    before, logits = folded(x), torch.func.functional_call(folded, parameters, x)
    assert_same(logits, other(x))
    logits.sum().backward()
    assert all(value.grad is not None for name, value in parameters.items() if name.startswith("position."))
    assert torch.equal(folded(x), before)


@torch.inference_mode()
def test_a_folded_model_made_in_inference_mode_follows_changes_of_its_parameters():
    model = graticule.fold(tiny("learnable", "lape").eval())
    x = images()
    model(x)
    for parameter in model.parameters():
        parameter.add_(0.5 * torch.randn_like(parameter))
    torch.testing.assert_close(model(x), graticule.unfold(model)(x))


# For every new size, of which the constants of the last ones are kept

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
        assert len(folded.position._folded) <= 2


def test_windows_of_another_size_are_another_grid():
    small = {"img_size": 64, "depths": (2, 2), "embed_dim": 12, "num_heads": (3, 3), "window_size": 4, "num_classes": 5}
    model = draw(graticule.create_model("swin_tiny_patch4_window7_224", **small)).double().eval()
    other = copy.deepcopy(model)
    x = images(64, 64, dtype=torch.float64)
    fold(model, sizes=2)
    assert_same(model(x), other(x))
    for part in (model, other):
        part.set_input_size(64, window_size=8)
    assert_same(model(x), other(x))


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


def test_sizes_that_make_no_sense_are_refused():
    model = tiny()
    language = graticule.create_language_model("lm_nano", vocab_size=5, context=8, embed_dim=12, depth=1, num_heads=3)
    for refused, options, error, message in (
        (model, {"sizes": 0}, ValueError, "`sizes` must be at least 1, got 0"),
        (model, {"sizes": 2, "img_size": 32}, ValueError, "`sizes` must be left out with `img_size`"),
        (language, {"sizes": 2}, ValueError, "`sizes` must be left out for a language model, which has one size"),
        (model, {"sizes": "2"}, TypeError, "`sizes` must be a whole number"),
    ):
        with pytest.raises(error, match=message):
            fold(refused, **options)
        assert not isinstance(refused.position, FoldedSizes)
