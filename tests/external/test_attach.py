"""Attaching a position to a transformer of timm: outputs equal the built-in model's, and it can be detached."""

import copy
import io

import pytest
import timm
import torch
from torch import nn

import graticule
from graticule import attach, detach
from tiny import SIZE, assert_same, draw, gradients, images, tiny

#: Every joining of a table, a bias in both joinings, PEG alone and with a table.
CHOICES = [
    *[("learnable", name) for name in graticule.list_joinings()],
    ("sinusoidal_2d", "lape"),
    ("relative_bias", "default"),
    ("relative_bias", "lape"),
    ("learnable + relative_bias", "tupe"),
    ("peg(places=[-1, 0])", "default"),
    ("peg + learnable", "lape(layers=[1])"),
]


@pytest.fixture(scope="module")
def stock():
    """Return a small ViT of timm in float64 with random parameters; tests attach to copies."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **SIZE, dynamic_img_size=True, reg_tokens=1)
    return draw(model).double().eval()


@pytest.fixture(scope="module")
def x():
    """Return images of the size of the model, and of another size that is not square."""
    torch.manual_seed(1)
    return images(dtype=torch.float64), images(24, 40, dtype=torch.float64)


def hooks(module):
    """Return all hooks of a module and its parts, by name."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    return {name: [list(getattr(part, kind)) for kind in kinds] for name, part in module.named_modules()}


def test_outputs_equal_the_built_in_model_with_every_joining_at_every_size(stock, x):
    for encoding, joining in CHOICES:
        built_in = draw(tiny(encoding, joining, reg_tokens=1)).double().eval()
        left = built_in.load_state_dict({k: v for k, v in stock.state_dict().items() if k != "pos_embed"}, strict=False)
        assert not left.unexpected_keys and all(name.startswith("position.") for name in left.missing_keys)
        model = attach(copy.deepcopy(stock), encoding, joining, start="new")
        model.graticule.position.load_state_dict(built_in.position.state_dict())
        with torch.no_grad():
            for image in x:
                assert_same(model(image), built_in(image))
            assert not torch.equal(model(x[0]), stock(x[0])), (encoding, joining)


def test_detach_restores_the_module_exactly(stock, x):
    for encoding, joining in CHOICES:
        model = copy.deepcopy(stock).train()
        table, names, before = model.pos_embed, list(model.state_dict()), hooks(model)
        assert attach(model, encoding, joining, remove="pos_embed") is model
        assert detach(model) is model
        assert model.pos_embed is table and list(model.state_dict()) == names and hooks(model) == before
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in stock.named_parameters()]
        assert all(module.training for module in model.modules())
        assert torch.equal(model.eval()(x[0]), stock(x[0])), (encoding, joining)


def test_its_own_embedding_is_replaced_by_zeros_unless_it_is_kept(stock, x):
    image = x[0]
    model = attach(copy.deepcopy(stock), "none", start="new")
    assert "pos_embed" not in model.state_dict() and not model.pos_embed.any()
    assert "instead of pos_embed" in repr(model.graticule)
    zeros = copy.deepcopy(stock)
    nn.init.zeros_(zeros.pos_embed)
    assert torch.equal(model(image), zeros(image))
    for named in ("pos_embed", ("pos_embed",)):
        assert torch.equal(attach(copy.deepcopy(stock), "none", remove=named)(image), zeros(image))
    assert torch.equal(attach(copy.deepcopy(stock), "none", remove=())(image), stock(image))


def test_a_replaced_buffer_is_restored(stock):
    for persistent in (True, False):
        model = copy.deepcopy(stock)
        table = model.pos_embed.detach()
        del model.pos_embed
        model.register_buffer("pos_embed", table, persistent=persistent)
        names = list(model.state_dict())
        attach(model, "learnable")
        assert "pos_embed" not in model.state_dict() and not model.pos_embed.any()
        assert detach(model).pos_embed is table and list(model.state_dict()) == names


