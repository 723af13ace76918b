"""Training on a device: a resumed run is the same bit for bit, and a group of one process changes nothing."""

import dataclasses
import math

import pytest
import torch
from device_models import FEW, assert_close_in_norm, images_for, model_of, name_of
from torch import nn

from graticule.checkpoints.read import read_checkpoint
from graticule.lab.training.loop import train
from short_runs import assert_same_end, rows, short, stopped

#: Random numbers of the CPU and of the device, norms of position, and an average of the weights.
RECIPE = {"joining": "lape", "drop_path_rate": 0.2, "ema_decay": 0.8, "warmup_epochs": 1, "clip_grad": 1.0}


def recipe_on(device, **options):
    return short(**RECIPE, accelerator="gpu" if device.type == "cuda" else "cpu", **options)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("precision", ["32-true", "mixed"])
def test_a_run_stopped_and_resumed_on_the_device_ends_bit_for_bit_as_one_that_was_not(device, precision, tmp_path):
    """Mixed precision is float16 with a scaler of the loss on a GPU, and bfloat16 on the CPU."""
    if precision == "mixed":
        precision = "16-mixed" if device.type == "cuda" else "bf16-mixed"
    recipe = recipe_on(device, precision=precision)
    complete = train(recipe, tmp_path / "whole", progress=False)
    run = stopped(recipe, tmp_path / "stopped", step=1)  # within the first epoch
    assert not run.finished and run.last is not None and run.last.name == "step-000000002.ckpt"
    train(recipe, run.folder, resume=True, progress=False)
    assert_same_end(run, complete)
    assert all(math.isfinite(float(row["train_loss"])) for row in rows(complete))
    if precision == "16-mixed":
        scalers = [read_checkpoint(part.last)["MixedPrecision"] for part in (run, complete)]
        assert scalers[0] == scalers[1] and scalers[0]["scale"] > 0


def test_a_run_on_the_device_has_the_losses_of_the_cpu(device, tmp_path):
    """Without random numbers in the model, which differ between devices."""
    recipes = [
        short(joining="lape", optimizer="sgd", lr=0.05, accelerator=accelerator)
        for accelerator in ("cpu", "gpu" if device.type == "cuda" else "auto")
    ]
    runs = [train(recipe, tmp_path / recipe.accelerator, progress=False) for recipe in recipes]
    ours, expected = ([float(row["train_loss"]) for row in rows(run)] for run in runs)
    assert len(ours) == 2 and ours == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_run_of_captured_steps_is_that_of_usual_ones_within_rounding(device, precision, tmp_path):
    """On the CPU, which captures nothing, both runs are the same."""
    options = {**RECIPE, "clip_grad": None, "limit_train": 100}  # five steps per epoch, of which three warm up
    if device.type == "cpu":
        precision = precision.replace("16-mixed", "bf16-mixed")
    recipe = short(**options, precision=precision, accelerator="gpu" if device.type == "cuda" else "cpu")
    captured = train(recipe, tmp_path / "captured", progress=False)
    usual = train(dataclasses.replace(recipe, cuda_graph=False), tmp_path / "usual", progress=False)
    assert "no CUDA graph" not in captured.log_file.read_text(encoding="utf-8")
    ours, expected = ([float(row["train_loss"]) for row in rows(run)] for run in (captured, usual))
    assert len(ours) == 2 and ours == pytest.approx(expected, rel=1e-4 if precision == "32-true" else 1e-2)


def test_a_run_of_the_device_is_opened_and_evaluated_on_the_cpu(device, tmp_path):
    run = train(recipe_on(device), tmp_path / "run", progress=False)
    model = run.model()
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    on_cpu = model.eval()(images_for(model))
    with torch.no_grad():
        on_device = model.to(device)(images_for(model).to(device))
    assert_close_in_norm({"logits": on_device}, {"logits": on_cpu}, 1e-4)


@pytest.fixture
def one_process(device, tmp_path, monkeypatch):
    """Join a group of one process: NCCL on a GPU, Gloo on the CPU."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    gpu = device.type == "cuda"
    torch.distributed.init_process_group(
        "nccl" if gpu else "gloo",
        init_method=f"file://{tmp_path / 'group'}",
        rank=0,
        world_size=1,
        **({"device_id": device} if gpu else {}),
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("case", FEW, ids=name_of)
def test_the_gradients_of_a_group_of_one_process_are_those_without_a_group(device, case):
    model = model_of(case).train().to(device)
    images = images_for(model).to(device)
    gradients = []
    for step in (model, nn.parallel.DistributedDataParallel(model, [0] if device.type == "cuda" else None)):
        model.zero_grad()
        step(images).square().mean().backward()  # in a group, an error if a parameter gets no gradient
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert_close_in_norm(gradients[1], gradients[0], 1e-5)
