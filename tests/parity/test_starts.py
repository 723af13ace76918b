"""The start of every backbone, and of its encodings, compared with released code: mean, spread and exact zeros."""

import json
import math
from pathlib import Path

import pytest
import timm
import torch

import graticule
from graticule.backbones.registry import MODELS
from graticule.encodings.build import build_position
from graticule.position.grid import Grid

#: Case -> the released code that was run, our model, and the start of each of its parameters, under our names.
RECORDED = json.loads((Path(__file__).parent / "golden" / "starts.json").read_text())
DEPTHS = {"depths": (2, 2, 2, 2)}
#: Model of timm, and ours under the same name if there is no other -> arguments, and parameters that differ on purpose.
TIMM = {
    "deit_tiny_patch16_224": ({"depth": 2}, ("cls_token",)),  # here as in DeiT's code, which the case `lape default` is
    "deit_tiny_distilled_patch16_224": ({"depth": 2}, ("cls_token",)),
    "convit_tiny": ({"depth": 11}, ()),
    "swin_tiny_patch4_window7_224": (DEPTHS, ()),
    "swinv2_tiny_window8_256": (DEPTHS, ()),
    "twins_svt_small": (DEPTHS, ()),
    "twins_pcpvt_small": (DEPTHS, ()),
    "samvit_base_patch16_224": ({"depth": 3}, ()),
    "gmlp_ti16_224": ({}, ()),
    "mixer_s32_224": ({}, ("position.stages.0.biases",)),  # of std 1e-6 there, zero here
}
OURS = {"twins_pcpvt_small": "pvt_small_peg_gap"}
#: Backbones that are in neither table.
NOT_COMPARED = {"ConditionalVisionTransformer": "DeiT with PEGs; its authors released no code"}
#: Model of timm -> its arguments, and the encoding whose position starts as its does.
ENCODINGS = {
    "vit_relpos_small_patch16_224": ({}, "mlp_bias"),
    "vit_relpos_medium_patch16_224": ({"rel_pos_type": "bias"}, "relative_bias"),
    "vit_srelpos_small_patch16_224": ({}, "shared_mlp_bias(hidden=384)"),
    "beit_base_patch16_224": ({}, "relative_bias(prefix_rows=True, std=0)"),
    "vit_small_patch16_rope_mixed_224": ({}, "rope_mixed(base=10)"),
}


def start(values):
    """Return mean, spread (mean distance from the mean) and share of exact zeros."""
    values = values.detach().double()
    if values.shape[1:] == (2, 2):  # Gamma of GQPE: the released code counts y upwards, which changes signs
        values = values.abs()
    mean = values.mean()
    return float(mean), float((values - mean).abs().mean()), float((values == 0).double().mean())


def differences(reference, ours):
    """Return the parameters whose start is another: by five standard errors of a random one, or at all of a constant.

    theirs: name -> mean, spread and share of zeros.
    ours: name -> parameter.
    """
    assert reference.keys() == ours.keys()
    differing = {}
    for name, (mean, spread, zeros) in reference.items():
        measured, error = start(ours[name]), 5 / math.sqrt(ours[name].numel())
        if spread and measured[1]:
            same = abs(measured[0] - mean) <= 2 * error * spread and abs(math.log(measured[1] / spread)) <= error
        else:
            same = measured[1] == spread and math.isclose(measured[0], mean, rel_tol=1e-3)
        if not same or abs(measured[2] - zeros) > error * (0 < zeros + measured[2] < 2):
            differing[name] = (mean, spread, zeros), measured
    return differing


def create(name, **arguments):
    torch.manual_seed(1)
    return graticule.create_model(name, **arguments)


def start_of_timm(name, arguments):
    torch.manual_seed(0)
    reference = timm.create_model(name, **arguments)
    ours = create(OURS.get(name, name), **arguments)
    ours.load_state_dict(reference.state_dict())
    return {name: start(values) for name, values in ours.named_parameters()}


@pytest.mark.parametrize("case", RECORDED)
def test_start_equals_that_of_the_authors_code(case):
    recorded = RECORDED[case]
    model = create(recorded["model"], **recorded["arguments"])
    assert differences(recorded["start"], dict(model.named_parameters())) == {}


@pytest.mark.parametrize("name", TIMM)
def test_start_equals_that_of_timm(name):
    arguments, known = TIMM[name]
    reference = start_of_timm(name, arguments)
    differing = differences(reference, dict(create(OURS.get(name, name), **arguments).named_parameters()))
    assert [parameter for parameter in differing if not parameter.startswith(known or ("-",))] == []
    assert all(any(parameter.startswith(prefix) for parameter in differing) for prefix in known)


@pytest.mark.parametrize("name", ENCODINGS)
def test_start_of_an_encoding_equals_that_of_timm(name):
    arguments, encoding = ENCODINGS[name]
    torch.manual_seed(0)
    reference = graticule.convert(timm.create_model(name, depth=2, **arguments))
    heads = reference.blocks[0].attn.num_heads
    grid = Grid(*reference.grid.shape, prefix=reference.grid.prefix)
    ours = build_position(grid, dim=reference.embed_dim, depth=2, num_heads=heads, encoding=encoding)
    expected = {name: start(values) for name, values in reference.position.named_parameters()}
    assert differences(expected, dict(ours.named_parameters())) == {}


def test_every_backbone_is_compared():
    names = {*(recorded["model"] for recorded in RECORDED.values()), *(OURS.get(name, name) for name in TIMM)}
    compared = {MODELS[name].kind.__name__ for name in names}
    every = {size.kind.__name__ for size in MODELS.values() if size.kind.__module__.startswith("graticule.")}
    assert compared | NOT_COMPARED.keys() == every