def test_a_gradient_reaches_every_parameter_also_with_checkpointing(stock, x):
    for encoding, joining in CHOICES:
        model = attach(copy.deepcopy(stock), encoding, joining, remove="pos_embed").train()
        model.reset_classifier(0, "")  # the loss includes all tokens, since prefix tokens have no bias
        passes = []
        for checkpointing in (False, True):
            model.zero_grad()
            model.set_grad_checkpointing(checkpointing)
            model(x[0]).pow(3).sum().backward()
            passes.append({name: gradient.clone() for name, gradient in gradients(model).items()})
        assert any(name.startswith("graticule.") for name in passes[0]) or encoding == "sinusoidal_2d"
        for name, gradient in passes[0].items():
            assert gradient.abs().sum() > 0 or "theta" in name, (encoding, joining, name)
            assert_same(passes[1][name], gradient)


def test_its_parameters_are_saved_and_loaded_with_the_model_also_for_another_grid(stock, x):
    model = attach(copy.deepcopy(stock), "learnable", "lape")
    draw(model.graticule)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = attach(copy.deepcopy(stock), "learnable", "lape")
    other.load_state_dict(state)
    assert torch.equal(other(x[0]), model(x[0]))
    wide = attach(copy.deepcopy(stock), "learnable", "lape", example=x[1])
    assert wide.graticule.grid.shape == (3, 5)
    wide.load_state_dict(state)
    assert_same(wide(x[1]), model(x[1]))


def test_it_is_attached_to_a_model_of_any_dtype_on_any_device(stock):
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", **SIZE)
    attach(model.bfloat16(), "learnable", "lape")
    assert {(p.device.type, p.dtype) for p in model.graticule.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.slow
def test_it_compiles_as_one_graph_at_every_size_and_keeps_nothing_of_a_call(stock, x):
    model = copy.deepcopy(stock)
    del model.blocks[1:]
    attach(model, "learnable", "lape")
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for image in x:
        assert_same(compiled(image), model(image))
    with torch.no_grad():
        model(x[0])
    compiled(x[1])
    assert model.graticule._current.call is None


def test_it_is_folded_and_unfolded(stock, x):
    model = attach(copy.deepcopy(stock), "learnable + peg", "lape")
    before, wide = model(x[0]), model(x[1])
    assert_same(graticule.fold(model)(x[0]), before)
    with pytest.raises(ValueError, match="folded for a grid"):
        model(x[1])
    assert_same(graticule.fold(model, img_size=(24, 40))(x[1]), wide)
    assert torch.equal(graticule.unfold(model)(x[0]), before)


def test_attaching_changes_nothing_else_and_draws_no_numbers_but_the_parameters(stock, x):
    model = copy.deepcopy(stock).train()
    model.blocks[1].eval()
    training = {name: module.training for name, module in model.named_modules()}
    torch.manual_seed(3)
    attach(model, "sinusoidal_2d", "lape")
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(3))
    assert training.items() <= {name: module.training for name, module in model.named_modules()}.items()


@pytest.mark.parametrize("on_images", [pytest.param(False, marks=pytest.mark.slow), True])
def test_it_starts_as_a_converted_model_whose_position_is_changed(stock, x, on_images):
    for encoding, joining in [*CHOICES, ("factorized", "default"), ("learnable(prefix_rows=False)", "default")]:
        torch.manual_seed(5)
        changed = graticule.convert(stock, encoding, joining, images=x[0] if on_images else None)
        torch.manual_seed(5)
        how = {"example": x[0]} if on_images else {}
        model = attach(copy.deepcopy(stock), encoding, joining, remove="pos_embed", **how)
        with torch.no_grad():
            assert_same(model(x[0]), changed(x[0]))
        certificate = model.graticule.certificate
        for kind in ("shares", "drift"):
            for expected, row in zip(getattr(changed.certificate, kind), getattr(certificate, kind), strict=True):
                assert row == pytest.approx(expected, abs=1e-9), (encoding, joining)


def test_beside_the_embedding_of_the_module_a_position_starts_without_effect(stock, x):
    for encoding, joining in [*CHOICES, ("factorized(product=True)", "default")]:
        if joining != "tupe":
            model = attach(copy.deepcopy(stock), encoding, joining, remove=()).train()
            assert_same(model.eval()(x[0]), stock(x[0]))
            model.reset_classifier(0, "")
            model(x[0]).pow(3).sum().backward()
            assert any(p.grad is not None and p.grad.any() for p in model.graticule.parameters()) or "sinus" in encoding


