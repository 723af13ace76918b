"""Batches of one aspect ratio, with every image at the nearest of the training sizes."""

import numpy as np
import pytest
import torch
from PIL import Image

from graticule.lab.data.augmentation import Augmentation
from graticule.lab.data.module import DataModule
from graticule.lab.data.sampling import BatchOrder, GroupSampler
from graticule.lab.data.transforms import aspect_groups
from graticule.lab.tasks.classification import Recipe

SIZES = ((16, 32), (16, 16), (32, 16), (24, 24))


def test_an_image_is_grouped_with_the_sizes_of_the_nearest_aspect_ratio():
    images = np.array([(10, 20), (20, 10), (30, 30), (100, 139), (100, 145), (145, 100)])
    groups, sizes_of = aspect_groups(images, SIZES)
    assert sizes_of == ((0,), (1, 3), (2,))  # wide, square in two sizes, tall
    assert groups.tolist() == [0, 2, 1, 1, 0, 2]  # the border is at the square root of 2


def order(groups, seed=0, **kwargs):
    return BatchOrder(GroupSampler(groups, 8, seed), 8, sizes=4, sizes_of=((0,), (1, 3), (2,)), **kwargs)


def test_an_epoch_has_each_image_once_and_full_batches_of_one_group():
    groups = np.random.default_rng(0).integers(0, 3, 203)
    batches = list(order(groups))
    assert sorted(key[1] for batch in batches for key in batch) == list(range(203))
    mixed = 0
    for batch in batches:
        (size,) = {key[-1] for key in batch}
        of = {int(groups[key[1]]) for key in batch}
        mixed += len(of) > 1
        assert any(size in ((0,), (1, 3), (2,))[group] for group in of)
    assert mixed <= 2  # the rest of three groups
    assert {size for batch in batches for size in {key[-1] for key in batch}} == {0, 1, 2, 3}


def test_all_processes_and_micro_batches_of_a_step_have_one_size():
    groups = np.random.default_rng(1).integers(0, 3, 100)
    whole = [batch[0][-1] for batch in order(groups)]
    parts = [list(order(groups, rank=rank, world_size=2, parts=2)) for rank in range(2)]
    for part in parts:
        assert [batch[0][-1] for batch in part] == [size for size in whole for _ in range(2)][: len(part)]
    keys = {key for part in parts for batch in part for key in batch}
    assert keys == {key for batch in order(groups) for key in batch}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write images that are red on the left half and blue on the right, wide, square and tall."""
    root = tmp_path_factory.mktemp("shapes")
    for split, count in (("train", 6), ("val", 1)):
        for label in ("a", "b"):
            place = root / split / label
            place.mkdir(parents=True)
            for number in range(count):
                width, height = ((60, 30), (40, 40), (30, 60))[number % 3]
                pixels = np.zeros((height, width, 3), np.uint8)
                pixels[:, : width // 2, 0] = pixels[:, width // 2 :, 2] = 255
                Image.fromarray(pixels).save(place / f"{number}.png")
    return root


def module(folder, **kwargs):
    data = DataModule(
        "image_folder", root=folder, size=(16, 16), train_sizes=SIZES[:3], batch_size=4, group_by_aspect=True, **kwargs
    )
    data.setup()
    return data


def test_images_of_the_shape_of_their_batch_are_whole(folder):
    shapes = set()
    for images, _ in module(folder).train_dataloader():
        shapes.add(tuple(images.shape[-2:]))
        red, blue = images[:, 0] > images[:, 2], images[:, 2] > images[:, 0]
        middle = images.shape[-1] // 2
        assert red[..., :middle].all() and blue[..., middle:].all()  # nothing is cropped
    assert shapes == set(SIZES[:3])


def test_random_crops_keep_the_proportions(folder, monkeypatch):
    ratios = {}
    monkeypatch.setattr(
        "graticule.lab.data.module.training_transform",
        lambda info, size, augmentation: ratios.setdefault(size, augmentation.ratio) and (lambda image: torch.zeros(3)),
    )
    module(folder, augmentation=Augmentation(scale=(0.5, 1.0), ratio=(0.8, 1.25))).train_dataloader()
    assert ratios == {(16, 32): (1.6, 2.5), (16, 16): (0.8, 1.25), (32, 16): (0.4, 0.625)}


def test_a_share_of_the_images_and_a_broken_one_are_grouped(folder, tmp_path):
    (folder / "train" / "a" / "0.png").rename(tmp_path / "kept.png")
    (folder / "train" / "a" / "0.png").write_bytes(b"no image")
    try:
        data = module(folder, limit_train=8)
        assert len(list(data.train_dataloader())) == 2 and len(data.skipped) == 1
    finally:
        (tmp_path / "kept.png").rename(folder / "train" / "a" / "0.png")


def test_images_of_one_shape_cannot_be_grouped():
    with pytest.raises(ValueError, match=r"two aspect ratios or more if `group_by_aspect` is on.*got 16 24"):
        Recipe(train_sizes=("16", "24"), group_by_aspect=True)
    with pytest.raises(ValueError, match="`aug_repeats` must be 1"):
        Recipe(train_sizes=("16", "16x24"), group_by_aspect=True, aug_repeats=3)
    with pytest.raises(ValueError, match=r"`group_by_aspect` must be off.*'digits'"):
        DataModule("digits", size=(16, 16), train_sizes=SIZES, group_by_aspect=True).setup()
