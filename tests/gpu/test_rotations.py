"""Rotations of models of diffusers and transformers on a device: the model's own."""

import pytest
import torch
from device_models import devices_of

import graticule
from rotary_models import DIFFUSERS, GRIDS, TRANSFORMERS, build, dialect, run

#: DINOv3 divides by a number, which a GPU multiplies by its inverse; Qwen-Image computes its table on the CPU.
ROUNDED = ("DINOv3ViTModel", "QwenImageTransformer2DModel")


@torch.no_grad()
@pytest.mark.parametrize("name", [*TRANSFORMERS, *DIFFUSERS])
def test_the_own_dialect_of_a_model_on_the_device_gives_the_same_outputs(device, name):
    model = build(name).to(device)
    with device:
        expected = [run(model, grid) for grid in GRIDS]
        graticule.set_rotary(model, dialect(name))
        assert devices_of(model) == {device}
        found = [run(model, grid) for grid in GRIDS]
    if device.type == "cuda" and name in ROUNDED:
        torch.testing.assert_close(found, expected)
    else:
        assert all(map(torch.equal, found, expected))
