"""`graticule export` and `graticule publish` on the command line."""

import contextlib
import json
from pathlib import Path

import pytest
import timm
import torch

import graticule
from commands import refused, run_command
from graticule.checkpoints.read import save_weights
from graticule.dense.factory import create_segmenter
from graticule.lab.commands.opening import folder_data
from graticule.lab.data.registry import load_dataset
from graticule.lab.training.opening import open_model

pytestmark = pytest.mark.usefixtures("quick_figures")


def test_export_writes_a_program_of_a_run_and_says_what_it_is(lape_run, tmp_path, capsys):
    file = tmp_path / "model.pt2"
    code, out, _ = run_command(capsys, "export", lape_run.folder, "--output", file, "--dynamic", "batch")
    assert code == 0 and f"wrote {file}" in out
    facts = {line.split()[0]: line for line in out.splitlines()}
    assert "batch of any size, height 28, width 28" in facts["takes"]
    assert torch.export.load(file).module()(torch.zeros(3, 1, 28, 28))[0].shape == (3, 10)


@pytest.mark.slow
def test_export_takes_the_name_of_a_model_and_says_that_it_is_not_trained(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_command(capsys, "export", "vit_nano_patch4_28", "--joining", "lape")
    assert (
        code == 0 and "wrote runs/vit_nano_patch4_28/model.onnx" in out and "the weights of its initialization" in err
    )


def test_export_converts_a_model_of_timm_and_gives_it_another_position(tmp_path, capsys):
    file = tmp_path / "model.pt2"
    arguments = ["--weights", "random", "--joining", "lape", "--output", str(file)]
    code, out, _ = run_command(capsys, "export", "timm:test_vit", *arguments)
    assert code == 0 and f"wrote {file}" in out


def test_publish_writes_what_graticule_and_timm_open(lape_run, tmp_path, capsys):
    folder = tmp_path / "published"
    code, out, _ = run_command(capsys, "publish", lape_run.folder, folder)
    assert code == 0 and "model.safetensors" in out and "correlations.png" in out
    card = (folder / "README.md").read_text()
    best = f"{lape_run.result()['best_top1']:.2f}"
    assert f"| {best} |" in card and "![" in card and (folder / "correlations.png").stat().st_size > 10_000
    model = lape_run.model()
    x = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        for again in (
            graticule.from_pretrained(folder),
            timm.create_model(f"local-dir:{folder}", pretrained=True).eval(),
        ):
            torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
    config = json.loads((folder / "config.json").read_text())
    assert config["pretrained_cfg"]["label_names"] == [str(digit) for digit in range(10)]
    assert config["graticule"] | {"plugins": 0, "resamplers": 0} == {
        "model": "vit_nano_patch4_28",
        "encoding": "learnable",
        "joining": "lape",
        "plugins": 0,
        "resamplers": 0,
    }


def test_publish_takes_names_files_of_weights_and_models_of_timm(lape_run, tmp_path, capsys):
    tuned = timm.create_model("vit_tiny_patch16_224", num_classes=7).state_dict()
    weights = str(save_weights(tuned, tmp_path / "tuned.safetensors"))
    cases = [
        ("name", ("vit_nano_patch4_28", "--encoding", "rope"), "rope"),
        ("other classes", ("timm:vit_tiny_patch16_224", "--weights", weights), "learnable"),
        ("timm", ("timm:vit_tiny_patch16_224", "--weights", "random", "--joining", "lape"), "learnable"),
        ("file", (str(lape_run.folder / "weights.safetensors"),), "learnable"),
    ]
    for name, (target, *options), encoding in cases:
        code, _, err = run_command(capsys, "publish", target, tmp_path / name, *options)
        assert code == 0, err
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["graticule"]["encoding"] == encoding
    assert torch.equal(graticule.from_pretrained(tmp_path / "other classes").head.weight, tuned["head.weight"])
    again = graticule.from_pretrained(tmp_path / "file")
    x = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        torch.testing.assert_close(again(x), lape_run.model()(x))


def test_commands_open_a_published_folder(tmp_path, capsys):
    model = graticule.create_model("vit_nano_patch4_28", joining="lape")
    info = load_dataset("digits", "test", None)[1]
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": info.mean, "std": info.std}
    folder = graticule.save_pretrained(model, tmp_path / "published")
    weights = save_weights(model.state_dict(), tmp_path / "weights.safetensors")
    by_name = ["vit_nano_patch4_28", "--joining", "lape", "--weights", weights]
    tables = []
    for target in ([folder], by_name):
        code, _, err = run_command(capsys, "evaluate", *target, "--images", "digits", "--output", tmp_path / "out")
        assert code == 0, err
        (row,) = json.loads((tmp_path / "out" / "evaluation.json").read_text())
        tables.append({name: row[name] for name in ("top1", "top5", "loss", "images", "size")})
    assert tables[0] == tables[1] and tables[0]["images"] == 1000
    code, _, err = run_command(capsys, "analyze", "correlations", folder, "--output", tmp_path)
    assert code == 0 and (tmp_path / "correlations.png").is_file(), err
    for option in ("encoding", "weights"):
        err = refused(capsys, "evaluate", folder, "--images", "digits", f"--{option}", "rope")
        assert f"`{option}` must be left out with '{folder}', which has its own, got 'rope'" in err
    err = refused(capsys, "evaluate", folder)
    assert f"`images` must be given for '{folder}', which is not the folder of a run" in err
    with contextlib.chdir(tmp_path):
        Path("RUN").mkdir()
        assert refused(capsys, "evaluate", "RUN").endswith("For the folder of this name, write ./RUN.")


def test_a_published_model_of_segmentation_is_exported(tmp_path, capsys):
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3, "depth": 1}
    model = create_segmenter("vit_tiny_patch16_224", num_classes=3, **small)
    folder = graticule.save_pretrained(model, tmp_path / "published")
    file = tmp_path / "model.pt2"
    code, out, err = run_command(capsys, "export", folder, "--output", file)
    assert code == 0 and f"wrote {file}" in out, err


