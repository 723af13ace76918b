"""Models are also scored with the labels of ImageNet-ReaL, several per image."""

import json
import re

import pytest
import torch

import graticule
from commands import run_command
from image_files import write_folder


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
