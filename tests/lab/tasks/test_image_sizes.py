"""Test images of other sizes: crops keep scale and position, and the causes of a difference add up to it."""

import json
import math

import pytest
import torch

import graticule
from commands import run_command
from graticule.lab.data.module import DataModule
from graticule.lab.tasks.classification import Recipe
from graticule.lab.tasks.parts.image_scores import OnMiddle, crop_of, evaluate, middle, size_causes
from graticule.lab.training.loop import train

WHOLE = (28, 28)


@pytest.fixture(scope="module")
def data() -> DataModule:
    module = DataModule("digits", size=WHOLE, limit_train=20, limit_test=30, eval_batch_size=16)
    module.setup()
    return module


def model(encoding, **kwargs):
    torch.manual_seed(1)
    small = {"depth": 1, "embed_dim": 12, "num_heads": 1, **kwargs}
    return graticule.create_model("vit_nano_patch4_28", encoding=encoding, **small).eval()


def scores(one, data, *sizes, mode="crop"):
    return evaluate(one, data, sizes, progress=False, mode=mode, measure_cost=False)


def test_a_crop_of_the_size_of_training_is_the_image(data):
    for encoding in ("learnable", "rope", "irpe"):
        one = model(encoding)
        assert scores(one, data, WHOLE) == scores(one, data, WHOLE, mode="zoom")


def test_the_middle_begins_at_a_whole_patch():
    one = model("none")
    assert middle(one, (20, 24), WHOLE) == (4, 0)  # (28 - 24) / 2 = 2 pixels are half a patch
    assert middle(one, WHOLE, WHOLE) == (0, 0)


def test_tokens_of_a_crop_before_the_first_layer_are_those_of_the_whole_image(data):
    images = torch.randn(2, 1, *WHOLE)
    for encoding in ("learnable", "sinusoidal_2d"):
        one = model(encoding, global_pool="avg", class_token=False)
        entering = []
        one.blocks[0].register_forward_pre_hook(lambda _, args, seen=entering: seen.append(args[0]))
        with torch.no_grad():
            one(images)
            OnMiddle(one, middle(one, (12, 20), WHOLE), (12, 20), crop_of(one, (12, 20), WHOLE))(images)
        whole, part = entering
        torch.testing.assert_close(part.unflatten(1, (3, 5)), whole.unflatten(1, (7, 7))[:, 2:5, 1:6])


def test_a_crop_without_position_is_the_image_of_its_size(data):
    one = model("none")
    (told,) = scores(one, data, (20, 20))
    cut = OnMiddle(one, (4, 4), (20, 20), None)
    with torch.no_grad():
        right = [(cut(images).argmax(1) == labels).double() for images, labels in data.eval_dataloader(WHOLE)]
    assert told.top1 == pytest.approx(100 * float(torch.cat(right).mean()))


def test_an_encoding_that_cannot_encode_a_crop_is_not_told_and_the_others_are(data):
    found = {
        name: scores(model(name), data, (20, 16))[0].placed for name in ("none", "learnable", "rope", "shaw", "peg")
    }
    lape = model("relative_bias", joining="lape")  # the norm of a whole row differs from that of a part
    found["relative_bias, lape"] = scores(lape, data, (20, 16))[0].placed
    assert {name for name, placed in found.items() if not placed} == {"peg", "relative_bias, lape"}
    assert scores(model("rope"), data, WHOLE)[0].placed is None


def test_the_model_is_unchanged_and_crops_after_folding_are_the_same(data):
    one = model("learnable")
    before = {name: value.clone() for name, value in one.state_dict().items()}
    small, whole = scores(one, data, (20, 20), WHOLE)
    assert scores(one, data, WHOLE, (20, 20)) == [whole, small]
    assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())


