"""Compatibility of families, encodings and joinings: a combination runs, or is refused with a reason."""

import copy
import re
from pathlib import Path

import pytest
import torch

import graticule
from evidence.names import gallery_table, table
from graticule.backbones.registry import MODELS
from graticule.lab.studies.matrix import GROUPS, combinations, initials
from graticule.position.joining import JOININGS
from graticule.position.position import ENCODINGS
from in_turn import in_turn
from tiny import PYRAMIDS, SMALL, THREE, build, families, fields, goes_with, takes

#: The fields of `LayerPosition` that a family declares; the contract of backbones proves that its layers use them.
USES = {family: MODELS[name].kind.takes for family, (name, _) in SMALL.items()}


def allowed(family, encoding, joining):
    """Return whether the mathematics allows it, by the fields of the encoding and those that the family uses."""
    if not takes(joining, encoding):
        return False
    fields_given = fields(encoding, joining)
    if family in ("Swin", "Swin V2", "SAM") and JOININGS[joining].whole_grid:
        return False
    if family == "ConViT" and encoding in ("pope", "gpsa"):  # a class token of other channels; no layer without gates
        return False
    return fields_given <= USES[family] and ("mixing" in fields_given) == ("mixing" in USES[family])


#: The contract runs every encoding in a ViT or gMLP; these families use encodings differently.
OTHERS = (*PYRAMIDS, "SAM")


def sums(family, most=4):
    """Return sums of at most `most` encodings, such that each one that a family takes is in one of them."""
    combined = []
    for encoding in ENCODINGS:
        if not allowed(family, encoding, "default"):
            continue
        others = [names for names in combined if names.count("+") < most - 1 and goes_with(names, encoding)]
        if others:
            combined[combined.index(others[0])] += f"+{encoding}"
        else:
            combined.append(encoding)
    return combined


@families(THREE, OTHERS)
@in_turn("encoding", sums)
def test_pyramids_run_whole_with_every_encoding_that_they_take(family, encoding):
    assert_runs_whole(family, encoding, "default")


def joinings(family):
    return [joining for joining in JOININGS if allowed(family, "learnable", joining)]


@pytest.mark.parametrize("family", ["Swin"])
@in_turn("joining", joinings)
def test_pyramids_run_whole_with_every_joining_that_they_take(family, joining):
    assert_runs_whole(family, "learnable", joining)


def assert_runs_whole(family, encoding, joining):
    model = build(family, encoding, joining)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel() and not parameter.any() and not name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)  # parameters that start at zero would hide later ones
    side = model.img_size[0]
    images = torch.randn(2, model.in_chans, side, side)
    model.train()(images).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []

    model.eval()
    with torch.no_grad():
        logits = model(images)
        assert logits.shape == (2, 5) and logits.isfinite().all()
        wide = torch.randn(1, model.in_chans, side, 2 * side)
        assert model(wide).isfinite().all()
        torch.testing.assert_close(graticule.fold(copy.deepcopy(model))(images), logits)
        model.set_input_size((side, 2 * side))
        assert model.grid.width == 2 * model.grid.height
        assert model(wide).isfinite().all()


@pytest.fixture(scope="module")
def reasons():
    """Return every combination, with the reason if it is refused."""
    return combinations()


def test_disallowed_combinations_are_refused_with_a_reason(reasons):
    wrong = [case for case, reason in reasons.items() if bool(reason) == allowed(*case)]
    assert not wrong
    known = re.compile(r"`(encoding|joining|head_dim)` must|must have no prefix tokens where tokens are mixed")
    assert [reason for reason in reasons.values() if reason and not known.search(reason)] == []


def test_the_generated_tables_are_those_in_the_docs(reasons):
    """`make tables` writes them."""
    root = Path(__file__).parents[3]
    families = (root / "docs" / "backbones.md").read_text(encoding="utf-8")
    assert table(reasons) in families
    page = (root / "docs" / "encodings.md").read_text(encoding="utf-8")
    assert all(gallery_table(group) in page for group, _, _ in GROUPS)
    assert len(set(initials().values())) == len(JOININGS)
