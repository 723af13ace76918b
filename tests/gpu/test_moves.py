"""Models move between devices without a change, and tensors on two devices are refused with their names."""

import copy

import pytest
import torch
from device_models import CASES, FEW, PLAIN, assert_close_in_norm, images_for, model_of, name_of

import graticule
from tiny import SMALL

every_case = pytest.mark.parametrize("case", CASES, ids=name_of)
few_cases = pytest.mark.parametrize("case", FEW, ids=name_of)


def devices_of(model):
    """Return the devices of all parameters and buffers, including those that are not in the state dict."""
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())}


@torch.no_grad()
@every_case
def test_a_model_moved_to_the_device_and_back_is_the_same(device, case):
    model = model_of(case)
    images = images_for(model)
    expected = model(images)
    moved = copy.deepcopy(model).to(device)
    assert devices_of(moved) <= {device}
    there = moved(images.to(device))
    assert there.device == device
    assert_close_in_norm({"logits": there}, {"logits": expected}, 1e-4)
    copied = copy.deepcopy(moved)
    assert devices_of(copied) <= {device}
    assert_close_in_norm({"logits": copied(images.to(device))}, {"logits": there}, 1e-6)
    back = moved.to("cpu")
    assert torch.equal(back(images), expected)


@torch.no_grad()
@every_case
def test_a_folded_model_moved_to_the_device_and_back_is_the_same(device, case):
    model = model_of(case)
    images = images_for(model)
    expected = model(images)
    for folded in (graticule.fold(copy.deepcopy(model)).to(device), graticule.fold(copy.deepcopy(model).to(device))):
        assert devices_of(folded) <= {device}
        assert_close_in_norm({"logits": folded(images.to(device))}, {"logits": expected}, 1e-4)
        copied = copy.deepcopy(folded)
        assert_close_in_norm({"logits": copied(images.to(device))}, {"logits": expected}, 1e-4)
        assert_close_in_norm({"logits": copied.cpu()(images)}, {"logits": expected}, 1e-4)
        unfolded = graticule.unfold(folded)
        assert devices_of(unfolded) <= {device}
        assert_close_in_norm({"logits": unfolded(images.to(device))}, {"logits": expected}, 1e-4)


@torch.no_grad()
@every_case
def test_a_state_dict_is_the_same_on_both_devices(device, case):
    model = model_of(case)
    images, state = images_for(model), {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(images)
    moved = copy.deepcopy(model).to(device)
    other = copy.deepcopy(model).to(device)
    for parameter in other.parameters():
        parameter.zero_()
    other.load_state_dict(state)  # from the CPU to the device
    assert_close_in_norm({"logits": other(images.to(device))}, {"logits": expected}, 1e-4)
    for parameter in model.parameters():
        parameter.zero_()
    model.load_state_dict(moved.state_dict())  # from the device to the CPU
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(images), expected)


@torch.no_grad()
@few_cases
def test_a_new_position_a_new_head_and_another_size_stay_on_the_device(device, case):
    model = model_of(case)
    height, width = model.img_size
    images = images_for(model)
    wide = torch.cat([images, images], -1)
    moved = copy.deepcopy(model).to(device)
    for each in (model, moved):
        each.set_input_size((height, 2 * width))
    assert devices_of(moved) <= {device}
    assert_close_in_norm({"logits": moved(wide.to(device))}, {"logits": model(wide)}, 1e-4)
    moved.reset_classifier(7)
    assert devices_of(moved) <= {device} and moved(wide.to(device)).shape == (2, 7)


@torch.no_grad()
def test_a_replaced_position_is_on_the_device(device):
    from graticule.hub.config import take_position

    model = model_of(FEW[0]).to(device)
    for encoding in ("rope", "relative_bias", "shaw", "sinusoidal_2d+peg"):
        model.replace_position(take_position({"encoding": encoding, "joining": "default"}, "learnable"))
        assert devices_of(model) <= {device}
        assert model(images_for(model).to(device)).device == device


# Tensors on two devices


def other_device(device):
    """Return a device that the weights are not on."""
    return torch.device("cpu" if device.type == "cuda" else "meta")


@pytest.mark.parametrize("family", SMALL)
def test_images_on_another_device_than_the_weights_are_refused(device, family):
    model = model_of((family, None, "default")).to(device)
    other = other_device(device)
    images = images_for(model).to(other)
    for compute in (model, model.forward_features, model.forward_intermediates):
        with pytest.raises(ValueError, match=f"`x` must be on {device}, the device of the weights, got {other}"):
            compute(images)


def test_a_list_of_images_on_two_devices_is_refused(device):
    model = model_of((PLAIN, None, "default")).to(device)
    image = images_for(model)[0]
    other = other_device(device)
    with pytest.raises(ValueError, match="`x` must be images on one device, got "):
        model([image.to(device), image.to(other)])
    with pytest.raises(ValueError, match=f"`x` must be on {device}, the device of the weights, got {other}"):
        model([image.to(other)])
