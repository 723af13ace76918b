"""Folding: the same outputs from constants, and everything back at will."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import graticule
from graticule import fold, unfold
from graticule.backbones import VisionTransformer
from graticule.encodings import (
    BiasPosition,
    ContextualProduct,
    ConvolutionalProjection,
    FoldedPosition,
    JoinedPosition,
    Learnable,
    Peg,
    Position,
    ShawBias,
)
from graticule.joining import Joining
from graticule.layer_position import LayerPosition
from tiny import CHOICES, DEPTH, DIM, SIZE, draw, images, tiny

choices = pytest.mark.parametrize(("encoding", "joining"), CHOICES)


@choices
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_a_folded_model_computes_the_same(name, encoding, joining):
    model = draw(tiny(encoding, joining, name)).eval()
    x = images()
    before = model(x)
    assert fold(model) is model
    assert isinstance(model.position, FoldedPosition)
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-6)


@choices
def test_unfolding_brings_state_dict_and_outputs_back_exactly(encoding, joining):
    model = draw(tiny(encoding, joining)).eval()
    x, other = images(), images(24, 40)
    before = model(x), model(other)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    position = model.position
    assert unfold(fold(model)) is model
    assert model.position is position
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(x), before[0])
    assert torch.equal(model(other), before[1])


@choices
def test_a_model_folds_for_another_size(encoding, joining):
    model = draw(tiny(encoding, joining)).eval()
    x, square = images(24, 40), images()
    wide, plain = model(x), model(square)
    fold(model, img_size=(24, 40))
    torch.testing.assert_close(model(x), wide, rtol=0, atol=1e-6)
    fold(model, img_size=32)  # folding again starts from the original
    torch.testing.assert_close(model(square), plain, rtol=0, atol=1e-6)
    unfold(model)
    assert torch.equal(model(x), wide)


@choices
def test_a_folded_model_keeps_pace_with_set_input_size(encoding, joining):
    model = draw(tiny(encoding, joining)).double().eval()
    x = images(24, 40, dtype=torch.float64)
    before = model(x)
    fold(model).set_input_size((24, 40))
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-12)
    torch.testing.assert_close(unfold(model)(x), before, rtol=0, atol=1e-12)


def test_folding_ends_training():
    model = tiny("learnable", "lape").train()
    fold(model)
    assert not any(module.training for module in model.modules())


@choices
def test_a_folded_model_refuses_to_be_trained(encoding, joining):
    model = fold(tiny(encoding, joining))
    x = images()
    model.train()
    with pytest.raises(RuntimeError, match=r"the model is folded.*graticule.unfold\(model\).*model.eval\(\)"):
        model(x)
    assert model.eval()(x).isfinite().all()
    assert unfold(model).train()(x).requires_grad


def test_a_folded_model_refuses_another_grid_and_names_both():
    model = fold(tiny("learnable", "lape"))
    with pytest.raises(ValueError, match=r"folded for a grid of \(4, 4\) patches with 1 prefix .*got one of \(3, 5\)"):
        model(images(24, 40))


def test_a_size_that_the_patch_does_not_divide_cannot_be_folded_for():
    with pytest.raises(ValueError, match="`img_size` must be a positive multiple"):
        fold(tiny("learnable", "lape"), img_size=30)


def test_a_size_that_cannot_be_folded_for_leaves_the_model_as_it_was():
    model = tiny("learnable", "lape").eval()
    x = images()
    before = model(x)
    with pytest.raises(ValueError, match="`img_size`"):
        fold(model, img_size=30)
    assert torch.equal(model(x), before)


@choices
def test_no_gradient_reaches_a_constant_of_a_folded_model_and_what_is_made_from_the_tokens_keeps_its_own(
    encoding, joining
):
    model = fold(draw(tiny(encoding, joining)))
    model(images()).sum().backward()
    kinds = (Peg, ConvolutionalProjection, ShawBias, ContextualProduct)
    made = [module for module in model.position.modules() if isinstance(module, kinds)]
    functions = {id(parameter) for module in made for parameter in module.parameters()}
    assert bool(functions) == any(name in encoding for name in ("peg", "convolutional_projection", "shaw", "product"))
    for name, parameter in model.position.named_parameters():
        assert (parameter.grad is not None) == (id(parameter) in functions), name
    assert not any(buffer.requires_grad for buffer in model.position.buffers())
    assert model.head.weight.grad is not None


def test_folding_does_not_change_what_is_trained():
    model = tiny("learnable", "lape")
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    unfold(fold(model))
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before


@choices
def test_loading_a_state_dict_into_a_folded_model_folds_it_anew(encoding, joining):
    trained = draw(tiny(encoding, joining)).eval()
    model = fold(tiny(encoding, joining))
    x = images()
    model.load_state_dict(graticule.published_state_dict(trained), strict=True)
    torch.testing.assert_close(model(x), trained(x), rtol=0, atol=1e-6)
    model = fold(tiny(encoding, joining))
    model.load_state_dict(fold(trained).state_dict(), strict=True)
    torch.testing.assert_close(model(x), trained(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("encoding", "joining"),
    [("learnable", "lape"), ("relative_bias", "lape"), ("peg+learnable", "lape"), ("shaw", "default")],
)
def test_weights_go_between_folded_and_unfolded_models(encoding, joining):
    """A checkpoint of training goes into the folded model that ships, and the other way round."""
    trained = draw(tiny(encoding, joining)).eval()
    x = images()
    expected = trained(x)
    shipped = fold(tiny(encoding, joining))
    shipped.load_state_dict(trained.state_dict(), strict=True)
    torch.testing.assert_close(shipped(x), expected, rtol=0, atol=1e-6)
    fresh = tiny(encoding, joining).eval()
    fresh.load_state_dict(shipped.state_dict(), strict=True)
    torch.testing.assert_close(fresh(x), expected, rtol=0, atol=1e-6)


@choices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_folded_model_changes_its_dtype(dtype, encoding, joining):
    model = draw(tiny(encoding, joining)).eval()
    x = images()
    before = model(x)
    fold(model).to(dtype)
    logits = model(x.to(dtype))
    assert logits.dtype == dtype
    rounding = {torch.bfloat16: 0.15, torch.float64: 1e-5}[dtype]
    scale = before.abs().max().item()
    torch.testing.assert_close(logits.float(), before, rtol=0, atol=rounding * scale)
    assert unfold(model)(x.to(dtype)).dtype == dtype


class Capturing(Joining):
    """Gives a layer a function that holds the table itself, in one of the ways that Python has."""

    def __init__(self, how):
        super().__init__(3)
        self.how = how

    def join(self, *tables):
        (table,) = tables
        functions = {
            "closure": lambda x: x + table,
            "partial": partial(torch.add, table),
            "default": lambda x, table=table: x + table,
            "nested": partial(lambda add, x: add(x), lambda x: x + table),
        }
        return [LayerPosition(pre=table, before=functions[self.how])], None


@pytest.mark.parametrize("how", ["closure", "partial", "default", "nested"])
def test_what_a_joining_captures_follows_a_change_of_dtype(how):
    def build(grid, dim, depth, num_heads, **within):
        return JoinedPosition([Learnable(grid, dim)], Capturing(how))

    model = draw(graticule.create_model("vit_tiny_patch16_224", position=build, **SIZE)).eval()
    x = images(dtype=torch.float64)
    expected = copy.deepcopy(model).double()(x)
    folded = fold(model).double()
    torch.testing.assert_close(folded(x), expected, rtol=0, atol=1e-12)
    half = folded.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16


def test_what_a_folded_position_keeps_for_later_moves_with_it():
    model = fold(graticule.create_model("posmlp_nano_32", encoding="sgu")).to("meta")
    assert all(buffer.is_meta for buffer in unfold(model).buffers())


@pytest.mark.parametrize("size", [33, (0, 32), -32])
@pytest.mark.parametrize("folded", [False, True])
def test_a_fold_that_is_refused_leaves_training_mode_and_constants(size, folded):
    model = fold(tiny("learnable", "lape")) if folded else tiny("learnable", "lape").train()
    before = model.position
    with pytest.raises(ValueError, match="must"):
        fold(model, img_size=size)
    assert model.position is before
    assert all(module.training is not folded for module in model.modules())


@pytest.mark.parametrize(
    ("encoding", "joining"),
    [
        ("learnable", "lape"),
        ("sinusoidal_2d", "shared"),
        ("relative_bias", "lape"),
        ("peg+learnable", "lape"),
        ("shaw+relative_bias", "default"),
        ("convolutional_projection", "default"),
    ],
)
def test_a_folded_model_is_one_graph(encoding, joining):
    model = fold(draw(tiny(encoding, joining, depth=2)))
    x = images()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), model(x))


def test_a_folded_model_runs_no_norm_of_lape():
    model = tiny("learnable", "lape").eval()
    runs = []
    for norm in model.position.joining.norms:
        norm.register_forward_hook(lambda *_: runs.append(1))
    model(images())
    assert len(runs) == DEPTH
    fold(model)
    runs.clear()
    model(images())
    assert not runs


def test_a_table_that_every_layer_shares_is_kept_once():
    shared = fold(tiny("learnable", "shared"))
    positions = shared.position(shared.grid)
    assert len(list(shared.position.named_buffers(recurse=False))) == 1
    assert {position.pre.data_ptr() for position in positions} == {positions[0].pre.data_ptr()}
    own = fold(tiny("learnable", "lape"))
    assert len(dict(own.position.named_buffers(recurse=False))) == DEPTH


@choices
def test_constants_are_not_saved(encoding, joining):
    model = tiny(encoding, joining)
    values = sum(value.numel() for value in model.state_dict().values())
    assert sum(value.numel() for value in fold(model).state_dict().values()) == values


@choices
def test_a_copy_of_a_folded_model_unfolds_on_its_own(encoding, joining):
    model = fold(draw(tiny(encoding, joining)))
    x = images()
    logits = model(x).detach().clone()
    other = copy.deepcopy(model)
    assert torch.equal(other(x), logits)
    with torch.no_grad():
        for parameter in unfold(other).parameters():
            parameter.zero_()
    assert isinstance(model.position, FoldedPosition)
    assert torch.equal(model(x), logits)


@pytest.mark.parametrize(
    ("encoding", "joining"),
    [("learnable", "lape"), ("peg+learnable", "lape"), ("shaw+relative_bias", "default")],
)
def test_a_folded_model_can_be_pickled(encoding, joining):
    model = fold(draw(tiny(encoding, joining)))
    x = images()
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(other(x), model(x))
    assert torch.equal(unfold(other)(x), unfold(model)(x))


def test_backbones_inside_another_module_fold_too():
    pair = nn.ModuleDict({"student": tiny("learnable", "lape"), "teacher": tiny("relative_bias", img_size=40)})
    x, y = images(), images(40, 40)
    pair.eval()
    before = pair["student"](x), pair["teacher"](y)
    fold(pair)
    assert all(isinstance(model.position, FoldedPosition) for model in pair.values())
    torch.testing.assert_close(pair["student"](x), before[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(pair["teacher"](y), before[1], rtol=0, atol=1e-6)
    unfold(pair)
    assert not any(isinstance(module, FoldedPosition) for module in pair.modules())


def test_what_has_no_position_cannot_be_folded():
    with pytest.raises(ValueError, match="`model` must be or hold a backbone with a `position`, got Linear"):
        fold(nn.Linear(2, 2))


def test_unfolding_what_is_not_folded_changes_nothing():
    model = tiny("learnable", "lape")
    position = model.position
    assert unfold(model).position is position


class FromQueries(nn.Module):
    """A bias that depends on content."""

    def forward(self, q):
        return q.sum(-1, keepdim=True).expand(-1, -1, -1, q.shape[-2])


class ContentPosition(Position):
    """Gives every layer a bias that is made from its queries."""

    def __init__(self, depth):
        super().__init__()
        self.biases = nn.ModuleList(FromQueries() for _ in range(depth))

    def forward(self, grid):
        return [LayerPosition(bias=bias) for bias in self.biases]

    def set_grid(self, grid):
        """Nothing depends on it."""


def test_a_bias_that_depends_on_the_image_stays_the_function_that_it_is():
    model = draw(VisionTransformer(lambda grid, *, dim, depth, num_heads: ContentPosition(depth), **SIZE)).eval()
    position, x, wide = model.position, images(), images(24, 40)
    before, before_wide = model(x), model(wide)
    fold(model)
    kept = [given.bias for given in model.position(model.grid)]
    assert all(bias is own for bias, own in zip(kept, position.biases, strict=True))
    assert not list(model.position.buffers())
    assert torch.equal(model(x), before)
    assert torch.equal(fold(model, (24, 40))(wide), before_wide)
    assert unfold(model).position is position


@pytest.mark.parametrize(("encoding", "joining"), [("peg", "default"), ("convolutional_projection", "default")])
def test_a_model_that_is_told_by_functions_alone_folds_into_no_constant_and_still_refuses_another_grid(
    encoding, joining
):
    model = fold(tiny(encoding, joining))
    assert not list(model.position.named_buffers(recurse=False))
    with pytest.raises(ValueError, match=r"folded for a grid of \(4, 4\)"):
        model(images(24, 40))


def test_beside_a_function_a_table_becomes_a_constant():
    model = fold(draw(tiny("peg+learnable", "lape")))
    x = images()
    before = model(x)
    with torch.no_grad():
        model.position.original.parts[1].encodings[0].pos_embed.normal_()
    assert torch.equal(model(x), before)
    with torch.no_grad():
        model.position.original.parts[0].pegs["0"].proj[0].bias.add_(1)
    assert not torch.equal(model(x), before)


def test_folding_for_a_grid_keeps_the_shapes_that_layers_expect():
    model = fold(tiny("learnable+relative_bias", "lape"), img_size=(24, 40))
    for position in model.position(model.position.grid):
        assert position.inner.shape == (16, DIM)
        assert position.bias.shape == (3, 16, 16)
    assert "grid=(3, 5), prefix=1" in repr(model.position)
    assert isinstance(model.position.original.parts[1], BiasPosition)
