"""Models are also scored with the labels of ImageNet-ReaL, several per image."""

import json

import pytest
import torch

import graticule
from commands import run_command
from image_files import write_folder


def validation_folder(root):
    """Write six images as a part of ImageNet's validation set: numbers 1 to 6, three of each of two classes."""
    write_folder(root, val="test")
    for number, file in enumerate(sorted((root / "test").rglob("*.JPEG")), start=1):
        file.rename(file.with_name(f"ILSVRC2012_val_{number:08}.JPEG"))
    (root / "test").rename(root / "val")
    return root


def test_an_image_is_right_by_real_labels_if_its_top1_is_among_them(tmp_path, capsys):
    root = validation_folder(tmp_path / "images")
    model = graticule.create_model("vit_nano_patch4_28", img_size=8, depth=1, in_chans=3, num_classes=2)
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([0.0, 1e4]))  # every image is of class 1
    published, real = graticule.save_pretrained(model, tmp_path / "published"), tmp_path / "real.json"

    def evaluated(labels):
        real.write_text(json.dumps(labels))
        command = ("evaluate", published, "--images", root, "--real", real, "--output", tmp_path)
        code, out, said = run_command(capsys, *command)
        return (json.loads((tmp_path / "evaluation.json").read_text())[0], out) if code == 0 else said

    record, out = evaluated([[0], [0, 1], [], [1], [1], [0]])
    assert record["top1"] == 50 and record["real"] == pytest.approx(60) and "ReaL (%)" in out and "60.00" in out
    assert "the class of 0 of 6 images" in evaluated([[1]] * 3 + [[0]] * 3)
    assert "`real` must be given with images of ImageNet's validation set" in evaluated([[0]] * 5)
    assert "real.json is damaged" in evaluated([0, 1])
