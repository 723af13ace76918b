"""A share of the training images: equal for every class, the same for all runs, with unchanged test images."""

import shutil

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


def counts(labels, share):
    """Count the chosen images of each class."""
    labels = np.asarray(labels)
    return np.bincount(labels[class_share(labels, share)], minlength=labels.max() + 1).tolist()


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


def test_the_choice_never_changes():
    """It must not change, or a run on a share could not be repeated: NumPy's `RandomState` is frozen."""
    assert class_share(LABELS, 0.5) == [2, 3, 4, 5, 8, 9, 11]
    assert class_share(LABELS, 0.3) == [2, 4, 9, 11]


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
    modules = [module(train_share=share) for share in (0.5, None, 1.0)]
    half, every, same = (contents(data.train_dataloader()) for data in modules)
    assert set(half) < set(every) and same == every and len(half) == len(every) / 2
    held_out = [data.test_images((28, 28), [0, 500, 999]) for data in modules]
    for data, (images, labels) in zip(modules, held_out, strict=True):
        assert torch.equal(images, held_out[1][0]) and torch.equal(labels, held_out[1][1])
        assert classes(data.eval_dataloader(data.size)) == [100] * 10


def test_a_limit_is_within_the_share_balanced_and_the_same_for_all_seeds():
    share = contents(module(train_share=0.1).train_dataloader())
    data = module(train_share=0.1, limit_train=50, limit_test=30)
    assert len(share) == 400 and set(contents(data.train_dataloader())) < set(share)
    assert classes(data.train_dataloader()) == [5] * 10 and classes(data.eval_dataloader(data.size)) == [3] * 10
    other = module(train_share=0.1, limit_train=50, limit_test=30, seed=1)
    assert contents(other.train_dataloader()) == contents(data.train_dataloader())


def folder_module(root, **options):
    return module("image_folder", root=root, **{"size": (16, 24), "batch_size": 2, **options})


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


@in_turn("share", [0, -0.5, 1.01, 50, float("nan"), float("inf")])
def test_an_invalid_share_is_refused_by_the_data_module_and_the_recipe(share):
    for build in (module, Recipe):
        with pytest.raises(ValueError, match="`train_share` must be"):
            build(train_share=share)
