"""Parameters of the full-size models, held against the references and the papers without drawing a weight."""

import json
from pathlib import Path

import pytest
import torch

import graticule
from tiny import count

FACTS = json.loads((Path(__file__).parents[1] / "parity" / "golden" / "facts.json").read_text())
DEIT = [row for row in FACTS if row.startswith("deit")]
TABLE = 197 * 192  # of DeiT-Ti at 224 pixels


def full_size(name, **kwargs):
    with torch.device("meta"):
        return graticule.create_model(name, **kwargs)


@pytest.mark.parametrize("row", DEIT)
def test_the_model_has_the_parameters_of_the_reference(row):
    name, joining = row.split(".")
    model = full_size(name, joining=joining)
    assert count(model) == FACTS[row]["parameters"]
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == FACTS[row]["trainable"]


def test_every_row_of_deit_is_there():
    assert len(DEIT) == 12


@pytest.mark.parametrize(
    ("encoding", "joining", "parameters", "printed"),
    [
        ("learnable", "default", TABLE, "38K"),
        ("learnable", "shared", TABLE, "38K"),
        ("learnable", "unshared", 12 * TABLE, "454K"),
        ("learnable", "lape", TABLE + 12 * 2 * 192, "42K"),
        ("learnable", "lape_sharing", TABLE + 12 * 2 * 192, "42K"),
        ("sinusoidal_1d", "default", TABLE, "38K"),
        ("sinusoidal_2d", "lape", TABLE + 12 * 2 * 192, "42K"),
    ],
)
def test_parameters_of_position_are_those_of_lapes_table_7(encoding, joining, parameters, printed):
    position = full_size("deit_tiny_patch16_224", encoding=encoding, joining=joining).position
    assert count(position) == parameters
    assert f"{round(parameters / 1000)}K" == printed


def test_a_fixed_table_counts_and_is_not_trained():
    model = full_size("deit_tiny_patch16_224", encoding="sinusoidal_2d")
    assert count(model) == FACTS["deit_tiny_patch16_224.default"]["parameters"]
    assert sum(p.numel() for p in model.parameters() if not p.requires_grad) == TABLE


@pytest.mark.parametrize("eta", [1, 6, 12])
def test_lape_adds_two_d_for_each_joined_layer(eta):
    default = FACTS["deit_tiny_patch16_224.default"]["parameters"]
    assert count(full_size("deit_tiny_patch16_224", joining="lape", joined_layers=eta)) == default + 2 * 192 * eta
