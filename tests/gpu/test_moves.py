"""Models move between devices without a change, and tensors on two devices are refused with their names."""

import copy

import pytest
import torch
from device_models import CASES, FEW, PLAIN, assert_close_in_norm, devices_of, images_for, model_of, name_of

import graticule
from graticule.hub.config import take_position
from tiny import SMALL, holds


@torch.no_grad()
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_model_that_is_moved_copied_folded_or_loaded_on_the_device_is_the_same(device, case):
    model = model_of(case)
    images, state = images_for(model), {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(images)
    moved, empty = (copy.deepcopy(model).to(device) for _ in range(2))
    for parameter in empty.parameters():
        parameter.zero_()
    empty.load_state_dict(state)  # from the CPU to the device
    folded = graticule.fold(copy.deepcopy(model)).to(device)
    refolded = graticule.fold(copy.deepcopy(model).to(device))
    for part in (moved, copy.deepcopy(moved), empty, folded, refolded, copy.deepcopy(folded)):
        assert devices_of(part) <= {device}
        output = part(images.to(device))
        assert output.device == device
        assert_close_in_norm({"logits": output}, {"logits": expected}, 1e-4)
    assert_close_in_norm({"logits": copy.deepcopy(folded).cpu()(images)}, {"logits": expected}, 1e-4)
    unfolded = graticule.unfold(folded)
    assert devices_of(unfolded) <= {device}
    assert_close_in_norm({"logits": unfolded(images.to(device))}, {"logits": expected}, 1e-4)
    for parameter in model.parameters():
        parameter.zero_()
    model.load_state_dict(moved.state_dict())  # from the device to the CPU
    assert holds(model, state) and torch.equal(model(images), expected)
    assert torch.equal(moved.to("cpu")(images), expected)


@torch.no_grad()
@pytest.mark.parametrize("case", FEW, ids=name_of)
def test_a_new_head_and_another_size_stay_on_the_device(device, case):
    model = model_of(case)
    height, width = model.img_size
    wide = torch.cat([images_for(model)] * 2, -1)
    moved = copy.deepcopy(model).to(device)
    assert_close_in_norm({"logits": moved(wide.to(device))}, {"logits": model(wide)}, 1e-4)
    for part in (model, moved):
        part.set_input_size((height, 2 * width))
    assert devices_of(moved) <= {device}
    assert_close_in_norm({"logits": moved(wide.to(device))}, {"logits": model(wide)}, 1e-4)
    moved.reset_classifier(7)
    assert devices_of(moved) <= {device} and moved(wide.to(device)).shape == (2, 7)


@torch.no_grad()
def test_a_replaced_position_is_on_the_device(device):
    model = model_of(FEW[0]).to(device)
    for encoding in ("rope", "relative_bias", "shaw", "sinusoidal_2d+peg"):
        model.replace_position(take_position({"encoding": encoding, "joining": "default"}, "learnable"))
        assert devices_of(model) <= {device} and model(images_for(model).to(device)).device == device


@pytest.mark.parametrize("family", SMALL)
def test_images_on_another_device_than_the_weights_are_refused(device, family):
    model = model_of((family, None, "default")).to(device)
    other = torch.device("cpu" if device.type == "cuda" else "meta")
    images, image = images_for(model).to(other), images_for(model)[0].to(device)
    for compute in (model, model.forward_features, model.forward_intermediates):
        with pytest.raises(ValueError, match=f"`x` must be on {device}, the device of the weights, got {other}"):
            compute(images)
    if family == PLAIN:
        with pytest.raises(ValueError, match="`x` must be images on one device, got "):
            model([image, images[0]])
        with pytest.raises(ValueError, match=f"`x` must be on {device}, the device of the weights, got {other}"):
            model([images[0]])
