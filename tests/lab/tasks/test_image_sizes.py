"""Test images of other sizes: crops keep scale and position."""

import json

import pytest
import torch

import graticule
from commands import run_command
from graticule.lab.data.module import DataModule
from graticule.lab.tasks.options import Recipe
from graticule.lab.tasks.parts.image_scores import OnMiddle, evaluate
from graticule.lab.training.loop import train

FULL = (28, 28)


@pytest.fixture(scope="module")
def data() -> DataModule:
    module = DataModule("digits", size=FULL, limit_train=20, limit_test=30, eval_batch_size=16)
    return module


def model(encoding, **kwargs):
    torch.manual_seed(1)
    small = {"depth": 1, "embed_dim": 12, "num_heads": 1, **kwargs}
    return graticule.create_model("vit_nano_patch4_28", encoding=encoding, **small).eval()


def scores(model, data, *sizes, mode="crop"):
    return evaluate(model, data, sizes, progress=False, mode=mode, measure_cost=False)


def test_a_crop_of_the_size_of_training_is_the_image(data):
    for encoding in ("learnable", "rope", "irpe"):
        backbone = model(encoding)
        assert scores(backbone, data, FULL) == scores(backbone, data, FULL, mode="zoom")


def test_the_middle_begins_at_a_whole_patch():
    middle = OnMiddle(model("none"), (20, 24), FULL)
    assert (middle.top, middle.left) == (4, 0)  # (28 - 24) / 2 = 2 pixels are half a patch


def test_tokens_of_a_crop_before_the_first_layer_are_those_of_the_whole_image(data):
    images = torch.randn(2, 1, *FULL)
    for encoding in ("learnable", "sinusoidal_2d"):
        backbone = model(encoding, global_pool="avg", class_token=False)
        entering = []
        backbone.blocks[0].register_forward_pre_hook(lambda _, args, seen=entering: seen.append(args[0]))
        with torch.no_grad():
            backbone(images)
            OnMiddle(backbone, (12, 20), FULL)(images)
        full, part = entering
        torch.testing.assert_close(part.unflatten(1, (3, 5)), full.unflatten(1, (7, 7))[:, 2:5, 1:6])


def test_a_crop_without_position_is_the_image_of_its_size(data):
    backbone = model("none")
    (told,) = scores(backbone, data, (20, 20))
    with torch.no_grad():
        batches = data.eval_dataloader(FULL)
        right = [(backbone(images[..., 4:24, 4:24]).argmax(1) == labels).double() for images, labels in batches]
    assert told.top1 == pytest.approx(100 * float(torch.cat(right).mean()))


def test_an_encoding_that_cannot_encode_a_crop_is_not_told_and_the_others_are(data):
    told = {
        name: scores(model(name), data, (20, 16))[0].placed for name in ("none", "learnable", "rope", "shaw", "peg")
    }
    lape = model("relative_bias", joining="lape")  # the norm of a whole row differs from that of a part
    told["relative_bias, lape"] = scores(lape, data, (20, 16))[0].placed
    assert {name for name, placed in told.items() if not placed} == {"peg", "relative_bias, lape"}
    assert scores(model("rope"), data, FULL)[0].placed is None


def test_the_model_is_unchanged_and_crops_after_folding_are_the_same(data):
    backbone = model("learnable")
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    small, full = scores(backbone, data, (20, 20), FULL)
    assert scores(backbone, data, FULL, (20, 20)) == [full, small]
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())


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
    assert code == 1 and "`sizes` of crops must be at most the training size, 28 x 28" in err
    compare = ["compare", "digits_quick", "--choices", "encoding=none", "--output", tmp_path / "c", "--mode", "crop"]
    code, _, err = run_command(capsys, *compare, "--sizes", 36)
    assert code == 1 and "of crops" in err and not (tmp_path / "c").exists()
