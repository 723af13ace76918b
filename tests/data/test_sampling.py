import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from graticule.data import ArrayImages, Augmentation, DatasetInfo, EpochSampler, SeededImages, training_transform

INFO = DatasetInfo("cifar10", ("a", "b"), 3, (16, 16), (0.5,) * 3, (0.25,) * 3)
AUGMENTATION = Augmentation(
    random_crop_padding=2, hflip=0.5, rand_augment="rand-m9-mstd0.5-inc1", erasing=0.5
)  # torch's, Python's and numpy's generators all take part


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


def test_another_epoch_or_seed_or_index_draws_other_numbers():
    data, other = images(), images(seed=1)
    assert not all(torch.equal(data[0, i][0], data[1, i][0]) for i in range(12))
    assert not all(torch.equal(data[0, i][0], other[0, i][0]) for i in range(12))
    noise = [SeededImages([(None, 0)] * 2, lambda _: torch.rand(4), seed)[key][0] for seed in (0, 1) for key in KEYS]
    assert len({tuple(drawn.tolist()) for drawn in noise}) == 2 * len(KEYS)


KEYS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_the_generators_of_the_process_go_on_as_if_nothing_had_been_drawn():
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])
    data = images()
    for index in range(12):
        data[0, index]
    assert draw() == expected


def test_a_transform_that_fails_leaves_the_generators_as_they_were():
    def fail(_):
        torch.rand(3), np.random.rand(), random.random()
        raise RuntimeError("on purpose")

    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(RuntimeError, match="on purpose"):
        SeededImages([(None, 0)], fail, 0)[0, 0]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12's, of a process with threads
def test_workers_change_nothing_even_when_they_outlive_an_epoch():
    alone = epochs(0, [0, 1, 2])
    for a, b in zip(alone, epochs(2, [0, 1, 2], persistent_workers=True), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(alone[0], alone[1])


def test_a_resumed_run_sees_what_the_uninterrupted_one_would_have_seen():
    uninterrupted, resumed = epochs(0, [0, 1, 2, 3]), epochs(0, [2, 3])
    assert torch.equal(uninterrupted[2], resumed[0])
    assert torch.equal(uninterrupted[3], resumed[1])


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_holds_every_index_once_and_names_itself(shuffle):
    sampler = EpochSampler(50, seed=3, shuffle=shuffle)
    orders = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        keys = list(sampler)
        assert keys == list(sampler)
        assert {key[0] for key in keys} == {epoch}
        orders.append([key[1] for key in keys])
        assert sorted(orders[-1]) == list(range(50)) and len(sampler) == 50
    assert (orders[0] != orders[1]) == shuffle
    assert (orders[0] == list(range(50))) != shuffle
