import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from graticule.lab.data.augmentation import Augmentation
from graticule.lab.data.images import ArrayImages, DatasetInfo
from graticule.lab.data.module import DataModule
from graticule.lab.data.sampling import PADDING, BatchOrder, EpochSampler, EvaluationOrder
from graticule.lab.data.transforms import SeededImages, TensorImages, TransformedImages, training_transform
from graticule.lab.tasks.options import Recipe
from in_turn import in_turn

INFO = DatasetInfo("cifar10", ("a", "b"), 3, (16, 16), (0.5,) * 3, (0.25,) * 3)
AUGMENTATION = Augmentation(
    random_crop_padding=2, hflip=0.5, rand_augment="rand-m9-mstd0.5-inc1", erasing=0.5
)  # torch's, Python's and numpy's generators are all used


def images(seed=0):
    pixels = np.random.RandomState(0).randint(0, 256, (12, 16, 16, 3)).astype(np.uint8)
    return SeededImages(ArrayImages(pixels, np.arange(12) % 2), training_transform(INFO, (16, 16), AUGMENTATION), seed)


def epochs(workers, which, **options):
    data, sampler = images(), EpochSampler(12, seed=0)
    loader = DataLoader(data, 5, sampler=sampler, num_workers=workers, **options)
    seen = []
    for epoch in which:
        sampler.set_epoch(epoch)
        seen.append(torch.cat([batch for batch, _ in loader]))
    return seen


def test_an_item_depends_on_seed_epoch_and_index_alone():
    data = images()
    forward = [data[1, i][0] for i in range(12)]
    random.random(), np.random.rand(), torch.rand(1)
    backward = [data[1, i][0] for i in reversed(range(12))]
    assert all(torch.equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))


def test_the_generators_of_the_process_continue_as_if_nothing_had_been_drawn():
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])
    data = images()
    for index in range(12):
        data[0, index]
    assert draw() == expected


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12's, of a process with threads
def test_workers_change_nothing_even_when_they_outlive_an_epoch():
    alone = epochs(0, [0, 1, 2])
    for a, b in zip(alone, epochs(2, [0, 1, 2], persistent_workers=True), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(alone[0], alone[1])


def test_an_epoch_has_every_index_once_in_an_order_of_its_own():
    sampler = EpochSampler(50, seed=3)
    orders = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        keys = list(sampler)
        assert keys == list(sampler)
        assert {key[0] for key in keys} == {epoch}
        orders.append([key[1] for key in keys])
        assert sorted(orders[-1]) == list(range(50)) and len(sampler) == 50
    assert orders[0] != orders[1] and orders[0] != list(range(50))


SHARES = [(1, 1), (2, 1), (1, 3), (3, 2)]  # processes, and micro-batches of a step in each


def orders(length, batch_size, world_size, parts, **options):
    kind = {name: options.pop(name) for name in ("repeats",) if name in options}
    return [
        BatchOrder(
            EpochSampler(length, 7, **kind), batch_size, rank=rank, world_size=world_size, parts=parts, **options
        )
        for rank in range(world_size)
    ]


def steps_of(processes):
    """Return the keys of every step, over all processes and micro-batches."""
    batches = [list(order) for order in processes]
    parts = processes[0].parts
    return [
        [key for order in batches for batch in order[step * parts : (step + 1) * parts] for key in batch]
        for step in range(processes[0].steps)
    ]


@in_turn("drop_last", [True, False])
@in_turn(("world_size", "parts"), SHARES)
@in_turn("length", [60, 64, 71])
def test_a_step_has_the_same_images_however_many_share_it(length, world_size, parts, drop_last):
    (alone,) = orders(length, 12, 1, 1, drop_last=drop_last)
    together = orders(length, 12, world_size, parts, drop_last=drop_last)
    single, shared = steps_of([alone]), steps_of(together)
    assert all(len(order) == len(together[0]) for order in together)  # otherwise one would wait forever
    # a rest with less than one image for each is left out
    assert len(single) - len(shared) == (not drop_last and 0 < length % 12 < world_size * parts)
    assert [sorted(step) for step in shared] == [sorted(step) for step in single][: len(shared)]
    assert len({key for step in shared for key in step}) == sum(map(len, shared))


@pytest.mark.parametrize(("world_size", "parts"), SHARES)
def test_the_weights_make_the_mean_of_the_shares_that_of_the_step(world_size, parts):
    values = np.random.default_rng(0).normal(size=71)
    together = orders(71, 12, world_size, parts)
    for step in range(together[0].steps):
        numbers = range(step * parts, (step + 1) * parts)
        shares = [order.weight(n) * values[order.places(n)].mean() for order in together for n in numbers]
        assert np.mean(shares) == pytest.approx(values[step * 12 : (step + 1) * 12].mean(), abs=1e-14)
    assert orders(72, 12, world_size, parts)[0].weight(0) == 1


def test_batches_are_skipped_once_and_the_rest_is_unchanged():
    (order,) = orders(64, 12, 1, 1)
    batches = list(order)
    order.skip(2)
    assert list(order) == batches[2:] and list(order) == batches and len(order) == 6
    assert [order.keys(0, number) for number in range(6)] == batches


@pytest.mark.parametrize("repeats", [2, 3])
def test_repeated_augmentation_repeats_every_image_in_turn(repeats):
    (order,) = orders(60, 12, 1, 1, repeats=repeats)
    keys = [key for batch in order for key in batch]
    assert len(keys) == 60 and len(set(keys)) == 60
    for first in range(0, 60, repeats):
        assert len({key[1] for key in keys[first : first + repeats]}) == 1
        assert [key[2] for key in keys[first : first + repeats]] == list(range(repeats))
    assert len({key[1] for key in keys}) == 60 // repeats
    single = EpochSampler(60, 7)
    assert [key[1] for key in keys[::repeats]] == [index for _, index in single][: 60 // repeats]


def test_the_repeats_of_an_image_go_to_different_processes_and_are_augmented_apart():
    three = orders(60, 12, 3, 1, repeats=3)
    assert [[key[2] for batch in order for key in batch] for order in three] == [[rank] * 20 for rank in range(3)]
    data = images()
    drawn = [data[0, 5, repeat][0] for repeat in range(3)]
    assert torch.equal(drawn[0], data[0, 5][0])
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])


