"""A run whose steps have images of several sizes."""

import pytest

from graticule.lab.training.loop import train
from short_runs import assert_same_end, short, stopped

SIZES = {"train_sizes": ("28", "20x36", "36"), "model_kwargs": ("depth=1",)}


def test_a_run_at_several_sizes_resumes_exactly(tmp_path):
    whole = train(short(**SIZES), tmp_path / "whole", progress=False)
    resumed = stopped(short(**SIZES), tmp_path / "resumed", step=4)
    train(short(**SIZES), resumed.folder, resume=True, progress=False)
    assert_same_end(resumed, whole)
    assert whole.recipe().train_sizes == SIZES["train_sizes"]


def test_a_size_that_the_patch_does_not_divide_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="`img_size` must be a positive multiple of the patch size, got height 30"):
        train(short(train_sizes=("30",)), tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "recipe.json").exists()
