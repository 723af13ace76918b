"""Rotations of models of diffusers and transformers on a device: the model's own, bit for bit."""

import pytest
import torch
from device_models import devices_of

import graticule
from rotary_models import DIFFUSERS, GRIDS, TRANSFORMERS, build, dialect, run


@torch.no_grad()
@pytest.mark.parametrize("name", [*TRANSFORMERS, *DIFFUSERS])
def test_the_own_dialect_of_a_model_on_the_device_gives_the_same_outputs(device, name):
    model = build(name).to(device)
    with device:
        expected = [run(model, grid) for grid in GRIDS]
        graticule.set_rotary(model, dialect(name))
        assert devices_of(model) == {device}
        assert all(map(torch.equal, (run(model, grid) for grid in GRIDS), expected))
