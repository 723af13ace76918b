"""Public functions that take a whole model, on every family: a correct result, or a refusal listed in one table."""

import copy
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import graticule
from graticule import testing
from graticule.analysis.audit import audit, audit_json
from graticule.analysis.position_maps import rotary_similarity
from graticule.analysis.probe import Probe
from graticule.checkpoints.load import load_own, published_state_dict
from graticule.checkpoints.read import save_weights
from graticule.external.open_view import view_of
from graticule.lab.data.module import DataModule
from graticule.lab.studies.matrix import build
from graticule.lab.tasks.classification import Recipe
from graticule.lab.tasks.parts.image_scores import evaluate
from graticule.lab.training.loop import train
from graticule.surgery.change import change_position
from tiny import (
    GATED,
    SMALL,
    assert_same,
    draw,
    every_family,
    images_for,
    shallow,
    three_families,
    two_families,
)

#: Their attention is within windows, or has keys on another grid, so rotations and biases of pairs are not supported.
WITHOUT_PAIRS = ("PVT", "Twins-SVT", *GATED)
#: Measurements that an audit cannot make.
UNAVAILABLE: dict[str, set[str]] = {family: {"attention", "position zeroed"} for family in GATED}
pytestmark = pytest.mark.usefixtures("_without_gradients")


@pytest.fixture
def _without_gradients():
    with torch.no_grad():
        yield


@cache
def held(family: str, encoding: str | None = None, joining: str = "default") -> Any:
    """Return the shared model of a case, which tests must not change."""
    torch.manual_seed(0)
    return draw(build(family, encoding, joining)).eval().requires_grad_(False)


def model_of(family: str, encoding: str | None = None) -> Any:
    return copy.deepcopy(held(family, encoding))


def refused(why: str) -> Any:
    return pytest.raises(ValueError, match=why)


@cache
def digits(size: tuple[int, int]) -> DataModule:
    data = DataModule("digits", size=size, limit_train=20, limit_test=4, eval_batch_size=4)
    data.setup()
    return data


def classifier_of_digits(family: str) -> Any:
    """Return a shallow model of gray images and ten classes."""
    name, sizes = SMALL[family]
    return draw(graticule.create_model(name, in_chans=1, num_classes=10, **{**sizes, **shallow(family)})).eval()


@three_families
def test_another_position_leaves_all_other_weights_or_is_refused_and_nothing_changes(family):
    mixed = {"lrpe_m", "sinusoidal_2d + sgu"}
    for encoding in ("none", "learnable", "rope", "lrpe_m", "sinusoidal_2d + sgu"):
        model = model_of(family)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        x = images_for(model)
        expected = model(x)
        if (encoding in mixed) != (family in GATED) or (encoding == "rope" and family in WITHOUT_PAIRS):
            with refused("`(encoding|grid)` must"):
                change_position(model, encoding)
            torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
            continue
        change_position(model, encoding, images=x)
        assert model(x).isfinite().all()
        assert [one.layer for one in model.certificate.drift] == list(range(sum(model.depths)))
        others = [{k: v for k, v in state.items() if k[:8] != "position"} for state in (before, model.state_dict())]
        assert_same(*others, atol=0)


@three_families
def test_weights_are_exported_and_loaded_under_published_and_under_own_names(tmp_path, family):
    model = model_of(family)
    x = images_for(model)
    published = save_weights(published_state_dict(model), tmp_path / "model.safetensors")
    fresh = graticule.load_checkpoint(build(family), published).eval()
    torch.testing.assert_close(fresh(x), model(x))
    other = load_own(build(family), save_weights(model.state_dict(), tmp_path / "own.safetensors"))
    assert_same(other.state_dict(), model.state_dict(), atol=0)


@three_families
def test_a_saved_model_is_opened_with_its_arguments_and_weights(tmp_path, family):
    model = model_of(family)
    again = graticule.from_pretrained(model.save_pretrained(tmp_path / "saved"))
    x = images_for(model)
    assert type(again) is type(model) and again.img_size == model.img_size and not again.training
    torch.testing.assert_close(again(x), model(x))
    assert_same(again.state_dict(), model.state_dict(), atol=0)


@two_families
def test_nothing_is_attached_to_a_model_that_has_a_position(family):
    model = model_of(family)
    x = images_for(model)
    expected = model(x)
    with refused("`module` must have no position of this library"):
        graticule.attach(model)
    with refused("`module` must have an attached position"):
        graticule.detach(model)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


