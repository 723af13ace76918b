"""Training at several sizes: each step has one, a function of seed, epoch and step."""

import pytest
import torch

from graticule.lab.data.augmentation import Augmentation
from graticule.lab.data.module import DataModule
from graticule.lab.data.sampling import BatchOrder, EpochSampler
from graticule.lab.tasks.classification import Recipe

SIZES = ((16, 16), (24, 24), (16, 32))


def digits(**kwargs):
    data = DataModule(
        "digits", size=(16, 16), train_sizes=SIZES, batch_size=8, limit_train=80, limit_test=20, seed=3, **kwargs
    )
    data.setup()
    return data


def order(seed=0, **kwargs):
    return BatchOrder(EpochSampler(240, seed), 8, sizes=3, **kwargs)


def test_each_batch_has_one_size_and_an_epoch_has_all_of_them():
    shapes = [tuple(images.shape[-2:]) for images, _ in digits().train_dataloader()]
    assert len(shapes) == 10 and set(shapes) == set(SIZES)


def test_the_size_of_a_step_is_a_function_of_seed_epoch_and_step():
    drawn = {
        (seed, epoch): [order(seed).size(epoch, step) for step in range(30)] for seed in range(2) for epoch in range(2)
    }
    assert drawn[0, 0] == [order(0).size(0, step) for step in range(30)]
    assert len({tuple(sizes) for sizes in drawn.values()}) == 4
    sizes_of_steps = [order(0).size(epoch, step) for epoch in range(100) for step in range(30)]
    counts = torch.bincount(torch.tensor(sizes_of_steps), minlength=3)
    assert (counts - 1000).abs().max() < 5 * (3000 * 2 / 9) ** 0.5  # five standard deviations


def test_the_images_and_their_randomness_are_those_of_a_single_size():
    several = digits(augmentation=Augmentation(scale=(0.5, 1.0)))
    options = {"batch_size": 8, "limit_train": 80, "limit_test": 20, "seed": 3}
    single = DataModule("digits", size=(24, 24), augmentation=several.augmentation, **options)
    single.setup()
    pairs = zip(several.train_dataloader(), single.train_dataloader(), strict=True)
    same = [torch.equal(images, expected) for (images, _), (expected, _) in pairs if images.shape == expected.shape]
    assert same and all(same)


def test_sizes_that_are_none_are_refused_by_the_recipe():
    for sizes, message in [
        (("16", "16x16"), "`train_sizes` must be different sizes"),
        (("0",), "`train_sizes` must be sides in pixels"),
        (("16x",), "`train_sizes` must be sides in pixels"),
    ]:
        with pytest.raises(ValueError, match=message):
            Recipe(train_sizes=sizes)
    recipe = Recipe(train_sizes=("16", "24x32"))
    assert Recipe.from_dict(recipe.to_dict()) == recipe
