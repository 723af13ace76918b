"""Operations on a model on a device give the results of the same model on the CPU, and leave the model there."""

import copy

import numpy as np
import pytest
import timm
import torch
import transformers
from device_models import PLAIN, assert_close_in_norm, devices_of, images_for, model_of, name_of

import graticule
from graticule import analysis
from graticule.surgery.change import change_position
from graticule.testing import check_model
from tiny import SIZE, build, shallow

TABLE = (PLAIN, "learnable+relative_bias", "lape")
LEARNABLE = (PLAIN, "learnable", "default")
ROTATION = (PLAIN, "rope", "default")
PYRAMID = ("Swin", None, "default")
GATED = ("PosMLP", None, "default")


def on_both(case, device, **kwargs):
    """Return the model on the CPU and on the device."""
    model = model_of(case, **kwargs)
    return model, copy.deepcopy(model).to(device)


@torch.no_grad()
def assert_same_outputs(model, images, moved, device, tolerance=1e-4, compute=torch.nn.Module.__call__):
    """Check that a model is on the device, with the outputs of another one on the CPU."""
    assert devices_of(moved) == {device}
    outputs, expected = compute(moved.eval(), images.to(device)), compute(model.eval(), images)
    assert outputs.device == device
    assert_close_in_norm({"logits": outputs}, {"logits": expected}, tolerance)


# Changes in place


@pytest.mark.parametrize("case", [TABLE, ROTATION, PYRAMID, GATED], ids=lambda case: "-".join(map(str, case)))
def test_a_fold_and_a_resize_on_the_device_are_those_of_the_cpu(device, case):
    model, moved = on_both(case, device)
    size = tuple(2 * side for side in model.img_size)
    images = torch.randn(2, model.in_chans, *size, generator=torch.Generator().manual_seed(1))
    for part in (model, moved):
        graticule.resize(part, size)
    for change in (lambda x: x, graticule.fold, graticule.unfold):
        assert_same_outputs(model, images, change(moved), device)


@pytest.mark.parametrize("new", [("factorized",), ("relative_bias",), ("learnable", "lape")], ids=str)
def test_a_change_of_position_on_the_device_is_that_of_the_cpu(device, new):
    model, moved = on_both(LEARNABLE, device)
    images = images_for(model, batch=4)
    change_position(model, *new, images=images)
    change_position(moved, *new, images=images.to(device))
    assert_same_outputs(model, images, moved, device, 1e-3)


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_an_encoder_of_another_library_on_the_device_is_resized_as_on_the_cpu(device, library):
    if library == "timm":
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval()
    else:
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
        model = transformers.Dinov2Model(transformers.Dinov2Config(image_size=28, patch_size=14, **sizes)).eval()
    moved = copy.deepcopy(model).to(device)
    size = (64, 96) if library == "timm" else (56, 84)
    for part in (model, moved):
        graticule.resize(part, size)
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    read = torch.nn.Module.__call__ if library == "timm" else lambda part, x: part(x).last_hidden_state
    assert_same_outputs(model, images, moved, device, compute=read)


@pytest.mark.parametrize("case", [TABLE, ROTATION, PYRAMID, GATED], ids=name_of)
def test_a_model_built_without_values_gets_them_on_the_device(device, case):
    model = model_of(case)
    with torch.device("meta"):
        empty = build(*case)
    empty.to_empty(device=device).load_state_dict(model.state_dict())
    assert_same_outputs(model, images_for(model), empty, device)


def test_weights_of_another_model_are_transferred_to_the_device(device):
    source, target = on_both(LEARNABLE, device)
    for parameter in target.parameters():
        parameter.data.zero_()
    graticule.transfer(target, source.state_dict())
    assert_same_outputs(source, images_for(source), target, device)


def test_a_model_of_timm_on_the_device_is_converted_and_a_position_is_attached_to_it(device):
    host = timm.create_model("vit_tiny_patch16_224", **SIZE).eval()
    moved, images = copy.deepcopy(host).to(device), torch.randn(2, 3, 32, 32)
    assert_same_outputs(host, images, graticule.convert(moved), device)
    attached = graticule.attach(moved, "learnable", "lape_sharing").eval()
    assert devices_of(attached) == {device} and attached(images.to(device)).device == device


