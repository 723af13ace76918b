"""Every family with every encoding and every joining: it runs whole, or it is refused with a reason."""

import copy
import itertools
import re
from pathlib import Path

import pytest
import torch

import graticule
from graticule.studies.matrix import SMALL, build, combinations, table

CASES = list(itertools.product(SMALL, graticule.list_encodings(), graticule.list_joinings()))


def allowed(family, encoding, joining):
    """What the mathematics allows, written down apart from the code that finds it out."""
    absolute = encoding in ("learnable", "sinusoidal_1d", "sinusoidal_2d")
    mixing = encoding in ("sgu", "lrpe", "glrpe", "lrpe_m", "gqpe", "ggqpe")
    if (family in ("gMLP", "PosMLP")) != mixing:
        return False
    if family == "PVT" and not absolute and encoding not in ("none", "peg"):
        return False  # its keys are fewer than its queries
    if family == "Swin" and encoding == "convolutional_projection":
        return False  # its queries are those of windows, which have borders inside of the image
    if joining == "default":
        return True
    if absolute:
        return encoding == "learnable" or joining != "unshared"
    return encoding in ("relative_bias", "continuous_bias") and joining == "lape"


@pytest.mark.parametrize(("family", "encoding", "joining"), [case for case in CASES if allowed(*case)])
def test_what_goes_together_runs_whole(family, encoding, joining):
    torch.manual_seed(0)
    model = build(family, encoding, joining)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel() and not parameter.any() and not name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)  # what starts at zero would hide what stands behind it
    side = model.img_size[0]
    images = torch.randn(2, model.in_chans, side, side)
    model.train()(images).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []

    model.eval()
    with torch.no_grad():
        logits = model(images)
        assert logits.shape == (2, 5) and logits.isfinite().all()
        wide = torch.randn(1, model.in_chans, side, 2 * side)
        elsewhere = model(wide)
        assert elsewhere.isfinite().all()
        torch.testing.assert_close(graticule.fold(copy.deepcopy(model))(images), logits)
        model.set_input_size((side, 2 * side))
        assert model.grid.shape == (model.grid.height, model.grid.width) and model.grid.width == 2 * model.grid.height
        assert model(wide).isfinite().all()


#: In a ViT every choice is compiled in tests/backbones/test_compile.py; these families use an encoding in another way.
COMPILED = [
    case
    for case in CASES
    if allowed(*case) and case[0] in ("Swin", "gMLP", "PosMLP") and case[2] in ("default", "lape")
]


@pytest.mark.parametrize(("family", "encoding", "joining"), COMPILED)
def test_windows_and_gated_mlps_are_one_graph_with_what_they_take(family, encoding, joining):
    model = build(family, encoding, joining).eval()
    images = torch.randn(2, model.in_chans, *model.img_size)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(images), model(images))


@pytest.fixture(scope="module")
def found():
    """Every combination, and the reason where it is refused."""
    return combinations()


def test_what_does_not_go_together_is_refused_with_a_reason(found):
    assert {case for case, reason in found.items() if not reason} == {case for case in CASES if allowed(*case)}
    known = re.compile(r"`(encoding|joining)` must|must have no prefix tokens where tokens are mixed")
    assert [reason for reason in found.values() if reason and not known.search(reason)] == []


def test_the_table_in_the_docs_is_the_one_that_the_code_makes(found):
    assert (Path(__file__).parents[1] / "docs" / "matrix.md").read_text() == table(found)
