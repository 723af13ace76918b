"""Training models that exist: published, of timm or transformers, of a run, or in a Python file."""

import json
import shutil

import pytest
import timm
import torch

import graticule
from commands import run_command
from graticule.lab.training.loop import train
from graticule.lab.training.opening import open_backbone
from graticule.lab.training.run import Run
from short_runs import assert_same_end, short, stopped

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return the folder of a published backbone with a position of its own."""
    folder = tmp_path_factory.mktemp("source") / "published"
    torch.manual_seed(0)
    model = graticule.create_model("vit_nano_patch4_28", depth=2, joining="lape", encoding="learnable + peg")
    return model.save_pretrained(folder)


def sourced(model, **options):
    return short(**{"model": str(model), "model_kwargs": (), **options})


def test_a_published_model_is_trained_with_its_weights_and_its_position(published, tmp_path):
    recipe = sourced(published, freeze="all-but-head", epochs=1)
    run = train(recipe, tmp_path / "run", progress=False)
    model, source = run.model(), graticule.load(published)
    assert type(model.position) is type(source.position)
    frozen = {name for name, value in source.state_dict().items() if torch.equal(value, model.state_dict()[name])}
    assert source.state_dict().keys() - frozen == {"head.weight", "head.bias"}
    described = json.loads(run.recipe_file.read_text())
    assert described["trainable"] == sum(parameter.numel() for parameter in source.head.parameters())
    assert described["backbone"]["model_args"]["joining"] == "lape"
    assert run.position == "learnable + peg, joining lape" and described["recipe"]["joining"] == "default"


def test_the_run_does_not_need_the_source_any_more(published, tmp_path):
    copy = graticule.load(published).save_pretrained(tmp_path / "copy")
    recipe = sourced(copy, encoding="rope", epochs=2)
    uninterrupted = train(recipe, tmp_path / "uninterrupted", progress=False)
    part = stopped(recipe, tmp_path / "part", 4)
    shutil.rmtree(copy)
    resumed = train(recipe, part.folder, resume=True, progress=False)
    assert_same_end(resumed, uninterrupted)
    assert "RotaryPosition" in type(resumed.model().position).__name__


def test_a_model_of_timm_in_a_file_is_converted_and_starts_with_its_values(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "import timm, torch\n\ndef build():\n    torch.manual_seed(3)\n"
        f"    return timm.create_model('vit_tiny_patch16_224', num_classes=0, **{TINY})\n"
    )
    words = ["--quick", "--img-size", 32, 32, "--freeze", "all-but-last-1+head", "--output", tmp_path / "run"]
    code, _, err = run_command(capsys, "train", "digits_quick", "--model", f"{file}:build", *words)
    assert code == 0, err
    assert f"of digits, and {file}:build was trained with (0.5, 0.5, 0.5)" in err
    model, source = Run(tmp_path / "run").model(), open_backbone(f"{file}:build")
    assert torch.equal(model.blocks[0].attn.qkv.weight, source.blocks[0].attn.qkv.weight)
    assert not torch.equal(model.blocks[1].attn.qkv.weight, source.blocks[1].attn.qkv.weight)
    torch.testing.assert_close(model.patch_embed.proj.weight, source.patch_embed.proj.weight.sum(1, keepdim=True))


def test_timms_architecture_starts_from_a_file_without_a_download(tmp_path, monkeypatch):
    built, create = [], timm.create_model

    def tiny(name, **options):
        built.append((name, options.get("pretrained", False)))
        if name.startswith("graticule_"):
            return create(name, **options)
        return create("vit_tiny_patch16_224", num_classes=0, **TINY)

    monkeypatch.setattr(timm, "create_model", tiny)
    torch.manual_seed(1)
    values = tiny("vit")
    torch.save(values.state_dict(), tmp_path / "values.pt")
    options = {"start_from": tmp_path / "values.pt", "freeze": "all-but-head", "epochs": 1, "img_size": (32, 32)}
    recipe = sourced("timm:vit_tiny_patch16_224", **options)
    run = train(recipe, tmp_path / "run", progress=False)
    assert torch.equal(run.model().blocks[0].mlp.fc1.weight, values.blocks[0].mlp.fc1.weight)
    assert not any(pretrained for _, pretrained in built)
    loaded = graticule.from_pretrained("timm:vit_tiny_patch16_224")
    assert isinstance(loaded, graticule.Backbone) and not loaded.training
    assert built[-1] == ("vit_tiny_patch16_224", True)


def test_a_frozen_published_model_is_the_backbone_of_a_segmenter_and_of_a_detector(tmp_path, capsys):
    torch.manual_seed(0)
    model = graticule.create_model("vit_nano_patch4_28", in_chans=3, depth=2, num_classes=0, encoding="rope")
    model.save_pretrained(tmp_path / "source")
    for name in ("scenes_segmentation", "scenes_detection"):
        words = ["--quick", "--model", tmp_path / "source", "--patch-size", 4, "--freeze", "all-but-head"]
        words += ["--limit-train", 4, "--limit-test", 2, "--epochs", 1]
        code, _, err = run_command(capsys, "train", name, *words, "--output", tmp_path / name)
        assert code == 0, err
        trained, source = Run(tmp_path / name).model().backbone.state_dict(), model.state_dict()
        assert len(trained) > 20 and all(torch.equal(value, source[key]) for key, value in trained.items())
    for create in (graticule.create_segmenter, graticule.create_detector):
        made = create(str(tmp_path / "source"), 3)
        assert torch.equal(made.backbone.blocks[1].attn.qkv.weight, model.blocks[1].attn.qkv.weight)
        with pytest.raises(ValueError, match=r"`backbone` must be a name if depth are given, got '.*source'"):
            create(str(tmp_path / "source"), 3, depth=1)


def test_a_source_that_is_no_backbone_is_refused_before_any_work(published, tmp_path):
    file = tmp_path / "other.py"
    file.write_text("import torch\nlinear = torch.nn.Linear(2, 2)\n")
    for model, options, error, message in (
        (f"{file}:linear", {}, ValueError, "`model` must be a backbone, or a model of timm or transformers"),
        (tmp_path / "nowhere", {}, FileNotFoundError, "nowhere"),
        (published, {"model_kwargs": ("embed=2",)}, ValueError, "`model_kwargs` must be one of"),
        (published, {"freeze": "head"}, ValueError, "`freeze` must be all-but-PART"),
    ):
        with pytest.raises(error, match=message):
            train(sourced(model, **options), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
