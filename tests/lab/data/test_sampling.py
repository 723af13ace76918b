import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from graticule.lab.data.augmentation import Augmentation
from graticule.lab.data.images import ArrayImages, DatasetInfo
from graticule.lab.data.module import DataModule
from graticule.lab.data.sampling import BatchIndices, BatchOrder, TaskData, evaluation_batches
from graticule.lab.data.transforms import ImageExamples, training_transform
from in_turn import in_turn

INFO = DatasetInfo("cifar10", ("a", "b"), 3, (16, 16), (0.5,) * 3, (0.25,) * 3)
AUGMENTATION = Augmentation(
    random_crop_padding=2, hflip=0.5, rand_augment="rand-m9-mstd0.5-inc1", erasing=0.5
)  # torch's, Python's and numpy's generators are all used


def images(seed=0):
    pixels = np.random.RandomState(0).randint(0, 256, (12, 16, 16, 3)).astype(np.uint8)
    transform = training_transform(INFO, (16, 16), AUGMENTATION)
    return ImageExamples(ArrayImages(pixels, np.arange(12) % 2), np.arange(12), transform, seed)


def drawn(*indices, epoch=0, repeats=0):
    return images()[BatchIndices(np.array(indices), epoch, np.array(repeats))][0]


def epochs(workers):
    order = BatchOrder(12, 5, seed=0)
    loader = TaskData.load(SimpleNamespace(workers=workers, seed=0), images(), order)
    seen = []
    for epoch in range(3):
        order.start(epoch)
        seen.append(torch.cat([batch for batch, _ in loader]))
    return seen


def test_an_image_depends_on_seed_epoch_index_and_repeat_alone():
    forward = drawn(*range(12), epoch=1)
    random.random(), np.random.rand(), torch.rand(1)
    assert torch.equal(forward.flip(0), drawn(*reversed(range(12)), epoch=1))
    three = drawn(5, 5, 5, repeats=(0, 1, 2))
    assert torch.equal(three[0], drawn(5)[0])
    assert not torch.equal(three[0], three[1]) and not torch.equal(three[1], three[2])
    assert not torch.equal(forward[5], three[0])


def test_the_generators_of_the_process_continue_as_if_nothing_had_been_drawn():
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])
    drawn(*range(12))
    assert draw() == expected


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12's, of a process with threads
def test_workers_change_nothing_even_when_they_outlive_an_epoch():
    alone = epochs(0)
    assert all(torch.equal(a, b) for a, b in zip(alone, epochs(2), strict=True))
    assert not torch.equal(alone[0], alone[1])


SHARES = [(1, 1), (2, 1), (1, 3), (3, 2)]  # processes, and micro-batches of a step in each


def orders(length, batch_size, world_size=1, parts=1, **options):
    shared = {"world_size": world_size, "parts": parts, **options}
    return [BatchOrder(length, batch_size, 7, rank=rank, **shared) for rank in range(world_size)]


