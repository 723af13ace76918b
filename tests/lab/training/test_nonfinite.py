"""If a loss is not finite, the run stops and names the images, or skips and counts the step."""

import contextlib
import itertools
import json

import pytest
import torch
from safetensors.torch import load_file
from test_parallel import PLAIN

from forked import two_processes
from graticule.checkpoints.read import read_checkpoint
from graticule.lab.cli import main
from graticule.lab.data.transforms import TensorImages
from graticule.lab.tasks.classification import Recipe
from graticule.lab.training.interruption import Preempted
from graticule.lab.training.loop import train
from graticule.lab.training.module import _MOST_SKIPPED, TrainingModule
from graticule.lab.training.run import Run
from graticule.lab.training.task import build_data
from short_runs import assert_same, at_step, rows, short, signal_itself

#: A backbone with BatchNorm, whose statistics a NaN image would corrupt.
NORMS = {"encoding": "peg(layers=2)", "global_pool": "avg"}


@pytest.fixture
def spoil(monkeypatch):
    """Make the training images with these indices NaN."""

    def plant(*bad: int) -> None:
        found = TensorImages.__getitems__

        def spoilt(self, keys):
            images, labels = found(self, keys)
            hit = torch.tensor([isinstance(key, tuple) and key[1] in bad for key in keys])
            return images.masked_fill(hit[:, None, None, None], torch.nan), labels

        monkeypatch.setattr(TensorImages, "__getitems__", spoilt)

    return plant


def images_of(recipe: Recipe, epoch: int, step: int, part: int = 0) -> list[int]:
    """Return the images of a micro-batch, computed by hand from the order of the epoch."""
    order = list(build_data(recipe).train_order().sampler.indices(epoch))
    size = recipe.batch_size
    return [int(index) for index in order[step * size : (step + 1) * size]][part :: recipe.accumulate]


# Stop


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_run_stops_and_names_the_images_of_the_batch(tmp_path, capsys, spoil, accumulate):
    recipe, run = short(accumulate=accumulate), Run(tmp_path / "run")
    batch = images_of(recipe, 0, 1, accumulate - 1)
    spoil(batch[3])
    with pytest.raises(FloatingPointError, match="the loss is nan in epoch 1, batch") as error:
        train(recipe, run.folder, progress=False)
    number = accumulate + accumulate  # from 1: the last micro-batch of the second step
    (file,) = run.folder.glob("nonfinite-*.json")
    assert file.name == f"nonfinite-epoch1-batch{number}-process0.json" and str(file) in str(error.value)
    kept = json.loads(file.read_text())
    assert kept == {"epoch": 1, "batch": number, "step": 1, "process": 0, "loss": "nan", "images": batch}
    assert batch[3] in kept["images"] and len(kept["images"]) == 20 // accumulate


def test_the_command_reports_it_in_one_line_and_leaves_the_last_checkpoint_to_resume_from(tmp_path, capsys, spoil):
    recipe, run = short(checkpoint_steps=1), Run(tmp_path / "run")
    spoil(images_of(recipe, 0, 2)[0])
    with pytest.raises(FloatingPointError):
        train(recipe, run.folder, progress=False)
    capsys.readouterr()
    assert run.last.name == "step-000000002.ckpt"
    assert main(["train", "--resume", str(run.folder)]) == 1  # the same again
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("graticule: error: the loss is nan in epoch 1, batch 3") and "nonfinite" in said
    assert "stopped by FloatingPointError: the loss is nan" in run.log_file.read_text()


# Skip


@pytest.mark.parametrize(
    ("options", "part"),
    [
        *[({"accumulate": 2}, part) for part in ("first", "last")],
        *[(options, "last") for options in ({}, {"optimizer": "sgd"}, {"optimizer": "lamb"})],
    ],
)
def test_a_skipped_step_changes_nothing_but_the_position_in_the_schedule(tmp_path, monkeypatch, spoil, options, part):
    recipe = short(nonfinite="skip", clip_grad=1.0, **NORMS, **options)
    spoil(images_of(recipe, 0, 1, 0 if part == "first" else recipe.accumulate - 1)[0])
    states, rates = {}, []
    before, after = TrainingModule.on_train_batch_start, TrainingModule.lr_scheduler_step

    def state(task):
        optimizer = task.trainer.optimizers[0]
        moments = {
            f"{index} {name}": torch.as_tensor(value).clone()
            for index, kept in optimizer.state_dict()["state"].items()
            for name, value in kept.items()
        }
        return {name: value.clone() for name, value in task.model.state_dict().items()} | moments

    def starting(self, batch, batch_idx):
        if batch_idx % recipe.accumulate == 0:
            states.setdefault(self.global_step, state(self))
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        before(self, batch, batch_idx)

    def stepping(self, *arguments):
        states.setdefault(f"after {self.global_step}", state(self))
        after(self, *arguments)

    monkeypatch.setattr(TrainingModule, "on_train_batch_start", starting)
    monkeypatch.setattr(TrainingModule, "lr_scheduler_step", stepping)
    run = train(recipe, tmp_path / "run", progress=False)
    assert any(name.endswith("running_mean") for name in states[1])
    assert_same(states[1], states[2])
    assert_same(states[1], states["after 2"])
    assert not torch.equal(states[2]["head.weight"], states[3]["head.weight"])
    monkeypatch.undo()
    clean = train(short(**NORMS, **options), tmp_path / "clean", progress=False)
    assert [row["lr"] for row in rows(run)] == [row["lr"] for row in rows(clean)]
    assert len(set(rates)) == 6  # every step has a different rate, including the skipped one
    assert all(value.isfinite().all() for value in load_file(run.weights).values())
    assert run.result()["skipped_steps"] == 2  # once in each epoch
    assert all(float(row["train_loss"]) < 10 for row in rows(run))


