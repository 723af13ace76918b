"""An evaluation counts every image once, at any size, also with the labels of ImageNet-ReaL, and changes no model."""

import json
import re

import pytest
import timm
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import graticule
from commands import run_command
from graticule.external.traced_model import view_of
from graticule.lab.data.module import DataModule
from graticule.lab.tasks.parts.image_scores import evaluate
from graticule.lab.training.cost import inference_cost
from graticule.lab.training.loop import train
from image_files import write_folder
from short_runs import rows, short


@pytest.fixture(scope="module")
def data() -> DataModule:
    return DataModule("digits", size=(28, 28), limit_train=20, limit_test=50, eval_batch_size=16)


def model_that_knows(data: DataModule, wrong: int) -> torch.nn.Module:
    """Return a model that classifies all test images correctly except the first `wrong`, by looking them up."""
    model = graticule.create_model("vit_nano_patch4_28")
    images, answers = data.test_images((28, 28), range(50))
    answers[:wrong] = (answers[:wrong] + 1) % 10

    def look_up(x):
        distances = torch.cdist(x.flatten(1), images.flatten(1))
        return 2 * torch.nn.functional.one_hot(answers[distances.argmin(1)], 10).float()

    model.forward = look_up
    return model


def test_top1_is_the_share_of_right_images_and_the_loss_the_mean_over_images_whatever_the_batches(data):
    right, wrong = (-torch.log_softmax(torch.tensor([2.0] + [0.0] * 9), 0)[:2]).tolist()
    (score,) = evaluate(model_that_knows(data, wrong=7), data, [(28, 28)], progress=False)
    assert (score.images, score.top1) == (50, pytest.approx(100 * 43 / 50, abs=1e-4))
    assert score.loss == pytest.approx((43 * right + 7 * wrong) / 50, rel=1e-6)


def test_the_model_is_unchanged(data):
    model = graticule.create_model("vit_nano_patch4_28", joining="lape").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scores = evaluate(model, data, [(20, 28), (28, 28)], progress=False)
    assert [score.size for score in scores] == [(20, 28), (28, 28)]
    assert model.training and model.position.training and type(model.position).__name__ == "JoinedPosition"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_size_that_no_patch_divides_is_refused_before_any_work(data):
    model = graticule.create_model("vit_nano_patch4_28").train()
    with pytest.raises(ValueError, match="`img_size`"):
        evaluate(model, data, [(28, 28), (28, 30)], progress=False)
    assert model.training


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", pytest.param("64-true", marks=pytest.mark.slow)])
def test_a_run_is_scored_in_its_precision(tmp_path, capsys, precision):
    run = train(short(precision=precision, epochs=1), tmp_path / "run", progress=False)
    code, out, _ = run_command(capsys, "evaluate", run.folder)
    (record,) = json.loads((run.folder / "evaluation.json").read_text())
    assert code == 0 and f"computed in {precision}" in out and record["precision"] == precision
    assert record["loss"] == pytest.approx(float(rows(run)[0]["val_loss"]), rel=1e-6)


