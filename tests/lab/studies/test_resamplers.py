"""`graticule resamplers` compares the features and scores of a model at other sizes for each resampler."""

import dataclasses
import json
import re

import pytest
import timm
import torch
from PIL import Image

import graticule
from commands import refused, run_command
from graticule.lab.data.registry import load_dataset
from graticule.lab.recipes.load import load_recipe
from graticule.lab.studies.resamplers import ResamplerStudy, candidates, try_resamplers
from graticule.lab.tasks.classification import Recipe
from graticule.lab.training.loop import train
from graticule.surgery.resize import with_resampler


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    recipe: Recipe = load_recipe("digits_quick").quick()
    return train(recipe, tmp_path_factory.mktemp("runs") / "run", progress=False)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Write three images of each of the embedded digits, in one folder per class."""
    images, info = load_dataset("digits", "test")
    folder, left = tmp_path_factory.mktemp("images"), dict.fromkeys(range(10), 3)
    for index in range(len(images)):
        picture, label = images[index]
        if left[label]:
            left[label] -= 1
            (folder / info.class_names[label]).mkdir(exist_ok=True)
            picture.save(folder / info.class_names[label] / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return graticule.create_model("vit_nano_patch4_28", encoding="learnable(std=1.0)", num_classes=3).eval()


@pytest.fixture(scope="module")
def images():
    generator = torch.Generator().manual_seed(0)
    return {(side, side): [torch.randn(1, side, side, generator=generator) for _ in range(4)] for side in (28, 40)}


def test_a_run_is_tried_with_all_resamplers_on_digits(capsys, run, digits, tmp_path):
    code, out, err = run_command(
        capsys, "resamplers", run.folder, "--images", digits, "--sizes", 20, 40, "--output", tmp_path
    )
    assert code == 0, err
    for name in ("bicubic", "bilinear", "area", "crop", "bicubic(antialias=False)"):
        assert re.search(rf"^{re.escape(name)} +0\.\d{{4}} ± 0\.\d{{4}}", out, re.MULTILINE), name
    assert "top-1 at 20" in out and "cosine at 40" in out and "over 30 images" in out and "geometric" not in out
    assert not err  # no bar without a terminal
    record = json.loads((tmp_path / "resamplers.json").read_text())
    assert record["own"] == ["bicubic"] and record["trained_at"] == [28, 28]
    assert {len(values) for by in record["cosine"].values() for values in by.values()} == {30}
    assert {value for by in record["top1"].values() for value in by["40"]} <= {0.0, 100.0}
    assert record["cosine"]["bicubic"]["40"] != record["cosine"]["area"]["40"]


def test_a_model_by_name_is_tried_on_images_without_classes(capsys, digits, tmp_path):
    arguments = ["--images", digits / "3", "--sizes", "20x40", "--output", tmp_path]
    code, out, err = run_command(
        capsys, "resamplers", "vit_nano_patch4_28", *arguments, "--encoding", "relative_bias(resampler='geometric')"
    )
    assert code == 0, err
    assert "geometric" in out and "crop" not in out and "top-1" not in out
    assert json.loads((tmp_path / "resamplers.json").read_text())["own"] == ["geometric"]


def test_a_model_of_timm_is_converted_and_tried(capsys, digits, tmp_path):
    (tmp_path / "small.py").write_text(
        "import timm\nstock = timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=8, depth=1)\n"
    )
    arguments = ["--images", digits / "3", "--sizes", 40, "--output", tmp_path]
    code, out, err = run_command(capsys, "resamplers", f"{tmp_path}/small.py:stock", *arguments)
    assert code == 0 and "the model has bicubic" in out, err
    stock = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1)
    with pytest.raises(ValueError, match="position of this library to be resampled, got VisionTransformer of timm"):
        with_resampler(stock, "area")


def test_invalid_models_and_images_are_refused(capsys, run, digits, tmp_path):
    model = ["vit_nano_patch4_28", "--images", digits]
    (tmp_path / "one").mkdir()
    Image.new("L", (28, 28)).save(tmp_path / "one" / "a.png")
    wrong = [
        ([*model, "--sizes", 40, "--encoding", "sinusoidal_2d"], "`model` must have an encoding that is resampled"),
        ([*model, "--sizes", 40, "--encoding", "rope"], "`model` must have an encoding that is resampled"),
        (model, "`sizes` must be different sizes"),
        ([*model, "--sizes", 41], "the nearest sizes are 40 and 44"),
        ([*model, "--sizes", 40, "--count", 1], "`count` must be at least 2"),
        ([model[0], "--images", tmp_path / "none", "--sizes", 40], "`images` must be a folder"),
        ([model[0], "--images", tmp_path / "one", "--sizes", 40], "`images` must be at least 2, got 1"),
        ([run.folder, "--images", digits, "--sizes", 40, "--encoding", "learnable"], "`encoding` must be left out"),
        (["vit_nano", "--images", digits, "--sizes", 40], "vit_nano_patch4_28"),
    ]
    for arguments, why in wrong:
        assert why in refused(capsys, "resamplers", *arguments)


HOST = """
from transformers import PixioConfig, PixioModel
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
model = PixioModel(PixioConfig(image_size=28, patch_size=4, num_channels=1, **sizes))
"""


def test_a_model_that_does_not_convert_is_compared_with_its_own_resampling(capsys, digits, tmp_path):
    (tmp_path / "host.py").write_text(HOST)
    arguments = (f"{tmp_path}/host.py:model", "--images", digits, "--sizes", 40, "--count", 4, "--output", tmp_path)
    code, out, err = run_command(capsys, "resamplers", *arguments)
    assert code == 0, err
    assert re.search(r"^its own +0\.\d{4} ± 0\.\d{4}", out, re.MULTILINE) and "the model has its own" in out
    cosines = json.loads((tmp_path / "resamplers.json").read_text())["cosine"]
    assert cosines["bicubic(antialias=False)"]["40"] == pytest.approx(cosines["its own"]["40"], abs=1e-5)


def test_each_resampler_gives_what_a_model_built_with_it_gives(model, images):
    study = try_resamplers(model, images, (28, 28), progress=False)
    assert list(study.similarity) == [name for name in candidates() if name != "geometric"]
    batch = {size: torch.stack(tensors) for size, tensors in images.items()}
    for name, by in study.similarity.items():
        built = graticule.create_model("vit_nano_patch4_28", encoding=f"learnable(resampler={name!r})", num_classes=3)
        built.load_state_dict(model.state_dict())
        with torch.no_grad():
            pooled = [built.eval().forward_head(built.forward_features(x), pre_logits=True) for x in batch.values()]
        expected = torch.nn.functional.cosine_similarity(*(tensors.double() for tensors in pooled), dim=-1)
        torch.testing.assert_close(torch.tensor(by[40, 40]).double(), expected, rtol=0, atol=1e-6, msg=name)


def test_resamplers_that_are_equal_by_definition_are_computed_once(model, images, monkeypatch):
    passes = []
    forward = type(model).forward_features
    monkeypatch.setattr(type(model), "forward_features", lambda self, x: passes.append(x) or forward(self, x))
    study = try_resamplers(model, images, (28, 28), progress=False)
    # images are enlarged, where antialias widens no filter; the cubic filter is another one with it
    filters = {"bilinear(antialias=False)": "bilinear"}
    assert study.same == {**filters, "crop": "bicubic"}
    assert len(passes) == 1 + len(study.similarity) - 2
    assert study.similarity["crop"] == study.similarity["bicubic"]
    assert "crop is bicubic at these sizes, by definition" in study.notes()
    assert "bicubic(antialias=False, offset=0.1)" in study.similarity  # as in DINOv2's code


def test_the_model_keeps_its_own_resampler_and_shares_its_parameters(model):
    changed = with_resampler(model, "area")
    assert str(changed.position.encodings[0].resampler) == "area"
    assert str(model.position.encodings[0].resampler) == "bicubic"
    assert changed.position.encodings[0].pos_embed is model.position.encodings[0].pos_embed
    assert with_resampler(model, "geometric") is None


def test_the_best_resampler_and_equal_ones_are_marked():
    def study(*values):
        return ResamplerStudy(("a",), (28, 28), {name: {(40, 40): scores} for name, scores in values}, {})

    near = [0.9, 0.8, 0.7, 0.6]
    far = [value - shift for value, shift in zip(near, (0.30, 0.31, 0.29, 0.30), strict=True)]
    noisy = [value + shift for value, shift in zip(near, (0.05, -0.06, 0.05, -0.06), strict=True)]
    _, *rows = study(("near", near), ("far", far), ("noisy", noisy)).rows()
    assert {name: cell.endswith("*") for name, cell in rows} == {"near": True, "far": False, "noisy": True}
    twice = dataclasses.replace(study(("near", near), ("far", far), ("again", far)), same={"again": "far"})
    assert twice.rows()[3][1] == twice.rows()[2][1] == study(("near", near), ("far", far)).rows()[2][1]
    assert rows[0][1] == "0.7500 ± 0.0645*"  # by hand: the standard deviation 0.1291 over two
    same = study(("a", near), ("b", near))
    assert same.notes()[-1] == "at 40 nothing is resampled: all give the same"