@pytest.mark.parametrize("method", ["mean", "rows_columns", "leace", "blank"])
def test_position_is_removed_from_a_model_on_the_device(device, method):
    model, moved = on_both((PLAIN, "sinusoidal_2d", "default"), device)
    images = images_for(model, batch=12)
    ours, on_device = (graticule.debias(part, x, method) for part, x in ((model, images), (moved, images.to(device))))
    assert_same_outputs(ours, images, on_device, device, 1e-3, lambda debiased, x: debiased.forward_features(x))


# Measures


def share(model, images):
    shares = analysis.position_share(model, images)
    return [shares.total.value, shares.decay.value]


def translation(model, images):
    errors = analysis.translation_error(model, images)
    return [errors.all_patches, errors.prefix]


def attention(model, images):
    return [maps.weights for maps in analysis.attention_maps(model, images)]


#: The model that is measured, and a function that returns the arrays of a measure.
MEASURES = {
    **{f"share of position, {case[0]}, {case[1]}": (case, share) for case in (TABLE, ROTATION, PYRAMID, GATED)},
    "biases": (TABLE, lambda model, images: [analysis.bias_maps(model).bias]),
    "rotations": (ROTATION, lambda model, images: [analysis.rotary_similarity(model).similarity]),
    "correlations": (TABLE, lambda model, images: [analysis.position_correlations(model).similarity]),
    **{f"attention, {case[1]}": (case, attention) for case in (TABLE, ROTATION)},
    "mixing": (GATED, lambda model, images: [maps.weights for maps in analysis.mixing_maps(model)]),
    "translation": (TABLE, translation),
}


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_on_the_device_is_that_of_the_cpu(device, name):
    case, measure = MEASURES[name]
    model, moved = on_both(case, device)
    images = images_for(model, batch=6)
    ours, measured = measure(model, images), measure(moved, images.to(device))
    assert ours and len(ours) == len(measured) and devices_of(moved) == {device}
    for expected, values in zip(ours, measured, strict=True):
        np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("on", ["cpu", "device"])
def test_an_audit_on_the_device_is_that_of_the_cpu(device, on):
    """With labels on either device."""
    model, moved = on_both(TABLE, device)
    images, labels = images_for(model, batch=8), torch.arange(8) % 5
    size = tuple(images.shape[2:])
    ours = analysis.audit(model, {size: images}, labels=labels, timed=False)
    moved_labels = labels.to(device) if on == "device" else labels
    on_device = analysis.audit(moved, {size: images.to(device)}, labels=moved_labels, timed=False)
    assert ours.accuracy == on_device.accuracy and ours.unavailable == on_device.unavailable
    for first, second in zip(ours.effects, on_device.effects, strict=True):
        assert first.name == second.name
        np.testing.assert_allclose(second.change, first.change, rtol=1e-3, atol=1e-3)


# Checks and programs


def test_a_model_on_the_device_is_checked_and_published(device, tmp_path):
    model = model_of(TABLE).to(device)
    check_model(model)
    again = graticule.from_pretrained(graticule.save_pretrained(model, tmp_path / "published"))
    assert devices_of(again) == {torch.device("cpu")}
    assert_same_outputs(again, images_for(again), model, device)


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_a_model_on_the_device_is_exported(device, suffix, tmp_path):
    model = model_of(TABLE, **shallow(PLAIN)).to(device)
    exported = graticule.export(model, tmp_path / f"model.{suffix}")
    assert exported.error < 1e-5 and devices_of(model) == {device}
    if suffix == "pt2":
        program, images = torch.export.load(exported.path).module(), images_for(model, batch=1)
        with torch.no_grad():
            (logits,) = program(images)
            assert_close_in_norm({"logits": logits}, {"logits": model(images.to(device))}, 1e-4)