@three_families
def test_an_audit_probes_every_layer_and_shuffles_the_position(family):
    model = model_of(family)
    height, width = model.img_size
    given = {(height, width): images_for(model, 5), (2 * height, width): images_for(model, 5, taller=2)}
    found = audit(model, given, timed=False)
    assert len(found.probes) == len(found.grids) == sum(model.depths) and not found.unknown
    for probe, grid in zip(found.probes, found.grids, strict=True):
        assert isinstance(probe, Probe) and probe.examples == 5 * grid.patches
        assert probe.r2.shape == (5, 2) and np.isfinite(probe.mean[[side > 1 for side in grid.shape]]).all()
    effects = {effect.name for effect in found.effects}
    assert effects >= {"position zeroed", "position shuffled", "probe's directions removed"} - set(found.unavailable)
    assert set(found.unavailable) - {"position maps"} == UNAVAILABLE.get(family, set()), found.unavailable
    assert audit_json(found, {})


@three_families
def test_a_view_has_the_grid_of_every_layer(family):
    model = held(family)
    view = view_of(model)
    grids = view.grids(view.img_size)
    assert view.img_size == model.img_size and len(grids) == sum(model.depths)
    assert [at.patches for at in grids] == [at.patches for _, at in model.each_layer(images_for(model))]


@three_families
def test_the_similarity_under_rotation_is_that_of_every_layer_that_rotates(family):
    assert rotary_similarity(held(family)) is None
    if family in WITHOUT_PAIRS:
        return
    model = held(family, "rope")
    for stage, depth in enumerate(model.depths):
        found = rotary_similarity(model, stage=stage)
        assert len(found.similarity) == depth
        for source, one in zip(found.sources, found.similarity, strict=True):
            if source is None:  # no rotation, or windows in a layer where another one has the whole grid
                assert np.isnan(one).all()
            else:
                np.testing.assert_allclose(one, one.T, atol=1e-6)
                np.testing.assert_allclose(np.diagonal(one), 1.0, atol=1e-6)
        assert any(found.sources)


@every_family
def test_the_position_code_passes_every_check(family):
    model = draw(build(family, **shallow(family))).eval()
    found = testing.check_model(model, skip=("export", "autocast", "caches", "crop"))
    assert {one.outcome for one in found} <= {"passed", "not applicable"}
    assert "batch" in {one.check for one in found if one.outcome == "passed"}


@three_families
def test_segmentation_gives_a_class_per_pixel(family):
    model = graticule.create_segmenter(model_of(family), 3, decoder="segmenter_linear").eval()
    x = images_for(held(family), taller=2)
    assert model(x).shape == (2, 3, *x.shape[-2:])


@three_families
def test_detection_gives_boxes_within_the_image(family):
    model = graticule.create_detector(model_of(family), 3, head="fcos(score=0.0)").eval()
    x = images_for(held(family), batch=1, taller=2)
    with torch.no_grad():
        (found,) = model(list(x))
    height, width = x.shape[-2:]
    assert found["boxes"].shape == (len(found["labels"]), 4) and found["boxes"].isfinite().all()
    assert (found["boxes"] <= torch.tensor([width, height, width, height])).all() and (found["boxes"] >= 0).all()


@two_families
def test_a_classifier_is_scored_at_two_sizes(family):
    model = classifier_of_digits(family)
    size = model.img_size
    taller = (2 * size[0], size[1])
    small, large = evaluate(model, digits(size), [size, taller], progress=False, measure_cost=False)
    assert small.size == size and large.size == taller and 0 < small.loss < float("inf")


@two_families
def test_a_run_trains_every_parameter_and_is_opened(tmp_path, family):
    name, sizes = SMALL[family]
    given = {**sizes, **shallow(family)}
    side, encoding = given.pop("img_size"), given.pop("encoding", None)
    small: Any = {"limit_train": 10, "limit_test": 10, "batch_size": 10, "epochs": 1, "accelerator": "cpu"}
    words = tuple(f"{key}={json.dumps(value)}" for key, value in given.items())
    chosen = {} if encoding is None else {"encoding": encoding}
    recipe = Recipe(model=name, model_kwargs=words, img_size=(side, side), **chosen, **small)
    run = train(recipe, tmp_path / "run", progress=False)
    model = run.model()
    start = graticule.lab.training.build_model(recipe, num_classes=10)
    assert run.finished and model(torch.zeros(1, model.in_chans, side, side)).shape == (1, 10)
    assert start.state_dict().keys() == model.state_dict().keys()
