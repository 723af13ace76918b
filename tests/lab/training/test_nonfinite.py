"""If a loss is not finite, the run stops and names the batch."""

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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_run_stops_and_names_the_batch(tmp_path, accumulate, monkeypatch):
    recipe, run = short(accumulate=accumulate), Run(tmp_path / "run")
    items = TensorImages.__getitems__
    bad = int(build_data(recipe).train_order().sampler.indices(0)[recipe.batch_size + 3])  # in the second step

    def spoilt(self, keys):
        images, labels = items(self, keys)
        hit = torch.tensor([isinstance(key, tuple) and key[1] == bad for key in keys])
        return images.masked_fill(hit[:, None, None, None], torch.nan), labels

    monkeypatch.setattr(TensorImages, "__getitems__", spoilt)
    with pytest.raises(FloatingPointError, match=f"the loss is nan in epoch 1, batch {2 * accumulate}"):
        train(recipe, run.folder, progress=False)
    assert not run.finished


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
