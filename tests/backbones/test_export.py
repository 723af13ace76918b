"""Every family is exported by torch.export with a batch of any size."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import graticule
from tiny import SMALL, assert_same, build, images_for, shallow

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
