"""Adaptation: another position for a trained model, and its features again, on images without labels."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import graticule
from commands import run_command
from graticule.lab.recipes.load import load_recipe
from graticule.lab.training.loop import train
from graticule.lab.training.run import Run
from graticule.lab.training.task import task_of
from short_runs import assert_same_end, rows, stopped


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of 24 images of different sizes, in two folders."""
    image_folder, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for index in range(24):
        inner = image_folder / "ab"[index % 2]
        inner.mkdir(exist_ok=True)
        small = draw.integers(0, 256, (4, 5, 3), dtype=np.uint8)
        Image.fromarray(small).resize((40 + index, 36), Image.Resampling.BICUBIC).save(inner / f"{index}.png")
    return image_folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return the folder of a published model whose position matters: its table is large."""
    torch.manual_seed(0)
    model = graticule.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=3, num_classes=5
    )
    with torch.no_grad():
        model.position.encodings[0].pos_embed.normal_(std=0.5)
    return model.save_pretrained(tmp_path_factory.mktemp("source") / "model")


def adapted(source, folder, **options):
    usual = {"encoding": "factorized", "epochs": 3, "batch_size": 7, "warmup_steps": 0, "img_size": (32, 32)}
    values = {"model": str(source), "data_root": folder, "accelerator": "cpu", **usual, **options}
    return dataclasses.replace(load_recipe("adapt"), **values)


@pytest.fixture(scope="module")
def run(source, folder, tmp_path_factory):
    """Return a run of three stages of three steps each, at two sizes."""
    recipe = adapted(source, folder, train_sizes=("32", "40"), lr=2e-3)
    return train(recipe, tmp_path_factory.mktemp("adapted") / "run", progress=False)


@pytest.mark.parametrize("step", [*(pytest.param(s, marks=pytest.mark.slow) for s in (1, 8)), 4])
def test_a_killed_adaptation_ends_with_the_same_weights_bit_for_bit_in_every_stage(run, tmp_path, step):
    part = stopped(run.recipe(), tmp_path / "run", step)
    assert_same_end(train(run.recipe(), part.folder, resume=True, progress=False), run)


def test_it_wins_features_back(run):
    scores = [float(row["val_cosine"]) for row in rows(run)]
    certificate = json.loads((run.folder / "certificate.json").read_text())
    fitted, after = (certificate["drift"][name][-1]["cosine"] for name in ("fitted", "adapted"))
    assert scores == sorted(scores) and after > fitted + 0.01
    assert certificate["fits"][0]["fitted"] and certificate["before"] == {"encoding": "learnable", "joining": "default"}


def test_the_adapted_model_is_published_with_the_head_of_the_original(run, source):
    before, after = (graticule.from_pretrained(path) for path in (source, run.folder / "published"))
    assert after.created["arguments"]["encoding"] == "factorized" and after.img_size == (32, 32)
    assert torch.equal(before.head.weight, after.head.weight)
    assert not torch.equal(before.blocks[3].mlp.fc1.weight, after.blocks[3].mlp.fc1.weight)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(after(images), run.model()(images))


def test_the_stages_train_what_they_say(source, folder, tmp_path):
    """One epoch per stage: what a stage does not train is equal bit for bit at its end."""
    original = graticule.from_pretrained(source)
    old = original.state_dict()
    for stage, changed in (("position", (False, False)), ("attention", (True, False)), ("all", (True, True))):
        recipe = adapted(source, folder, stages=(stage,), epochs=1, encoding="learnable", joining="unshared", lr=0.1)
        new = train(recipe, tmp_path / stage, progress=False).model().state_dict()
        parts = ("blocks.0.attn.qkv.weight", "blocks.1.norm1.weight"), ("blocks.2.mlp.fc1.weight", "cls_token")
        assert tuple(any(not torch.equal(old[name], new[name]) for name in names) for names in parts) == changed
        assert any(float(new[f"position.encodings.{n}.pos_embed"].abs().sum()) for n in range(1, 4))


def started(source, folder, **options):
    """Return a task, its data and its model with the values of the original."""
    task = task_of(adapted(source, folder, **options))
    data = task.build_data()
    model = task.build_model(task.describe(data))
    task.take_weights(model, {}, True)
    return task, data, model


def test_a_position_that_is_exact_starts_at_the_original(source, folder):
    task, data, model = started(source, folder, encoding="learnable", joining="unshared")
    task.setup(model, data, torch.device("cpu"))
    images = data.spread_images("test", (32, 32), 3)
    loss = task.loss(model, (images, torch.zeros(3)), 0)
    assert loss.item() < 1e-6
    values = task.validate(model, (images, torch.zeros(3)))
    torch.testing.assert_close(values["cosine"], torch.ones(3))


@torch.no_grad()
def test_the_distance_is_half_of_prefix_tokens_and_half_of_patches(source, folder):
    task, data, model = started(source, folder)
    images = data.spread_images("test", (32, 32), 2)
    distance, _ = task._distances(model, images)
    layers = [[tokens for tokens, _ in m.each_layer(images)][1:3] for m in (model, task.original)]
    new, old = ([*of, m.forward_features(images)] for of, m in zip(layers, (model, task.original), strict=True))
    tokens = 1 - F.cosine_similarity(torch.stack(new), torch.stack(old), dim=-1)  # (3, B, N)
    torch.testing.assert_close(distance, ((tokens[..., 0] + tokens[..., 1:].mean(-1)) / 2).mean(0))


def test_the_command_is_the_recipe(source, folder, tmp_path, capsys):
    words = ["--encoding", "factorized", "--images", folder, "--img-size", 32, 32, "--quick"]
    words += ["--output", tmp_path / "run"]
    code, out, err = run_command(capsys, "adapt", source, *words)
    assert code == 0 and f"the adapted model: {tmp_path / 'run'}/published" in out, err
    assert (Run(tmp_path / "run").recipe().epochs, Run(tmp_path / "run").recipe().limit_train) == (2, 40)
    code, out, _ = run_command(capsys, "adapt", "--help")
    assert code == 0 and "--images FOLDER" in out
    code, out, err = run_command(capsys, "evaluate", tmp_path / "run")
    assert code == 0 and "cosine with the original" in out, err


QUANTIZED = """
import timm, torch

