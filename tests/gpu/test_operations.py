"""Operations on a model that is on a device: results are those of the same model on the CPU, which stays there."""

import copy

import numpy as np
import pytest
import torch
from device_models import PLAIN, assert_close_in_norm, images_for, model_of

import graticule
from graticule import analysis
from graticule.surgery.change import change_position
from graticule.testing import check_model
from tiny import shallow

TABLE = (PLAIN, "learnable+relative_bias", "lape")
ROTATION = (PLAIN, "rope", "default")
PYRAMID = ("Swin", None, "default")
GATED = ("PosMLP", None, "default")
models = pytest.mark.parametrize("case", [TABLE, ROTATION, PYRAMID, GATED], ids=lambda case: "-".join(map(str, case)))


def devices_of(model):
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())}


def on_both(case, device, **kwargs):
    """Return the model on the CPU and on the device."""
    model = model_of(case, **kwargs)
    return model, copy.deepcopy(model).to(device)


def assert_same_arrays(found, expected, tolerance=1e-3):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


# Changes in place


@torch.no_grad()
@models
def test_a_fold_and_a_resize_on_the_device_are_those_of_the_cpu(device, case):
    model, moved = on_both(case, device)
    size = tuple(2 * side for side in model.img_size)
    images = torch.randn(2, model.in_chans, *size, generator=torch.Generator().manual_seed(1))
    for each in (model, moved):
        graticule.resize(each, size)
    expected = model(images)
    for change in (lambda x: x, graticule.fold, graticule.unfold):
        changed = change(moved)
        assert devices_of(changed) == {device}
        assert_close_in_norm({"logits": changed.eval()(images.to(device))}, {"logits": expected}, 1e-4)


def test_a_change_of_position_on_the_device_is_that_of_the_cpu(device):
    model, moved = on_both((PLAIN, "learnable", "default"), device)
    images = images_for(model, batch=4)
    for new in (
        {"encoding": "factorized"},
        {"encoding": "relative_bias"},
        {"encoding": "learnable", "joining": "lape"},
    ):
        ours, theirs = copy.deepcopy(model), copy.deepcopy(moved)
        change_position(ours, **new, images=images)
        change_position(theirs, **new, images=images.to(device))
        assert devices_of(theirs) == {device}, new
        with torch.no_grad():
            found, expected = theirs.eval()(images.to(device)), ours.eval()(images)
        assert_close_in_norm({"logits": found}, {"logits": expected}, 1e-3)


def test_weights_of_another_model_are_transferred_to_the_device(device):
    source, other = on_both((PLAIN, "learnable", "default"), device)
    target = copy.deepcopy(other)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    graticule.transfer(target, source.state_dict())
    assert devices_of(target) == {device}
    images = images_for(source)
    with torch.no_grad():
        assert_close_in_norm({"logits": target(images.to(device))}, {"logits": source(images)}, 1e-4)


def test_a_position_is_attached_to_a_model_of_timm_on_the_device(device):
    import timm

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    host = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    moved = copy.deepcopy(host).to(device)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = host(images)
        ours = graticule.convert(moved)
        assert devices_of(ours) == {device}
        assert_close_in_norm({"logits": ours.eval()(images.to(device))}, {"logits": expected}, 1e-4)
    attached = graticule.attach(moved, "learnable", "lape_sharing").eval()
    assert devices_of(attached) == {device}
    with torch.no_grad():
        assert attached(images.to(device)).device == device


# Measures


@models
def test_the_share_of_position_on_the_device_is_that_of_the_cpu(device, case):
    model, moved = on_both(case, device)
    images = images_for(model, batch=6)
    ours, theirs = (analysis.position_share(one, x) for one, x in ((model, images), (moved, images.to(device))))
    assert ours.names == theirs.names
    assert_same_arrays([theirs.total.value, theirs.decay.value], [ours.total.value, ours.decay.value])
    assert devices_of(moved) == {device}