def test_skipped_steps_are_counted_over_a_resume_and_reported_at_the_end(tmp_path, monkeypatch, capsys, spoil):
    recipe = short(nonfinite="skip")
    spoil(images_of(recipe, 0, 1)[0])
    command = ["train", "digits_quick", "--nonfinite", "skip", "--output", str(tmp_path / "run"), "--auto-resume"]
    for name in ("limit_train", "limit_test", "batch_size", "epochs", "accelerator"):
        command += [f"--{name.replace('_', '-')}", str(getattr(recipe, name))]
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 2, signal_itself)
        assert main(command) == 75
    assert main(command) == 0
    run = Run(tmp_path / "run")
    assert run.result()["skipped_steps"] == 2
    assert "2 steps were left out" in capsys.readouterr().out
    assert len(list(run.folder.glob("nonfinite-*.json"))) == 2


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=["whole", "in parts"])
def test_too_many_in_a_row_stop_even_if_it_was_resumed_between(tmp_path, monkeypatch, options):
    monkeypatch.setattr("graticule.lab.training.module._MOST_SKIPPED", 4)
    recipe, run = short(nonfinite="skip", checkpoint_steps=1, **options), Run(tmp_path / "run")
    step = TrainingModule.training_step

    def bad(self, batch, batch_idx):  # in the first micro-batch of every step from the second on
        first = batch_idx % recipe.accumulate == 0
        return step(self, [batch[0] * torch.nan, batch[1]] if self.global_step and first else batch, batch_idx)

    monkeypatch.setattr(TrainingModule, "training_step", bad)
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 3, signal_itself)
        with pytest.raises(Preempted):
            train(recipe, run.folder, progress=False)
    with pytest.raises(FloatingPointError, match=r"in epoch 2, batch \d, in the 5\. step in a row"):
        train(recipe, run.folder, resume=True, progress=False)
    assert run.last.name == "step-000000005.ckpt"
    assert read_checkpoint(run.last)["progress"]["skipped_in_a_row"] == 4


def test_single_skipped_steps_never_stop_a_run(tmp_path, monkeypatch, spoil):
    monkeypatch.setattr("graticule.lab.training.module._MOST_SKIPPED", 1)
    recipe = short(nonfinite="skip", epochs=4)
    spoil(7)
    orders = [list(build_data(recipe).train_order().sampler.indices(epoch)).index(7) // 20 for epoch in range(4)]
    apart = all(not (a == 2 and b == 0) for a, b in itertools.pairwise(orders))
    assert apart, "another image, please"
    assert train(recipe, tmp_path / "run", progress=False).result()["skipped_steps"] == 4
    assert _MOST_SKIPPED > 4


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_a_loss_that_is_not_finite_in_one_process_is_skipped_or_stopped_at_by_all(tmp_path, monkeypatch, nonfinite):
    recipe = Recipe(**(PLAIN | {"devices": 2, "nonfinite": nonfinite, "keep": 9, "checkpoint_steps": 1}))
    run = Run(tmp_path / "run")
    step = TrainingModule.training_step

    def bad(self, batch, batch_idx):  # only the second process has a NaN image, in the second step of each epoch
        hit = self.global_rank == 1 and self.global_step % 3 == 1
        return step(self, [batch[0] * torch.nan, batch[1]] if hit else batch, batch_idx)

    def trained() -> None:
        stops = pytest.raises(FloatingPointError, match=r"(nan|another process is not finite) in epoch 1, batch 2")
        with stops if nonfinite == "stop" else contextlib.nullcontext():
            train(recipe, run.folder, progress=False)

    monkeypatch.setattr(TrainingModule, "training_step", bad)
    two_processes(trained)
    if nonfinite == "stop":
        assert run.last.name == "step-000000001.ckpt"
        kept = json.loads((run.folder / "nonfinite-epoch1-batch2-process1.json").read_text())
        assert kept["images"] == images_of(Recipe(**PLAIN), 0, 1)[1::2]
        return
    assert run.result()["skipped_steps"] == 2
    assert {path.name for path in run.folder.glob("nonfinite-*")} == {
        f"nonfinite-epoch{epoch}-batch2-process1.json" for epoch in (1, 2)
    }
    first, second = (read_checkpoint(run.checkpoints / f"step-{step:09d}.ckpt")["state_dict"] for step in (1, 2))
    model = {name: value for name, value in first.items() if name.startswith("model.")}
    assert_same(model, {name: second[name] for name in model})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="16-mixed is for GPUs")
def test_a_skipped_step_leaves_the_scale_of_half_precision(tmp_path, spoil):
    recipe = short(nonfinite="skip", precision="16-mixed", accelerator="gpu")
    spoil(images_of(recipe, 0, 1)[0])
    run = train(recipe, tmp_path / "run", progress=False)
    assert run.result()["skipped_steps"] == 2
