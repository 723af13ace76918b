"""Every model is one graph for torch.compile and torch.export, with equal outputs, and a batch of any size."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import graticule
from graticule.backbones.registry import FAMILIES
from tiny import SMALL, THREE, assert_same, build, draw, families, gradients, images, images_for, shallow, tiny


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


#: Families that consist only of modules of ViT or ViT-Lite; a PEG, as in CPVT, is among the cases below.
ALIKE = ("CPVT, GAP", "CVT")
#: In addition to each family's default encoding, one encoding for every field of `LayerPosition`.
CASES = [
    *(
        pytest.param(family, None, "default", marks=() if family in ("ViT, DeiT", "PosMLP") else pytest.mark.slow)
        for family in SMALL
        if family not in ALIKE
    ),
    ("ViT, DeiT", "shaw+rope+convolutional_projection", "default"),
    ("ViT, DeiT", "peg+learnable", "lape"),
    ("Swin", "learnable", "lape"),
]


@torch.no_grad()
def assert_any_batch_goes_in(model: nn.Module, name: str, example: Tensor, *others: Tensor) -> None:
    """Export with a batch of two, and compare other batches with the model."""
    exported = export(model, (example,), dynamic_shapes={name: {0: Dim("batch")}}).module()
    for other in (example, *others):
        assert_same(exported(other), model(other), 1e-12)


@pytest.mark.parametrize(("family", "encoding", "joining"), CASES)
def test_an_exported_model_takes_a_batch_of_any_size(family, encoding, joining):
    sizes = {} if encoding and family != "Swin" else shallow(family)  # a projection between blocks needs two
    model = build(family, encoding, joining, **sizes).double().eval()
    assert_any_batch_goes_in(model, "x", images_for(model, 2), images_for(model, 1), images_for(model, 3))


@pytest.mark.parametrize(("family", "encoding"), [("gMLP", "ggqpe"), ("GFNet", "global_filter")])
def test_mixing_by_a_matrix_or_by_fourier_transforms_is_exported_too(family, encoding):
    model = build(family, encoding, num_blocks=1).double().eval()
    assert_any_batch_goes_in(model, "x", images_for(model, 2), images_for(model, 3))


@pytest.mark.parametrize(("encoding", "joining"), [("learnable", "lape"), ("rope_1d", "default")])
def test_an_exported_language_model_takes_a_batch_of_any_size(encoding, joining):
    model = graticule.create_language_model("lm_nano", 65, context=8, depth=1, encoding=encoding, joining=joining)
    tokens = torch.randint(0, 65, (3, 8))
    assert_any_batch_goes_in(model.double().eval(), "tokens", tokens[:2], tokens[:1], tokens)
