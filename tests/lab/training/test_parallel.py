"""Several processes compute the same as one, and all stop if a loss is not finite."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import forked, two_processes
from graticule.checkpoints.read import read_checkpoint
from graticule.lab.cli import main
from graticule.lab.data.transforms import TensorImages
from graticule.lab.tasks.options import Recipe
from graticule.lab.training.loop import train
from graticule.lab.training.run import Run
from graticule.lab.training.task import build_data
from graticule.lab.training.training import Training
from short_runs import assert_equal_runs, copied, short

#: Plain gradient descent in float64, so that errors by the order of sums stay small; 3 steps per epoch, the last one
#: not full but divisible by four, and an odd number of test images.
PLAIN = {
    "model_kwargs": ("depth=2",),
    "limit_train": 52,
    "limit_test": 21,
    "batch_size": 20,
    "eval_batch_size": 4,
    "epochs": 2,
    "joining": "lape",
    "optimizer": "sgd",
    "lr": 0.05,
    "precision": "64-true",
    "accelerator": "cpu",
}


def both(folder: Path, **options: Any) -> Run:
    """Train with two processes, or resume."""
    recipe = Recipe(**(PLAIN | {"devices": 2} | options))
    two_processes(lambda: train(recipe, folder, resume=True, progress=False))
    return Run(folder)


def restarted(run: Run, folder: Path) -> Path:
    """Copy a run without its last epoch, as if it had been killed in it."""
    run = copied(run, folder)
    for path in (run.result_file, run.weights, run.last):
        path.unlink()
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Run:
    return train(Recipe(**PLAIN), tmp_path_factory.mktemp("alone") / "run", progress=False)


def test_micro_batches_add_up_to_the_step_of_the_whole(tmp_path, alone):
    assert_equal_runs(train(Recipe(**PLAIN, accumulate=2), tmp_path / "run", progress=False), alone)


def start_as_a_program(arguments: list[str]) -> None:
    """Imitate `python -m graticule`, which Fabric starts again for the second process."""
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("graticule.__main__")
    sys.argv = ["graticule", *arguments]
    sys.exit(main(arguments))


@pytest.fixture
def of_two(tmp_path) -> list[str]:
    """Return the command that trains with two processes."""
    file = tmp_path / "mine.py"
    file.write_text(f"import graticule\n\ndef recipe():\n    return graticule.Recipe(**{PLAIN | {'devices': 2}})\n")
    return ["train", str(file), "--output", str(tmp_path / "run")]


def assert_trained_by_two(run: Run, alone: Run) -> None:
    assert_equal_runs(run, alone)
    assert "on 2 devices, cpu" in run.log_file.read_text()


def test_two_processes_that_torchrun_started_make_the_steps_and_the_scores_of_one(tmp_path, of_two, alone):
    two_processes(main, of_two)
    assert_trained_by_two(Run(tmp_path / "run"), alone)


@pytest.mark.slow
def test_two_processes_of_which_fabric_starts_the_second_do_so_too(tmp_path, of_two, alone):
    process = forked(start_as_a_program, of_two)
    process.join(600)
    assert process.exitcode == 0
    assert_trained_by_two(Run(tmp_path / "run"), alone)


def test_two_processes_with_two_micro_batches_each_make_the_steps_of_one(tmp_path, alone):
    run = both(tmp_path / "run", accumulate=2)
    assert_equal_runs(run, alone)
    sums = read_checkpoint(run.last)["progress"]["sums"]  # of several processes, but plain data in one file
    assert [images for _, images in sums] == [26, 26]


def test_a_run_resumes_with_another_number_of_processes(tmp_path, alone):
    run = Run(restarted(alone, tmp_path / "run"))
    assert run.last is not None and run.last.name == "step-000000003.ckpt"
    assert_equal_runs(both(run.folder), alone)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_run_stops_and_names_the_batch(tmp_path, accumulate, monkeypatch):
    recipe, run = short(accumulate=accumulate), Run(tmp_path / "run")
    items = TensorImages.__getitem__
    bad = int(build_data(recipe).train_order().indices(0)[recipe.batch_size + 3])  # in the second step

    def spoilt(self, batch):
        images, labels = items(self, batch)
        hit = torch.from_numpy((batch.indices == bad) & (batch.epoch is not None))
        return images.masked_fill(hit[:, None, None, None], torch.nan), labels

    monkeypatch.setattr(TensorImages, "__getitem__", spoilt)
    with pytest.raises(FloatingPointError, match=f"the loss is nan in epoch 1, batch {2 * accumulate}"):
        train(recipe, run.folder, progress=False)
    assert not run.finished


def test_a_loss_that_is_not_finite_in_one_process_stops_all(tmp_path, monkeypatch):
    recipe = Recipe(**(PLAIN | {"devices": 2, "keep": 9, "checkpoint_steps": 1}))
    run = Run(tmp_path / "run")
    step = Training.step

    def bad(self, batch):  # only the second process has a NaN image, in the second step of each epoch
        hit = self.fabric.global_rank == 1 and self.steps % 3 == 1
        return step(self, [batch[0] * torch.nan, batch[1]] if hit else batch)

    def trained() -> None:
        with pytest.raises(FloatingPointError, match=r"(nan|another process is not finite) in epoch 1, batch 2"):
            train(recipe, run.folder, progress=False)

    monkeypatch.setattr(Training, "step", bad)
    two_processes(trained)
    assert run.last.name == "step-000000001.ckpt"


#: All that has a state of its own: a moving average, moments of the optimizer, sums of micro-batches.
SHARDED = {"strategy": "fsdp", "ema_decay": 0.8, "clip_grad": 1.0, "optimizer": "adamw", "lr": 1e-3, "accumulate": 2}


def test_sharded_parameters_make_the_steps_of_copied_ones_and_resume_as_either(tmp_path):
    sharded = both(tmp_path / "sharded", **SHARDED, precision="32-true", keep=2)
    assert "on 2 devices, cpu, sharded" in sharded.log_file.read_text()
    copies = SHARDED | {"strategy": "ddp", "precision": "32-true", "keep": 2}
    assert_equal_runs(sharded, both(tmp_path / "copies", **copies), atol=1e-6)  # the order of sums in float32
    again = both(restarted(sharded, tmp_path / "again"), **SHARDED, precision="32-true", keep=2)
    assert_equal_runs(again, sharded, atol=0)
    assert_equal_runs(both(restarted(sharded, tmp_path / "back"), **copies), sharded, atol=1e-6)
