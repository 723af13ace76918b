"""A share of the training images: equal for every class, the same for all runs, with unchanged test images."""

import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch

from graticule.lab.data.module import DataModule
from graticule.lab.data.sampling import class_share
from graticule.lab.tasks.options import Recipe
from image_files import write_folder
from in_turn import in_turn

#: 3, 2 and 7 images of classes 0, 1 and 2, in no order.
LABELS = [2, 0, 1, 2, 2, 0, 2, 1, 2, 0, 2, 2]


def counts(labels, share, seed=0):
    """Count the chosen images of each class."""
    labels = np.asarray(labels)
    return np.bincount(labels[class_share(labels, share, seed)], minlength=labels.max() + 1).tolist()


# The choice


@pytest.mark.parametrize(
    ("sizes", "share", "chosen"),
    [
        ((4, 10, 6), 0.5, [2, 5, 3]),
        ((10, 10, 10), 0.26, [3, 3, 3]),  # 2.6
        ((10, 10, 10), 0.24, [2, 2, 2]),  # 2.4
        ((3, 5, 7), 0.5, [2, 3, 4]),  # a half is rounded up
        ((100, 10, 1), 0.07, [7, 1, 1]),  # 7, 0.7, 0.07: each class has at least one
        ((1, 2, 300), 0.001, [1, 1, 1]),
        ((1, 2, 3), 0.999, [1, 2, 3]),
        ((1300, 732, 1000), 0.5, [650, 366, 500]),  # the largest and the smallest class of ImageNet
    ],
)
def test_a_class_gives_the_nearest_whole_number_and_at_least_one(sizes, share, chosen):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    assert counts(labels, share) == chosen


def test_the_choice_depends_on_the_seed_alone_and_never_changes():
    """It must not change, or a run on a share could not be repeated: NumPy's `RandomState` is frozen."""
    assert class_share(LABELS, 0.5, 0) == [2, 3, 4, 5, 8, 9, 11]
    assert class_share(LABELS, 0.5, 1) == [1, 4, 7, 8, 9, 10, 11]
    assert class_share(LABELS, 0.3, 0) == [2, 4, 9, 11]
    assert len({tuple(class_share(np.arange(400) % 4, 0.5, seed)) for seed in range(5)}) == 5


def test_a_larger_share_of_the_same_seed_holds_the_smaller_one():
    labels = np.arange(120) % 3
    shares = [set(class_share(labels, share, 5)) for share in (0.1, 0.25, 0.5, 0.75, 1.0)]
    assert list(map(len, shares)) == [12, 30, 60, 90, 120]
    assert all(small < large for small, large in pairwise(shares))


# The data module


def module(dataset="digits", **options):
    data = DataModule(dataset, **{"size": (28, 28), "batch_size": 100, **options})
    return data


def contents(loader):
    """Return every image and its label, in an order independent of the loader."""
    rows = [(image.numpy().tobytes(), int(label)) for x, y in loader for image, label in zip(x, y, strict=True)]
    return sorted(rows)


def classes(loader):
    return torch.bincount(torch.cat([labels for _, labels in loader])).tolist()


def test_a_share_is_a_subset_of_all_training_images_and_the_test_images_are_untouched():
    modules = [module(train_share=share, share_seed=seed) for share, seed in ((0.5, 0), (0.5, 1), (None, 0), (1.0, 0))]
    half, other, every, same = (contents(data.train_dataloader()) for data in modules)
    assert set(half) < set(every) and set(other) < set(every) and same == every
    assert half != other and len(half) == len(other)
    held_out = [data.test_images((28, 28), [0, 500, 999]) for data in modules]
    for data, (images, labels) in zip(modules, held_out, strict=True):
        assert torch.equal(images, held_out[2][0]) and torch.equal(labels, held_out[2][1])
        assert classes(data.eval_dataloader(data.size)) == [100] * 10


def test_a_limit_is_within_the_share_balanced_and_the_same_for_all_seeds():
    share = contents(module(train_share=0.1, share_seed=4).train_dataloader())
    data = module(train_share=0.1, share_seed=4, limit_train=50, limit_test=30)
    assert len(share) == 400 and set(contents(data.train_dataloader())) < set(share)
    assert classes(data.train_dataloader()) == [5] * 10 and classes(data.eval_dataloader(data.size)) == [3] * 10
    other = module(train_share=0.1, share_seed=4, limit_train=50, limit_test=30, seed=1)
    assert contents(other.train_dataloader()) == contents(data.train_dataloader())


def folder_module(root, **options):
    return module("image_folder", root=root, **{"size": (16, 24), "batch_size": 2, **options})


def test_a_share_of_an_image_folder_is_a_share_of_every_class(tmp_path):
    write_folder(tmp_path, classes=("cat", "dog", "wolf"), per_class=5)
    data = folder_module(tmp_path, train_share=0.5)
    assert classes(data.train_dataloader()) == [3, 3, 3]  # 2.5 is rounded up
    assert classes(data.eval_dataloader(data.size)) == [5, 5, 5]
    other = folder_module(tmp_path, train_share=0.5, seed=9)
    assert contents(other.train_dataloader()) == contents(data.train_dataloader())
    assert set(contents(data.train_dataloader())) < set(contents(folder_module(tmp_path).train_dataloader()))


def test_a_share_of_each_class_is_held_out_of_a_folder_without_val(tmp_path):
    root = write_folder(tmp_path, per_class=10)
    shutil.rmtree(root / "val")
    with pytest.raises(FileNotFoundError, match=r"folder val or .* none; `val_split` 0.2 holds a fifth of train out"):
        folder_module(root)
    data = folder_module(root, val_split=0.2)
    files = {split: {data.images[split].place(row) for row in rows.tolist()} for split, rows in data.rows.items()}
    assert not files["train"] & files["test"] and len(files["train"] | files["test"]) == 20
    assert np.bincount(data.test_labels()).tolist() == [2, 2]
    assert (data.images["train"].skip_broken, data.images["test"].skip_broken) == (True, False)
    assert folder_module(root, val_split=0.2, seed=7).rows["test"].tolist() == data.rows["test"].tolist()
    with pytest.raises(ValueError, match=r"`val_split` must leave every class an image to train on, got 0\.99"):
        folder_module(root, val_split=0.99)


# Recipes


INVALID = [
    *({"train_share": share} for share in (0, -0.5, 1.01, 50, float("nan"), float("inf"))),
    {"train_share": 0.5, "share_seed": -1},
]


@in_turn("options", INVALID)
def test_an_invalid_share_or_seed_is_refused_by_the_choice_the_data_module_and_the_recipe(options):
    name = list(options)[-1]
    for build in (lambda: class_share(LABELS, options["train_share"], options.get("share_seed", 0)), module, Recipe):
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            build() if build not in (module, Recipe) else build(**options)