@in_turn("drop_last", [True, False])
@in_turn(("world_size", "parts"), SHARES)
@in_turn("length", [60, 64, 71])
def test_a_step_has_the_next_images_of_the_epoch_shared_evenly(length, world_size, parts, drop_last):
    together = orders(length, 12, world_size, parts, drop_last=drop_last)
    batches = [list(order) for order in together]
    epoch, shares = together[0].indices(0), world_size * parts
    assert sorted(epoch) == list(range(length))
    rest = 0 if drop_last else length % 12 // shares * shares
    assert all(len(order) == len(batches[0]) == parts * (length // 12 + (rest > 0)) for order in together)
    for step in range(together[0].steps):
        parts_of_step = [batch for own in batches for batch in own[step * parts : (step + 1) * parts]]
        assert len({len(batch.indices) for batch in parts_of_step}) == 1  # so that the mean of means is the mean
        expected = epoch[12 * step : 12 * step + (12 if step < length // 12 else rest)]
        assert sorted(np.concatenate([batch.indices for batch in parts_of_step])) == sorted(expected)
    left = 0 if drop_last else length % shares
    assert together[0].notes() == (
        [f"the last {left} examples of each epoch are left out, to share the rest evenly"] if left else []
    )


def test_a_pass_begins_at_a_batch_of_an_epoch_in_an_order_of_its_own():
    (order,) = orders(64, 12)
    batches = [batch.indices.tolist() for batch in order]
    order.start(0, 2)
    assert [batch.indices.tolist() for batch in order] == batches[2:] and len(order) == 6
    order.start(1)
    assert {batch.epoch for batch in order} == {1}
    assert [batch.indices.tolist() for batch in order] != batches


@pytest.mark.parametrize("repeats", [2, 3])
def test_repeated_augmentation_repeats_every_image_in_turn_on_different_processes(repeats):
    (order,) = orders(60, 12, repeats=repeats)
    indices = np.concatenate([batch.indices for batch in order])
    assert indices.tolist() == order.indices(0)[: 60 // repeats].repeat(repeats).tolist()
    assert np.concatenate([batch.repeats for batch in order]).tolist() == [*range(repeats)] * (60 // repeats)
    for rank, own in enumerate(orders(60, 12, repeats, repeats=repeats)):
        assert {int(repeat) for batch in own for repeat in batch.repeats} == {rank}


def test_batches_by_group_have_each_image_once_and_one_group_but_the_last_ones():
    groups = np.random.RandomState(0).randint(0, 2, 101)
    order = BatchOrder(101, 8, 1, groups=groups)
    batches = [batch.indices for batch in order]
    assert sorted(np.concatenate(batches)) == list(range(101))
    mixed = [len({*groups[batch]}) == 2 for batch in batches]
    assert sum(mixed) <= 1 and not any(mixed[:-2])
    assert len({int(groups[batch][0]) for batch in batches[:6]}) == 2


def test_batches_that_cannot_be_split_are_refused():
    with pytest.raises(ValueError, match=r"`batch_size` must not exceed.*10.*got 12"):
        orders(10, 12, drop_last=True)
    with pytest.raises(ValueError, match="`devices` x `nodes` must be at most the number of test examples, 2, got 3"):
        evaluation_batches(2, 4, 0, 3)


@in_turn("length", [3, 10, 11, 12])
@in_turn("world_size", [1, 2, 3])
@in_turn("batch_size", [1, 2, 5])
def test_evaluation_has_every_image_once_and_gives_all_processes_as_many_batches(length, world_size, batch_size):
    ranks = [evaluation_batches(length, batch_size, rank, world_size) for rank in range(world_size)]
    assert sorted(index for batches in ranks for batch in batches for index in batch.indices) == list(range(length))
    assert len({len(batches) for batches in ranks}) == 1 and all(len(b.indices) for batches in ranks for b in batches)


SIZES = ((16, 16), (24, 24), (16, 32))


def digits(**kwargs):
    options = {"size": (24, 24), "batch_size": 8, "limit_train": 80, "limit_test": 20, "seed": 3}
    return DataModule("digits", **{**options, **kwargs})


def test_each_step_has_one_size_of_all_and_the_images_and_their_randomness_are_those_of_a_single_size():
    crops = {"augmentation": Augmentation(scale=(0.5, 1.0))}
    for options in ({}, crops):
        several = [*digits(train_sizes=SIZES, **options).train_dataloader()]
        assert len(several) == 10 and {tuple(images.shape[-2:]) for images, _ in several} == {*SIZES}
        for (images, labels), (expected, theirs) in zip(several, digits(**options).train_dataloader(), strict=True):
            assert torch.equal(labels, theirs)
            assert images.shape != expected.shape or torch.equal(images, expected)
    sizes = [[batch.size for batch in own] for own in orders(2400, 12, 2, 3, sizes=3)]
    assert sizes[0] == sizes[1] and sizes[0][::3] == sizes[0][2::3]
    counts = np.bincount(sizes[0][::3], minlength=3)
    assert abs(counts - 200 / 3).max() < 5 * (200 * 2 / 9) ** 0.5  # five standard deviations
