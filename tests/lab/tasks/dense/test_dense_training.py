"""Training of detectors and segmentation models by the common engine."""

import json
import signal

import pytest
import torch
from dense_runs import RICH, detector, segmenter
from safetensors.torch import load_file
from torch import nn

from commands import run_command
from forked import forked, two_processes
from graticule.checkpoints.read import save_weights
from graticule.lab.tasks.segmentation import pixel_losses
from graticule.lab.training.loop import train
from graticule.lab.training.optimization import build_optimizer
from graticule.lab.training.run import Run
from graticule.lab.training.task import build_model, task_of
from graticule.lab.training.training import Training
from in_turn import in_turn
from short_runs import assert_same_end, at_step, signal_itself

PLAIN = {"precision": "64-true", "optimizer": "sgd", "lr": 0.02}


@pytest.fixture(scope="module", params=[detector, segmenter], ids=["detection", "segmentation"])
def kind(request):
    return request.param


@pytest.fixture
def rich(kind, request):
    """Return the run with all random options."""
    return request.getfixturevalue("detection_run" if kind is detector else "segmentation_run")


def die_at(recipe, folder, step):
    """Train, and kill this process in the step after `step`."""
    at_step(pytest.MonkeyPatch(), step, lambda: signal_itself(signal.SIGKILL))
    train(recipe, folder, progress=False)


def test_a_run_that_was_killed_and_resumed_ends_with_the_same_weights_bit_for_bit(kind, rich, tmp_path):
    recipe = kind(**RICH)
    process = forked(die_at, recipe, tmp_path / "run", 3)
    process.join(600)
    assert process.exitcode == -signal.SIGKILL
    assert_same_end(train(recipe, tmp_path / "run", resume=True, progress=False), rich)


@pytest.mark.parametrize(("strategy", "precision", "atol"), [("ddp", "64-true", 1e-9), ("fsdp", "32-true", 1e-5)])
def test_two_processes_make_the_steps_and_the_scores_of_one(strategy, precision, atol, kind, tmp_path):
    plain = PLAIN | {"precision": precision}
    alone = train(kind(**plain), tmp_path / "alone", progress=False)
    recipe = kind(**plain, devices=2, strategy=strategy)
    two_processes(lambda: train(recipe, tmp_path / "both", progress=False))
    both = Run(tmp_path / "both")
    torch.testing.assert_close(load_file(both.weights), load_file(alone.weights), rtol=0, atol=atol)
    key = f"best_{recipe.metric.key}"
    assert both.result()[key] == pytest.approx(alone.result()[key], abs=1e-4)


def test_the_rate_falls_to_a_tenth_right_after_the_named_epochs(tmp_path):
    rates = []
    inner = Training.step

    def outer(self, batch):
        rates.append(max(group["lr"] for group in self.optimizer.param_groups))
        return inner(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "step", outer)
        steps = segmenter(schedule="step", decay_epochs=(1,), warmup_steps=1, warmup_lr=1e-5)
        train(steps, tmp_path / "a", progress=False)
        assert rates == pytest.approx([1e-5, 1e-3, 1e-4, 1e-4])
        rates.clear()
        train(segmenter(schedule="poly", poly_power=2.0, min_lr=1e-4), tmp_path / "b", progress=False)
    assert rates == pytest.approx([1e-4 + 9e-4 * (1 - n / 4) ** 2 for n in range(4)])


def test_the_rate_of_a_layer_is_that_of_the_next_times_the_decay(tmp_path):
    recipe = detector(layer_decay=0.5, model_kwargs=("depth=2", "embed_dim=24", "num_heads=3"))
    described = {"channels": 3, "class_names": tuple("ab"), "category_ids": (1, 2)}
    model = build_model(recipe, **described)

    groups = build_optimizer(recipe, model).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    scale = {names[id(parameter)]: group["lr_scale"] for group in groups for parameter in group["params"]}
    backbone = "model.backbone.backbone."
    assert scale[backbone + "blocks.1.mlp.fc1.weight"] == 0.5
    assert scale[backbone + "blocks.0.mlp.fc1.weight"] == 0.25
    assert scale[backbone + "patch_embed.proj.weight"] == 0.125
    assert {value for name, value in scale.items() if not name.startswith(backbone)} == {1.0}
    decayed = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
    assert not any(decay for name, decay in decayed.items() if ".position." in name)