@pytest.mark.parametrize("on", ["cpu", "device"])
def test_an_audit_on_the_device_is_that_of_the_cpu(device, on):
    """With labels on either device."""
    model, moved = on_both(TABLE, device)
    images, labels = images_for(model, batch=8), torch.arange(8) % 5
    size = tuple(images.shape[2:])
    ours = analysis.audit(model, {size: images}, labels=labels, timed=False)
    given = labels.to(device) if on == "device" else labels
    theirs = analysis.audit(moved, {size: images.to(device)}, labels=given, timed=False)
    assert ours.accuracy == theirs.accuracy and ours.unavailable == theirs.unavailable
    for first, second in zip(ours.effects, theirs.effects, strict=True):
        assert first.name == second.name
        assert_same_arrays([second.change], [first.change])


@pytest.mark.parametrize("case", [TABLE, ROTATION], ids=["table", "rotation"])
def test_maps_of_position_on_the_device_are_those_of_the_cpu(device, case):
    model, moved = on_both(case, device)
    images = images_for(model)
    of_table = () if case == ROTATION else (analysis.position_correlations,)
    for measure in (analysis.bias_maps, analysis.rotary_similarity, *of_table):
        ours, theirs = measure(model), measure(moved)
        assert (ours is None) == (theirs is None), measure
        if measure is analysis.bias_maps and ours is not None:
            assert_same_arrays([theirs.bias], [ours.bias])
        elif ours is not None:
            assert_same_arrays([theirs.similarity], [ours.similarity])
    ours, theirs = (analysis.attention_maps(one, x) for one, x in ((model, images), (moved, images.to(device))))
    for first, second in zip(ours, theirs, strict=True):
        assert_same_arrays([second.weights], [first.weights])
    assert devices_of(moved) == {device}


def test_weights_that_mix_tokens_are_read_from_the_device(device):
    model, moved = on_both(GATED, device)
    ours, theirs = (analysis.mixing_maps(one) for one in (model, moved))
    assert len(ours) == len(theirs)
    for first, second in zip(ours, theirs, strict=True):
        assert_same_arrays([second.weights], [first.weights])


def test_translations_are_measured_on_the_device(device):
    model, moved = on_both(TABLE, device)
    images = images_for(model)
    ours, theirs = (analysis.translation_error(one, x) for one, x in ((model, images), (moved, images.to(device))))
    assert_same_arrays([theirs.all_patches, theirs.prefix], [ours.all_patches, ours.prefix])


@pytest.mark.parametrize("method", ["mean", "rows_columns", "leace", "blank"])
def test_position_is_removed_from_a_model_on_the_device(device, method):
    model, moved = on_both((PLAIN, "sinusoidal_2d", "default"), device)
    images = images_for(model, batch=12)
    ours, theirs = (graticule.debias(one, x, method) for one, x in ((model, images), (moved, images.to(device))))
    assert devices_of(theirs) == {device}
    with torch.no_grad():
        found, expected = theirs.eval().forward_features(images.to(device)), ours.eval().forward_features(images)
    assert found.device == device
    assert_close_in_norm({"logits": found}, {"logits": expected}, 1e-3)


# Checks and programs


def test_a_model_on_the_device_is_checked(device):
    model = model_of(TABLE).to(device)
    check_model(model)
    assert devices_of(model) == {device}


@pytest.mark.parametrize("suffix", ["pt2", "onnx", "safetensors"])
def test_a_model_on_the_device_is_exported(device, suffix, tmp_path):
    model = model_of(TABLE, **shallow(PLAIN)).to(device)
    exported = graticule.export(model, tmp_path / f"model.{suffix}")
    assert exported.error < 1e-5
    assert devices_of(model) == {device}
    if suffix == "pt2":
        images = images_for(model, batch=1)
        with torch.no_grad():
            (found,) = torch.export.load(tmp_path / "model.pt2").module()(images)
            assert_close_in_norm({"logits": found}, {"logits": model(images.to(device))}, 1e-4)


def test_a_published_model_is_saved_from_the_device_and_opened_on_the_cpu(device, tmp_path):
    model = model_of(TABLE).to(device)
    graticule.save_pretrained(model, tmp_path / "published")
    again = graticule.from_pretrained(tmp_path / "published").eval()
    assert devices_of(again) == {torch.device("cpu")}
    images = images_for(again)
    with torch.no_grad():
        assert_close_in_norm({"logits": again(images)}, {"logits": model(images.to(device))}, 1e-4)
