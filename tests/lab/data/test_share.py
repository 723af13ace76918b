"""A share of the training images: equal for every class, the same for all runs, with unchanged test images."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from graticule.lab.data.module import DataModule
from graticule.lab.data.sampling import class_share
from graticule.lab.tasks.classification import Recipe
from graticule.lab.training.task import build_data
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
    ("each", "share", "chosen"),
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
def test_a_class_gives_the_nearest_whole_number_and_at_least_one(each, share, chosen):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(each)), each))
    assert counts(labels, share) == chosen


@pytest.mark.parametrize("seed", [0, 1, 7, 2**32 - 1])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9])
def test_the_choice_is_increasing_and_has_no_duplicates(seed, share):
    chosen = class_share(LABELS, share, seed)
    assert chosen == sorted(set(chosen)) and chosen[0] >= 0 and chosen[-1] < len(LABELS)
    assert all(type(index) is int for index in chosen)


@pytest.mark.parametrize("seed", [0, 3])
def test_a_whole_share_is_all_images(seed):
    assert class_share(LABELS, 1, seed) == class_share(LABELS, 1.0, seed) == list(range(12))


def test_the_choice_is_fixed_by_its_seed_and_differs_between_seeds():
    labels = np.arange(400) % 4
    choices = [class_share(labels, 0.5, seed) for seed in range(5)]
    assert choices == [class_share(labels, 0.5, seed) for seed in range(5)]
    assert len({tuple(choice) for choice in choices}) == 5


def test_the_choice_leaves_the_generators_of_the_process_alone():
    def state():
        return np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = state()
    first = class_share(LABELS, 0.5, 0)
    assert state() == before
    np.random.seed(99)
    torch.manual_seed(99)
    assert class_share(LABELS, 0.5, 0) == first


def test_the_choice_never_changes():
    """It must not change, or a run on a share could not be repeated: NumPy's `RandomState` is frozen."""
    assert class_share(LABELS, 0.5, 0) == [2, 3, 4, 5, 8, 9, 11]
    assert class_share(LABELS, 0.5, 1) == [1, 4, 7, 8, 9, 10, 11]
    assert class_share(LABELS, 0.3, 0) == [2, 4, 9, 11]


def test_a_larger_share_of_the_same_seed_holds_the_smaller_one():
    labels = np.arange(120) % 3
    shares = [set(class_share(labels, share, 5)) for share in (0.1, 0.25, 0.5, 0.75, 1.0)]
    assert [len(one) for one in shares] == [12, 30, 60, 90, 120]
    assert all(small < large for small, large in pairwise(shares))


def test_every_image_of_a_class_is_as_likely_as_any_other():
    labels, seeds = np.arange(20) % 2, 2000
    hits = np.bincount(np.concatenate([class_share(labels, 0.3, seed) for seed in range(seeds)]), minlength=20)
    deviation = (0.3 * 0.7 / seeds) ** 0.5
    assert np.abs(hits / seeds - 0.3).max() < 4 * deviation


def test_labels_may_be_a_list_or_an_array_of_any_integers():
    names = np.asarray(LABELS, dtype=np.uint8) * 5 + 7
    assert class_share(LABELS, 0.5, 0) == class_share(np.asarray(LABELS), 0.5, 0) == class_share(names, 0.5, 0)


# The data module


def module(dataset="digits", **options):
    data = DataModule(dataset, **{"size": (28, 28), "batch_size": 100, **options})
    data.setup()
    return data


def contents(loader):
    """Return every image and its label, in an order independent of the loader."""
    rows = [(image.numpy().tobytes(), int(label)) for x, y in loader for image, label in zip(x, y, strict=True)]
    return sorted(rows)


def classes(loader):
    return torch.bincount(torch.cat([labels for _, labels in loader])).tolist()


def test_half_of_the_digits_are_half_of_every_class():
    data = module(train_share=0.5)
    assert classes(data.train_dataloader()) == [200] * 10
    assert len(contents(data.train_dataloader())) == 2000


def test_a_share_is_a_subset_of_all_images():
    half, other, whole = (
        contents(module(train_share=share, share_seed=seed).train_dataloader())
        for share, seed in ((0.5, 0), (0.5, 1), (None, 0))
    )
    assert set(half) < set(whole) and set(other) < set(whole)
    assert half != other and len(half) == len(other)
    assert contents(module(train_share=1.0).train_dataloader()) == whole