def test_a_resized_and_a_debiased_model_are_those_of_the_library(lape_run, tmp_path, capsys):
    small, clean, folder = tmp_path / "small", tmp_path / "clean", tmp_path / "images"
    code, out, err = run_command(capsys, "resize", lape_run.folder, 20, 24, "--output", small)
    assert code == 0 and out == f"wrote {small}\n", err
    images = torch.randn(2, 1, 20, 24)
    with torch.no_grad():
        expected = graticule.resize(lape_run.model(), (20, 24))(images)
        torch.testing.assert_close(graticule.from_pretrained(small)(images), expected, rtol=0, atol=0)
    assert json.loads((small / "config.json").read_text())["pretrained_cfg"]["label_names"] == list("0123456789")

    folder.mkdir()
    digits = load_dataset("digits", "test", None)[0]
    for number in range(12):
        digits[80 * number][0].save(folder / f"{number:02}.png")
    code, out, err = run_command(
        capsys, "debias", lape_run.folder, "--images", folder, "--output", clean, "--count", 12, "--json"
    )
    assert code == 0 and err == f"wrote {clean}\n", err
    data = folder_data(open_model(str(lape_run.folder)), folder)
    inputs = data.test_images((28, 28), range(12))[0]
    debiased = graticule.debias(lape_run.model(), inputs)
    assert json.loads(out) == json.loads(debiased.certificate.to_json())
    with torch.no_grad():
        torch.testing.assert_close(graticule.from_pretrained(clean)(inputs), debiased(inputs))


def test_wrong_arguments_of_export_and_publish_are_refused(lape_run, tmp_path, capsys):
    run, new = lape_run.folder, tmp_path / "new"
    cases = [
        (("export", tmp_path / "nothing"), "`run` must be the folder of a run"),
        (("export", "vit_nano_patch4_82"), "did you mean 'vit_nano_patch4_28'"),
        (("export", run, "--output", new / "model.bin"), "`format` must be given where `path` does not end in"),
        (("export", run, "--dynamic", "batch,depth"), "`dynamic` must be one of batch, sides; got 'depth'"),
        (("export", run, "--img-size", "30"), "`img_size` must be a positive multiple of the patch size"),
        (("export", run, "--encoding", "rope"), "`encoding` must be left out with '"),
        (("export", "vit_nano_patch4_28", "--weights", new / "x.pth"), "which does not exist"),
        (("export", run, "--features", "99"), "`features` must be from 0 to"),
        (("publish", run, run), "`folder` must be new"),
        (("resize", run, 30, "--output", new), "`img_size` must be a positive multiple of the patch size"),
        (("resize", run, 1, 2, 3, "--output", new), "`size` must be one side in pixels or 2, got 1 2 3"),
        (("resize", run, 28), "`--output FOLDER` (folder to write to) must be given; see"),
        (("resize", run, 56, "--output", lape_run.log_file), "`output` must be a folder"),
        (("debias", run, "--output", new), "`--images FOLDER` (folder of images, at any depth) must be given"),
        (("debias", run, "--images", new, "--output", new), "which does not exist"),
        (("debias", run, "--images", new, "--output", new, "--count", 3), "`count` must be at least 9, got 3"),
        (("publish", tmp_path / "nothing", new), "`run` must be the folder of a run"),
        (("publish", "vit_nano_patch4_82", new), "did you mean 'vit_nano_patch4_28'"),
        (("publish", new / "x.pth", new), "x.pth', which does not exist"),
        (("publish", run, new, "--joining", "lape"), "`joining` must be left out with '"),
        (("publish", run, new, "--push", "a b"), "`repo_id` must be OWNER/NAME"),
        (("evaluate", "./nothing", "--images", new), "`run` must be the folder of a run"),
        (("train", "digits_quick", "--model", run.name), f"did you mean './{run.name}'?"),
        (("debias", run, "--images", run / "recipe.json", "--output", new), "which is not a folder"),
        (("train", "digits_quick", "--data-root", run), "`data_root` must be left out without dataset image_folder"),
        (("publish", run, new, "--private"), "`private` must be left out without push, since it has no effect"),
    ]
    with contextlib.chdir(run.parent):
        for arguments, message in cases:
            assert message in refused(capsys, *arguments)
    assert not new.exists()