@pytest.mark.parametrize("ours", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_multiply_adds_of_an_image_are_those_of_a_pass_at_its_size(ours, data):
    if ours:
        model, sizes = graticule.create_model("vit_nano_patch4_28"), [(28, 28), (28, 56)]
    else:
        model, sizes = (
            timm.create_model("vit_tiny_patch16_224", depth=2, in_chans=1, num_classes=10),
            [(32, 48), (64, 64)],
        )
    for score in evaluate(model, data, sizes, progress=False):
        sized = view_of(model).resized_to(score.size).model.eval()
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            sized(torch.zeros(1, 1, *score.size))
        assert score.multiply_adds == counter.get_total_flops() // 2 > 0


@pytest.mark.parametrize("probe", ["knn", "ridge"])
def test_a_probe_reads_the_classes_of_folders_from_any_backbone(tmp_path, capsys, probe):
    for index in range(20):
        image = Image.new("RGB", (32, 32), (250, 20, 20) if index % 2 else (20, 20, 250))
        folder = tmp_path / "images" / ("red" if index % 2 else "blue")
        folder.mkdir(parents=True, exist_ok=True)
        image.putpixel((index, 3), (0, 200, 0))
        image.save(folder / f"{index}.png")
    (tmp_path / "mine.py").write_text(
        "import timm\n\ndef build():\n    return timm.create_model('vit_tiny_patch16_224', img_size=32, depth=1)\n"
    )
    graticule.create_model("vit_nano_patch4_28", in_chans=3, depth=1).save_pretrained(tmp_path / "published")
    models = [tmp_path / "published", f"{tmp_path / 'mine.py'}:build"]
    words = ["--images", tmp_path / "images", "--probe", probe, "--output", tmp_path, "--sizes", 32]
    code, out, err = run_command(capsys, "evaluate", *models, *words)
    assert code == 0, err
    for record in json.loads((tmp_path / "probe.json").read_text()):
        assert record["top1"] == 100 and 0 < record["interval"][0] < record["interval"][1] == 100
        assert record["size"] == [32, 32]
    assert f"{probe} (%)" in out
    for more, message in (
        (("--mode", "canvas"), "`mode` must be left out with `probe`, got canvas"),
        ((), "`images` must have a folder for each class"),
    ):
        if not more:
            words[1] = tmp_path / "images" / "red"
        code, _, err = run_command(capsys, "evaluate", *models, *words, *more)
        assert (code, message in err) == (1, True), err


def test_a_pass_has_a_speed_and_its_memory_is_counted_on_gpus_alone():
    model = graticule.create_model("vit_nano_patch4_28", depth=1).eval()
    cost = inference_cost(model, torch.zeros(2, 1, 28, 28))
    assert cost.batch == 2 and 0 < cost.images_per_second < float("inf") and cost.memory is None


def validation_folder(root, first=1):
    """Write six images as a part of ImageNet's validation set: numbers 1 to 6, three of each of two classes."""
    write_folder(root, val="test")
    for number, file in enumerate(sorted((root / "test").rglob("*.JPEG")), start=first):
        file.rename(file.with_name(f"ILSVRC2012_val_{number:08}.JPEG"))
    (root / "test").rename(root / "val")
    return root


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A model that gives every image the class 1 of 2."""
    model = graticule.create_model("vit_nano_patch4_28", img_size=8, depth=1, in_chans=3, num_classes=2)
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([0.0, 1e4]))
    return graticule.save_pretrained(model, tmp_path_factory.mktemp("models") / "published")


def test_an_image_is_right_by_real_labels_if_its_top1_is_among_them(tmp_path, capsys, published):
    root, real = validation_folder(tmp_path / "images"), tmp_path / "real.json"
    real.write_text(json.dumps([[0], [0, 1], [], [1], [1], [0]]))
    command = ("evaluate", published, "--images", root, "--output", tmp_path)
    code, out, _ = run_command(capsys, *command, "--real", real, "--sizes", 8, 12)
    records = json.loads((tmp_path / "evaluation.json").read_text())
    # of the five images with labels, three have class 1 among them
    assert code == 0 and [(record["top1"], record["real"]) for record in records] == [(50, pytest.approx(60))] * 2
    assert "ReaL (%)" in out and out.count("60.00") == 2
    assert "ReaL (%)" not in run_command(capsys, *command)[1]
    assert json.loads((tmp_path / "evaluation.json").read_text())[0]["real"] is None


@pytest.mark.parametrize(
    ("text", "first", "message"),
    [
        (json.dumps([[1]] * 3 + [[0]] * 3), 1, "in the order of the model's classes.*the class of 0 of 6 images"),
        (json.dumps([[]] * 6), 1, "the class of 0 of 0 images"),
        (json.dumps([[0]] * 5), 1, "exactly the test images, ILSVRC2012_val_00000001.JPEG to 00000005, got 6 images"),
        (json.dumps([[0]] * 6), 2, "exactly the test images.*such as ILSVRC2012_val_00000002.JPEG"),
        (json.dumps([0, 1]), 1, "timm, or the file real.json of ImageNet-ReaL: .*is damaged"),
        (json.dumps([[0.5]] * 6), 1, "timm, or the file real.json"),
        ("[[0], [", 1, "timm, or the file real.json"),
        (None, 1, "timm, or the file real.json"),
    ],
)
def test_a_file_of_other_labels_is_refused(tmp_path, capsys, published, text, first, message):
    root, real = validation_folder(tmp_path / "images", first), tmp_path / "real.json"
    if text is not None:
        real.write_text(text)
    code, _, said = run_command(capsys, "evaluate", published, "--images", root, "--real", real, "--output", tmp_path)
    assert code == 1
    assert re.search(f"`real` must .*{message}", said), said


def test_the_labels_of_timm_are_of_all_50_000_images(tmp_path, capsys, published):
    root = validation_folder(tmp_path / "images")
    code, _, said = run_command(capsys, "evaluate", published, "--images", root, "--real", "timm")
    assert code == 1 and "ILSVRC2012_val_00000001.JPEG to 00050000, got 6 images" in said
