"""Every model is captured whole by torch.compile: no graph break, the same numbers."""

import re

import pytest
import torch

import graticule
from graticule.backbones import MODELS
from tiny import draw, gradients, images, tiny

#: Every kind of thing that a layer gets: `pre`, `inner`, a bias, one made from queries, a rotation, of tokens.
KINDS = [
    ("learnable", "shared"),
    ("shaw+rope+convolutional_projection", "default"),
    ("peg+sinusoidal_2d+relative_bias", "lape"),
]


@pytest.mark.parametrize(("encoding", "joining"), KINDS)
def test_the_forward_pass_is_one_graph_with_the_same_numbers(encoding, joining):
    model = draw(tiny(encoding, joining, depth=2)).double().eval()
    x = images(dtype=torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-12)


def test_another_size_is_one_graph_too():
    model = draw(tiny("learnable+relative_bias", "lape", depth=2)).double().eval()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    for size in ((32, 32), (24, 40)):
        x = images(*size, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("encoding", "joining"),
    [("learnable", "unshared"), ("peg(places=[-1, 0])+learnable+relative_bias", "lape")],
)
def test_forward_and_backward_are_one_graph_with_the_same_gradients(encoding, joining):
    model = draw(tiny(encoding, joining, depth=2)).double()
    x = images(dtype=torch.float64)
    model(x).square().sum().backward()
    eager = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, eager[name], rtol=1e-10, atol=1e-10, msg=name)


def test_a_distilled_model_in_training_is_one_graph_with_both_logits():
    model = tiny(name="deit_tiny_distilled_patch16_224", depth=2).train()
    model.set_distilled_training()
    x = images()
    for ours, eager in zip(torch.compile(model, fullgraph=True, backend="eager")(x), model(x), strict=True):
        torch.testing.assert_close(ours, eager)


def one_block(name: str, **kwargs) -> tuple[torch.nn.Module, int]:
    """The model `name` with a block, or one a stage, for images of 2 x 2 of its coarsest patches; and that patch."""
    size = MODELS[name]
    if size.argument("depths") is not None:
        stages = len(size.depths)
        sizes = {"depths": (1,) * stages} | ({"sr_ratios": (2, 2, 2, 1)} if size.argument("sr_ratios") else {})
        return graticule.create_model(name, img_size=8 << stages, num_classes=5, **sizes, **kwargs).eval(), 4 << stages
    if size.argument("num_blocks") is not None:
        patch = size.argument("patch_size")
        return graticule.create_model(name, num_blocks=1, img_size=2 * patch, num_classes=5, **kwargs).eval(), patch
    patch = next((int(found[1]) for found in [re.search(r"patch(\d+)", name)] if found), 16)
    kwargs = {"depth": 1, "img_size": 2 * patch, "num_classes": 5} | kwargs
    return graticule.create_model(name, **kwargs).eval(), patch


def one_of_each_class() -> list[str]:
    """The first model of every class, and CCT, whose stem is of convolutions."""
    kinds = {MODELS[name].kind: name for name in reversed(graticule.list_models())}
    return [*reversed(kinds.values()), "cct_2_3x2_32"]


@pytest.mark.parametrize("name", one_of_each_class())
def test_a_model_of_every_class_is_one_graph_in_bfloat16_at_another_size_that_is_no_square(name):
    mixes = "mixing" in MODELS[name].kind.needs
    kind = MODELS[name].kind
    alone = mixes or "peg" in name or "peg" in (kind.default_encoding or "")  # nothing to join
    options = {} if alone else {"joining": "lape"}
    if name == "convit_tiny":
        options |= {"encoding": "learnable + gpsa(layers=1)", "depth": 2}
    model, patch = one_block(name, **options)
    x = torch.randn(1, model.in_chans, 2 * patch, 3 * patch, dtype=torch.bfloat16)
    model = model.bfloat16()
    with torch.no_grad():
        logits = torch.compile(model, fullgraph=True, backend="eager")(x)
        torch.testing.assert_close(logits, model(x))
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