def test_the_control_of_the_causes_is_the_score_of_the_middle_of_the_zoomed_image(data):
    one = model("sinusoidal_2d")
    found = size_causes(one, data, (36, 36), progress=False)
    cropped = OnMiddle(one, middle(one, WHOLE, (36, 36)), WHOLE, crop_of(one, WHOLE, (36, 36)))
    with torch.no_grad():
        right = [(cropped(images).argmax(1) == labels).double() for images, labels in data.eval_dataloader((36, 36))]
    expected = 100 * float(torch.cat(right).mean()) - found.top1[1]
    assert found.controls["crop"].top1 == pytest.approx(expected)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Train a run whose encoding cannot encode crops."""
    small = {"limit_train": 20, "limit_test": 10, "batch_size": 20, "epochs": 1, "accelerator": "cpu"}
    kwargs = ("depth=1", "embed_dim=12", "num_heads=1")
    recipe = Recipe(model_kwargs=kwargs, encoding="relative_bias", joining="lape", **small)
    return train(recipe, tmp_path_factory.mktemp("runs") / "tiny", progress=False)


def test_evaluate_and_compare_take_crops_no_larger_than_the_training(capsys, tiny, tmp_path):
    command = ["evaluate", tiny.folder, "--output", tmp_path, "--device", "cpu", "--mode", "crop"]
    code, out, err = run_command(capsys, *command, "--sizes", 28, 20)
    assert code == 0, err
    assert "crop: the middle of the image" in out and "cannot encode a crop: tiny" in out
    at_28, at_20 = json.loads((tmp_path / "evaluation.json").read_text())
    assert at_28["placed"] is None and at_20["placed"] is False and at_20["mode"] == "crop"
    code, _, err = run_command(capsys, *command, "--sizes", 36)
    assert code == 1 and "`sizes` of crops must be at most that of the training, 28 x 28" in err
    compare = ["compare", "digits_quick", "--choices", "encoding=none", "--output", tmp_path / "c", "--mode", "crop"]
    code, _, err = run_command(capsys, *compare, "--sizes", 36)
    assert code == 1 and "of crops" in err and not (tmp_path / "c").exists()


def test_the_parts_add_up_to_the_difference_of_the_scores(data):
    for encoding in ("learnable", "rope"):
        one = model(encoding)
        found = size_causes(one, data, (36, 28), progress=False)
        small, large = evaluate(one, data, [(28, 28), (36, 28)], progress=False, measure_cost=False)
        assert found.top1 == pytest.approx((small.top1, large.top1))
        assert sum(part.top1 for part in found.parts.values()) == pytest.approx(large.top1 - small.top1)
        assert sum(part.loss for part in found.parts.values()) == pytest.approx(large.loss - small.loss, abs=1e-5)
        assert tuple(found.parts) == ("tokens", "content", "values")
        assert set(found.controls) == {"log_n", "canvas", "crop"} | ({"bilinear"} if encoding == "learnable" else set())
        assert all(math.isfinite(part.top1_error) for part in found.parts.values())


def test_evaluate_shows_the_causes(capsys, tiny, tmp_path):
    command = ["evaluate", tiny.folder, "--output", tmp_path, "--device", "cpu"]
    code, out, err = run_command(capsys, *command, "--sizes", 28, 36, "--causes")
    assert code == 0, err
    (row,) = [line.split() for line in out.splitlines() if line.startswith("tiny")]
    assert row[1] == "36x36" and "difference = tokens + content + values" in out
    at_28, at_36 = json.loads((tmp_path / "evaluation.json").read_text())
    assert at_28["causes"] is None and set(at_36["causes"]["parts"]) == {"tokens", "content", "values"}
    for more, said in (
        (["--sizes", 20, "--mode", "canvas"], "`causes` must be left out"),
        (["--sizes", 20], "`sizes` must be no smaller"),
        (["--sizes", 28], "`sizes` must include one above that of the training, 28 x 28,"),
        ([], "`sizes` must include one above that of the training, 28 x 28,"),
    ):
        code, _, err = run_command(capsys, *command, "--causes", *more)
        assert code == 1 and said in err
