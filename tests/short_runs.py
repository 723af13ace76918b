"""Short runs for tests: two epochs of three steps, with an action at one of them."""

import csv
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from graticule.checkpoints.read import read_checkpoint
from graticule.lab.data.augmentation import Augmentation
from graticule.lab.tasks.options import ImageMixing, Recipe
from graticule.lab.training.loop import train
from graticule.lab.training.recipe import TrainingRecipe
from graticule.lab.training.run import Run
from graticule.lab.training.run_folder import Preempted
from graticule.lab.training.training import Training

#: Everything that draws random numbers or has its own state.
RICH: dict[str, Any] = {
    "joining": "lape",
    "drop_path_rate": 0.2,
    "augmentation": Augmentation(random_crop_padding=2, erasing=0.3),
    "mixing": ImageMixing(mixup=0.5, cutmix=0.5),
    "ema_decay": 0.8,
    "warmup_epochs": 1,
    "aug_repeats": 3,
    "accumulate": 2,
}


def short(**options: Any) -> Recipe:
    """Return a recipe of two epochs of three steps."""
    fixed = {"limit_train": 60, "limit_test": 20, "batch_size": 20, "epochs": 2, "accelerator": "cpu"}
    return Recipe(**{**fixed, "model_kwargs": ("depth=2",), **options})


def at_step(patch: pytest.MonkeyPatch, step: int, action: Any, method: str = "step") -> None:
    """Call `action` once, in the call of `method` of the training after `step` steps."""
    inner, done = getattr(Training, method), []

    def outer(self: Any, *arguments: Any) -> Any:
        if self.steps == step and not done:
            done.append(True)
            action()
        return inner(self, *arguments)

    patch.setattr(Training, method, outer)


def signal_itself(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def stopped(recipe: TrainingRecipe, folder: Path, step: int, method: str = "step") -> Run:
    """Train until a signal in the step after `step`, or in another `method` of the training after `step`."""
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, signal_itself, method)
        with pytest.raises(Preempted):
            train(recipe, folder, progress=False, resume=folder.exists())
    return Run.open(folder)


def copied(run: Run, folder: Path) -> Run:
    """Copy a run, to resume the copy."""
    return Run(Path(shutil.copytree(run.folder, folder)))


def assert_same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that two sets of weights are equal bit for bit."""
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


def rows(run: Run) -> list[dict[str, str]]:
    """Read the history without its seconds."""
    with run.metrics_file.open(newline="") as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def assert_same_end(run: Run, expected: Run) -> None:
    """Check that two runs have the same weights, averages, optimizer and history, bit for bit."""
    assert_same(load_file(run.weights), load_file(expected.weights))
    last, other = read_checkpoint(run.last), read_checkpoint(expected.last)
    assert last["progress"]["epoch"] == other["progress"]["epoch"]
    for state in ("state_dict", "current_model_state"):
        assert_same(last.get(state, {}), other.get(state, {}))
    for index, state in last["optimizer"]["state"].items():
        assert_same(state, other["optimizer"]["state"][index])
    assert rows(run) == rows(expected)
    assert run.result() | {"seconds": 0} == expected.result() | {"seconds": 0}


def assert_equal_runs(run: Run, expected: Run, atol: float = 1e-10) -> None:
    """Check that two runs have the same weights, within `atol`, and the same history, within rounding errors."""
    torch.testing.assert_close(load_file(run.weights), load_file(expected.weights), rtol=0, atol=atol)
    histories = [[{name: float(value) for name, value in row.items()} for row in rows(r)] for r in (run, expected)]
    for row, other in zip(*histories, strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-5)