def test_an_embedding_before_a_norm_is_kept_as_far_as_it_is_the_same_for_all_images(x):
    model = draw(timm.create_model("vit_tiny_patch16_224", **SIZE, pre_norm=True)).double().eval()
    attach(model, "learnable")
    assert all(0.05 < share.kept < 0.95 for share in model.graticule.certificate.shares)


REFUSED = [
    ({"blocks": "layers.*"}, r"`blocks` must match .*candidates are blocks\.\* \(3 of Block\)"),
    ({"blocks": "blocks.*.mlp"}, "`norm` must be the norm before the attention of each block.*its norms are none"),
    ({"norm": "norm3"}, "`norm` .*got 'norm3', which blocks.0 \\(Block\\) does not have; its norms are norm1, norm2"),
    ({"norm": "norm2"}, "applied to the input of its block \\(pre-norm\\), got 'norm2', which blocks.0 applies"),
    ({"patch_grid": (5, 5)}, "`patch_grid` must be the grid .* 18 tokens of the blocks, 4 x 4 by its stem, got 5 x 5"),
    *(({"patch_grid": grid}, "`patch_grid` must be the grid of the patches .* 4 x 4 by its stem, got")
      for grid in ((3, 3), (2, 8), (16, 1))),
    ({"remove": "pos_embd"}, "`remove` must be one of .*; got 'pos_embd'; did you mean 'pos_embed'"),
    ({"example": torch.randn(2, 4, 32, 32)}, r"`example` must be what .* called with, got a tensor of \(2, 4"),
    ({"example": {"y": torch.zeros(2, 3, 32, 32)}}, "called with, got the arguments y: TypeError"),
    ({"encoding": "rope"}, "got one that gives layers `rotary`: it acts within attention"),
    ({"encoding": "shaw"}, "got one that gives layers `bias`: a bias that depends on queries"),
    ({"encoding": "gpsa"}, "`positional`"),
    ({"encoding": "learnabel"}, "did you mean 'learnable'"),
    ({"encoding": "sinusoidal_2d", "joining": "unshared"}, "`joining` must not be 'unshared' with the fixed encoding"),
    ({"joining": "lap"}, "did you mean 'lape'"),
]  # fmt: skip


def test_unsupported_models_are_refused_with_the_reason_and_the_module_is_unchanged(stock, x):
    model = copy.deepcopy(stock)
    before = hooks(model)
    for options, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            attach(model, **options)
        assert hooks(model) == before and torch.equal(model(x[0]), stock(x[0])), options
    for wrong in ({"patch_grid": 4}, {"blocks": 3}, {"example": 3}):
        with pytest.raises(TypeError):
            attach(model, **wrong)
    with pytest.raises(
        ValueError, match="`module` must have an attached position, got VisionTransformer, which has none"
    ):
        detach(model)
    attach(model)
    with pytest.raises(ValueError, match=r"call graticule.detach\(module\) first"):
        attach(model)
    with pytest.raises(ValueError, match="must have no position of this library"):
        attach(tiny())


def test_tokens_that_are_dropped_are_noticed(stock):
    model = timm.create_model("vit_tiny_patch16_224", **SIZE, patch_drop_rate=0.5)
    attach(model, "learnable", "lape").train()
    with pytest.raises(ValueError, match="the attached position is for 17 tokens, 1 before the patches, got 9"):
        model(images())


def test_a_copy_has_its_own_position_also_after_a_training_step(stock, x):
    model = attach(copy.deepcopy(stock), "learnable + peg", "lape")
    model.train()(x[0]).sum().backward()
    before = model.eval()(x[0])
    other = copy.deepcopy(model)
    assert torch.equal(other(x[0]), before)
    draw(other.graticule)
    assert not torch.allclose(other(x[0]), before)
    assert torch.equal(model(x[0]), before)
    assert "pos_embed" in detach(other).state_dict() and "pos_embed" not in model.state_dict()