class Quantized(torch.nn.Linear):
    __module__ = "torch.ao.nn.quantized.dynamic"

def build():
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", **sizes)
    model.blocks[0].mlp.fc1 = Quantized(24, 96)
    return model
"""


def test_bad_input_is_refused_before_any_work(source, folder, tmp_path, capsys):
    (tmp_path / "quantized.py").write_text(QUANTIZED)
    alike, single = tmp_path / "alike", tmp_path / "one"
    for place, count in ((alike, 4), (single, 1)):
        place.mkdir()
        for index in range(count):
            Image.new("RGB", (32, 32), (9, 9, 9)).save(place / f"{index}.png")
    for options, message in (
        ({"data_root": alike}, "must have different images, got 3 that are all alike"),
        ({"data_root": single}, "must have two images or more, got 1"),
        ({"encoding": None}, "`encoding` or `joining` must be given"),
        ({"model": "vit_tiny_patch16_224"}, "`model` must be a trained model, such as timm:NAME"),
        ({"model": f"{tmp_path / 'quantized.py'}:build"}, "must have weights in floating point, got a quantized one"),
        ({"img_size": (36, 36)}, "multiple"),
        ({"encoding": "sinusoidal_2d"}, "`encoding` must keep at least 0.0 of the old position, got .* which keeps -"),
        ({"encoding": "none", "stages": ("position",)}, "`stages` must train something, got position"),
    ):
        with pytest.raises(ValueError, match=message):
            train(adapted(source, folder, **options), tmp_path / "run", progress=False)
    for options, message in (
        ({"stages": ()}, "`stages` must be different"),
        ({"epochs": 2}, "at most as many as `epochs`, 2"),
        ({"devices": 7}, "`stages` must be all on several devices"),
        ({"freeze": "all-but-head"}, "`freeze` must be left out in an adaptation"),
    ):
        with pytest.raises(ValueError, match=message):
            adapted(source, folder, **options)
    for words, message in (
        ((source, "--encoding", "rope"), "`images` must be given: a folder of images"),
        ((source, "--images", folder, "--data-root", folder), "`data_root` must be left out of graticule adapt"),
        ((source, "--images", folder, "--model", source), "which has the first argument for it"),
        (("--encoding", "rope"), "TRAINED"),
    ):
        code, _, err = run_command(capsys, "adapt", *words)
        assert code in (1, 2) and message in err
    assert not (tmp_path / "run").exists()
