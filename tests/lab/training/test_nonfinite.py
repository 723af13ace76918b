"""If a loss is not finite, the run stops and names the images."""

import json

import pytest
import torch
from test_parallel import PLAIN

from forked import two_processes
from graticule.lab.data.transforms import TensorImages
from graticule.lab.tasks.classification import Recipe
from graticule.lab.training.loop import train
from graticule.lab.training.module import TrainingModule
from graticule.lab.training.run import Run
from graticule.lab.training.task import build_data
from short_runs import short


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


def test_a_loss_that_is_not_finite_in_one_process_stops_all(tmp_path, monkeypatch):
    recipe = Recipe(**(PLAIN | {"devices": 2, "keep": 9, "checkpoint_steps": 1}))
    run = Run(tmp_path / "run")
    step = TrainingModule.training_step

    def bad(self, batch, batch_idx):  # only the second process has a NaN image, in the second step of each epoch
        hit = self.global_rank == 1 and self.global_step % 3 == 1
        return step(self, [batch[0] * torch.nan, batch[1]] if hit else batch, batch_idx)

    def trained() -> None:
        with pytest.raises(FloatingPointError, match=r"(nan|another process is not finite) in epoch 1, batch 2"):
            train(recipe, run.folder, progress=False)

    monkeypatch.setattr(TrainingModule, "training_step", bad)
    two_processes(trained)
    assert run.last.name == "step-000000001.ckpt"
    kept = json.loads((run.folder / "nonfinite-epoch1-batch2-process1.json").read_text())
    assert kept["images"] == images_of(Recipe(**PLAIN), 0, 1)[1::2]