def test_the_images_do_not_depend_on_the_seed_of_the_training():
    first, second = (module(train_share=0.25, seed=seed) for seed in (0, 1))
    assert contents(first.train_dataloader()) == contents(second.train_dataloader())
    orders = [next(iter(data.train_dataloader()))[1].tolist() for data in (first, second)]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("share", [None, 0.5, 0.01])
def test_the_test_images_are_untouched(share):
    data, whole = module(train_share=share), module()
    assert data.num_test == 1000
    images, labels = data.test_images((28, 28), [0, 500, 999])
    expected = whole.test_images((28, 28), [0, 500, 999])
    assert torch.equal(images, expected[0]) and torch.equal(labels, expected[1])
    assert classes(data.val_dataloader()) == [100] * 10


def test_a_limit_is_within_the_share_and_balanced():
    share = contents(module(train_share=0.1, share_seed=4).train_dataloader())
    data = module(train_share=0.1, share_seed=4, limit_train=50, limit_test=30)
    assert len(share) == 400 and set(contents(data.train_dataloader())) < set(share)
    assert classes(data.train_dataloader()) == [5] * 10
    assert data.num_test == 30


def test_a_limit_above_the_share_takes_the_share():
    assert classes(module(train_share=0.01, limit_train=1000).train_dataloader()) == [4] * 10


def test_too_few_images_for_a_mixed_batch_are_counted_after_the_share():
    with pytest.raises(ValueError, match=r"`batch_size` must not exceed the number of training images, 40.*100"):
        module(train_share=0.01, drop_last=True)


def folder_module(root, **options):
    return module("image_folder", root=root, **{"size": (16, 24), "batch_size": 2, **options})


def test_a_share_of_an_image_folder_is_a_share_of_every_class(tmp_path):
    write_folder(tmp_path, classes=("cat", "dog", "wolf"), each=5)
    data = folder_module(tmp_path, train_share=0.5)
    assert classes(data.train_dataloader()) == [3, 3, 3]  # 2.5 is rounded up
    assert classes(data.val_dataloader()) == [5, 5, 5]
    other = folder_module(tmp_path, train_share=0.5, seed=9)
    assert contents(other.train_dataloader()) == contents(data.train_dataloader())
    assert set(contents(data.train_dataloader())) < set(contents(folder_module(tmp_path).train_dataloader()))


def test_the_share_of_an_image_folder_is_that_of_its_labels(tmp_path):
    write_folder(tmp_path, each=6)
    chosen = class_share([0] * 6 + [1] * 6, 0.5, 2)
    shared, whole = (
        folder_module(tmp_path, train_share=share, share_seed=2).train_dataloader().dataset.images
        for share in (0.5, None)
    )
    assert [np.asarray(shared[n][0]).tobytes() for n in range(6)] == [
        np.asarray(whole[index][0]).tobytes() for index in chosen
    ]
    assert shared.labels.tolist() == [0] * 3 + [1] * 3


def test_a_share_and_a_limit_of_an_image_folder_name_the_broken_files(tmp_path):
    root = write_folder(tmp_path, each=6)
    first, *_ = class_share([0] * 6 + [1] * 6, 0.5, 0)
    broken = root / "train" / "cat" / f"{first}.JPEG"
    broken.write_bytes(b"no image")
    data = folder_module(tmp_path, train_share=0.5, limit_train=4)
    assert classes(data.train_dataloader()) == [2, 2]  # replaced by another cat
    assert data.skipped == [broken]


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


@pytest.mark.parametrize("share", [None, 1e-6, 0.5, 1, 1.0])
def test_the_share_of_a_recipe_round_trips_through_plain_values(share):
    recipe = Recipe(train_share=share, share_seed=3)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert recipe.quick().train_share == share and recipe.quick().share_seed == 3


def test_a_recipe_passes_share_and_seed_on_to_the_data(tmp_path):
    write_folder(tmp_path, each=4)
    recipe = Recipe(
        dataset="image_folder", data_root=Path(tmp_path), img_size=(16, 24), train_share=0.5, share_seed=6, seed=1
    )
    data = build_data(recipe)
    expected = class_share([0] * 4 + [1] * 4, 0.5, 6)
    assert data.train_dataloader().dataset.images.indices == expected
