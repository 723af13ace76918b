"""The numbers of every encoding and family on a device: those of the CPU, in every dtype and memory format."""

import pytest
import torch
from device_models import CASES, FEW, assert_close_in_norm, images_for, logits_and_gradients, model_of, name_of

every_case = pytest.mark.parametrize("case", CASES, ids=name_of)
few_cases = pytest.mark.parametrize("case", FEW, ids=name_of)


@every_case
def test_outputs_and_gradients_in_float32_equal_those_of_the_cpu(device, case):
    """On the CPU, where both would be the same pass, the expected ones are in float64."""
    model = model_of(case)
    images = images_for(model)
    if device.type == "cpu":
        expected = logits_and_gradients(model_of(case).double(), images.double())
    else:
        expected = logits_and_gradients(model_of(case), images)
    found = logits_and_gradients(model.to(device), images.to(device))
    assert {value.device for value in found.values()} == {device}
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert_close_in_norm(found, expected, 1e-4)


#: The bounds in units of a dtype's eps: errors of some ten roundings, each at most half of it, add up; gradients have
#: the errors of both passes.
FACTORS = {"logits": 4, "gradients": 8}


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_differs_from_float32_by_rounding_alone(device, case, dtype):
    model = model_of(case).to(device)
    images = images_for(model).to(device)
    expected = logits_and_gradients(model, images)
    with torch.autocast(device.type, dtype):
        found = logits_and_gradients(model, images)
    assert found.keys() == expected.keys()
    parts = {"logits": [], "gradients": []}
    for name, value in found.items():
        assert value.isfinite().all(), f"{name} must be finite in {dtype}"
        parts["logits" if name == "logits" else "gradients"].append((value.float(), expected[name]))
    for part, pairs in parts.items():
        ours, theirs = (torch.cat([value.flatten() for value in values]) for values in zip(*pairs, strict=True))
        error, bound = float((ours - theirs).norm() / theirs.norm()), FACTORS[part] * torch.finfo(dtype).eps
        assert error <= bound, f"{part} must differ by at most {bound:.1e} of their norm in {dtype}, got {error:.1e}"


@few_cases
def test_channels_last_images_and_weights_give_the_same_outputs_and_gradients(device, case):
    model = model_of(case).to(device)
    images = images_for(model).to(device)
    expected = {name: value.clone() for name, value in logits_and_gradients(model, images).items()}
    images = images.to(memory_format=torch.channels_last)
    assert_close_in_norm(logits_and_gradients(model, images), expected, 1e-5)
    model.to(memory_format=torch.channels_last)
    assert_close_in_norm(logits_and_gradients(model, images), expected, 1e-5)


@few_cases
def test_another_size_on_the_device_gives_the_outputs_of_the_cpu(device, case):
    model = model_of(case)
    height, width = model.img_size
    images = torch.randn(2, model.in_chans, height, 2 * width)
    with torch.no_grad():
        expected = model(images)
        found = model.to(device)(images.to(device))
    assert_close_in_norm({"logits": found}, {"logits": expected}, 1e-4)
