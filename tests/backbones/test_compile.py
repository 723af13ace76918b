"""Every model compiles to one graph with torch.compile, without graph breaks and with equal outputs."""

import pytest
import torch

from graticule.backbones.registry import FAMILIES
from tiny import SMALL, THREE, assert_same, build, draw, families, gradients, images, shallow, tiny


@pytest.mark.parametrize(
    ("encoding", "joining"),
    [
        *(pytest.param("learnable", joining, marks=pytest.mark.slow) for joining in ("shared", "unshared")),
        ("shaw+rope+convolutional_projection", "default"),
        ("peg(places=[-1, 0])+sinusoidal_2d+relative_bias", "lape"),
    ],
)
def test_forward_and_backward_are_one_graph_with_the_same_numbers_and_gradients(encoding, joining):
    model = draw(tiny(encoding, joining, depth=2)).double()
    x = images(dtype=torch.float64)
    expected = model(x)
    expected.square().sum().backward()
    eager = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    actual = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert_same(actual, expected, 1e-12)
    actual.square().sum().backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, eager[name], rtol=1e-10, atol=1e-10, msg=name)


def test_a_distilled_model_in_training_is_one_graph_with_both_logits():
    model = tiny(name="deit_tiny_distilled_patch16_224", depth=2).train()
    model.set_distilled_training()
    x = images()
    for ours, eager in zip(torch.compile(model, fullgraph=True, backend="eager")(x), model(x), strict=True):
        torch.testing.assert_close(ours, eager)


def test_every_class_declares_a_small_model():
    assert SMALL.keys() == FAMILIES.keys()


# CVT has the layers of ViT-Lite; a distilled model and a PEG are compiled above
@families(THREE[:2], [family for family in SMALL if family not in ("CVT", "DeiT, distilled", "CPVT, GAP")])
def test_a_model_of_every_family_is_one_graph_in_bfloat16_at_another_size_that_is_not_square(family):
    nothing_to_join = family in ("CPVT, GAP", "Twins-SVT") or "mixing" in build(family).needs
    model = build(family, joining="default" if nothing_to_join else "lape", **shallow(family)).bfloat16().eval()
    height, width = model.img_size
    x = torch.randn(1, model.in_chans, height, 2 * width, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = torch.compile(model, fullgraph=True, backend="eager")(x)
        torch.testing.assert_close(logits, model(x))
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