def test_batches_that_cannot_be_split_are_refused():
    with pytest.raises(ValueError, match=r"`batch_size` must be a multiple.*2 x 3.*got 16"):
        orders(60, 16, 2, 3)
    with pytest.raises(ValueError, match=r"`batch_size` must not exceed.*10.*got 12"):
        orders(10, 12, 1, 1, drop_last=True)
    with pytest.raises(ValueError, match="`repeats` must be at least 1"):
        EpochSampler(10, 0, repeats=0)


@in_turn("length", [1, 10, 11, 12])
@in_turn("world_size", [1, 2, 3])
@in_turn("in_memory", [True, False])
def test_evaluation_counts_every_image_once_and_gives_all_processes_as_many(length, world_size, in_memory):
    pixels = np.arange(length, dtype=np.uint8)[:, None, None] * np.ones((1, 2, 2), np.uint8)
    kind = TensorImages if in_memory else TransformedImages
    data = kind(ArrayImages(pixels, np.arange(length)), lambda image: torch.from_numpy(np.array(image)).float())
    seen, counts = [], set()
    for rank in range(world_size):
        order = EvaluationOrder(length, rank, world_size)
        loaded = [data[index] for index in order]
        assert len(order) == len(loaded)
        counts.add(len(loaded))
        for image, label in loaded:
            if label == PADDING:
                assert image[0, 0] == length - 1
            else:
                assert image[0, 0] == label
                seen.append(int(label))
    assert sorted(seen) == list(range(length)) and len(counts) == 1


def test_examples_that_no_process_gets_are_said():
    for count, world_size, parts, left in ((21, 2, 1, 1), (21, 1, 1, 0), (22, 2, 1, 0), (23, 2, 2, 3), (24, 2, 2, 0)):
        notes = BatchOrder(EpochSampler(count, 0), 4, world_size=world_size, parts=parts).notes()
        assert notes == (
            [f"the last {left} examples of each epoch are left out, fewer than its {world_size * parts} micro-batches"]
            if left
            else []
        )


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