@in_turn(
    ("options", "message"),
    [
        ({"schedule": "step"}, "`decay_epochs` must be given with the schedule step"),
        ({"decay_epochs": (1,)}, "`decay_epochs` must be given with the schedule step and no other, not"),
        ({"schedule": "step", "decay_epochs": (2,)}, "`decay_epochs` must increase and be below `epochs`, 2"),
        ({"warmup_epochs": 1, "warmup_steps": 1}, "`warmup_steps` must be 0 with `warmup_epochs` 1, got 1"),
        ({"warmup_epochs": 2}, "`warmup_epochs` must be fewer than `epochs`, 2, got 2"),
        ({"poly_power": 2.0}, "`poly_power` must be left out without the schedule poly"),
        ({"schedule": "linear"}, "`schedule`"),
        ({"layer_decay": 1.5}, "`layer_decay`"),
        ({"fit": (200, 100)}, "`fit` must be the shorter and the longer side, 100 200"),
        ({"head": "retinane"}, "did you mean"),
        ({"neck": "fnp"}, "`neck`|neck"),
        ({"model_kwargs": ("heads=3",)}, "`model_kwargs`"),
        ({"dataset": "digits"}, "`dataset` must have boxes, got 'digits', which has one class per image"),
    ],
)
def test_invalid_values_are_refused_before_any_work(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(detector(**options), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_the_hardest_pixels_are_those_of_the_highest_loss():
    logits = torch.randn(2, 3, 4, 5)
    classes = torch.randint(0, 3, (2, 4, 5))
    classes[0, 0] = 255
    losses = pixel_losses(logits, classes)
    assert not losses[0, 0].any() and (losses[1] > 0).all()
    model = nn.Identity()
    batch = [list(logits), [{"classes": target} for target in classes]]
    all_pixels, half = (task_of(segmenter(hardest=share)).loss(model, batch, 0) for share in (1.0, 0.5))
    assert all_pixels == pytest.approx(float(losses.mean()))
    top = losses.flatten(1).sort(descending=True).values[:, :10]
    assert half == pytest.approx(float(top.mean()))


def test_the_backbone_starts_from_a_classifier_and_from_a_dense_run_at_other_sizes(rich, tmp_path):
    other = segmenter(start_from=rich.folder, img_size=(64, 80), epochs=1, limit_train=4)
    run = train(other, tmp_path / "run", progress=False)
    assert "starts from" in run.log_file.read_text()
    classifier = {
        name.partition("backbone.")[2].removeprefix("backbone."): value
        for name, value in load_file(rich.weights).items()
        if "backbone." in name
    }
    classifier["head.weight"], classifier["head.bias"] = torch.zeros(7, 24), torch.zeros(7)
    save_weights(classifier, tmp_path / "weights.safetensors")
    started = train(
        segmenter(start_from=tmp_path / "weights.safetensors", lr=1e-9, min_lr=0.0), tmp_path / "two", progress=False
    )
    weight = load_file(started.weights)["features.backbone.blocks.0.mlp.fc1.weight"]
    torch.testing.assert_close(weight, classifier["blocks.0.mlp.fc1.weight"], rtol=0, atol=1e-6)


def test_runs_are_evaluated_at_several_sizes_on_the_original_images(kind, rich, tmp_path, capsys):
    command = ["evaluate", rich.folder, "--sizes", "96", "64x80", "--per-class", "--output", tmp_path]
    code, out, err = run_command(capsys, *command)
    assert code == 0, err
    assert "96x96 *" in out and "64x80" in out
    score = rich.result()[f"best_{kind().metric.key}"]
    assert f"{score:.2f}" in out.splitlines()[2]
    code, _, err = run_command(capsys, "evaluate", rich.folder, "--sizes", "80x64")
    assert code == 1 and "`sizes` must be SHORTERxLONGER" in err


def test_windows_are_evaluated(kind, rich, tmp_path, capsys):
    if kind is detector:
        code, _, err = run_command(capsys, "evaluate", rich.folder, "--window", "64")
        assert code == 1 and "`window` must be left out with the task detection" in err
        return
    code, out, err = run_command(capsys, "evaluate", rich.folder, "--window", "64", "--output", tmp_path)
    assert code == 0 and " 96x96 in 64/42 " in out and "*" not in out.splitlines()[2], err
    (record,) = json.loads((tmp_path / "evaluation.json").read_text())
    assert (record["window"], record["stride"]) == (64, 42)
