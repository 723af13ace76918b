"""Batches of images in memory, with and without crops and flips."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as T
from torchvision.transforms.functional import hflip

from graticule.lab.data.augmentation import Augmentation
from graticule.lab.data.images import DatasetInfo
from graticule.lab.data.module import DataModule
from graticule.lab.data.sampling import BatchIndices
from graticule.lab.data.transforms import ShiftedImages, TensorImages, byte_values, evaluation_transform, shifts_only


def module(**options):
    options = {"size": (28, 28), "batch_size": 16, "limit_train": 40, "limit_test": 30} | options
    data = DataModule("digits", **options)
    return data


def labels_of(loader):
    return torch.cat([labels for _, labels in loader])


@pytest.mark.parametrize("augmentation", [None, Augmentation(random_crop_padding=2)])
def test_batches_have_the_documented_shapes_at_a_size_that_is_not_square(augmentation):
    data = module(size=(32, 24), augmentation=augmentation)
    for loader in (data.train_dataloader(), data.eval_dataloader(data.size)):
        images, labels = next(iter(loader))
        assert images.shape[1:] == (1, 32, 24) and images.dtype == torch.float32
        assert labels.shape == (len(images),) and labels.dtype == torch.int64


def test_evaluation_sees_every_image_once_in_order_at_any_size():
    data = module()
    at_home, elsewhere = data.eval_dataloader(data.size), data.eval_dataloader((20, 36))
    assert torch.equal(labels_of(at_home), labels_of(elsewhere)) and len(labels_of(at_home)) == 30
    assert next(iter(elsewhere))[0].shape[1:] == (1, 20, 36)


def test_mixing_in_pairs_gets_full_batches_of_even_size_or_an_error():
    assert [len(labels) for _, labels in module(drop_last=True).train_dataloader()] == [16, 16]
    assert [len(labels) for _, labels in module().train_dataloader()] == [16, 16, 8]
    for batch_size, message in ((15, r"`batch_size` must be a multiple of 2.*15"), (64, r"`batch_size`.*40.*64")):
        with pytest.raises(ValueError, match=message):
            module(drop_last=True, batch_size=batch_size).train_order()


@pytest.mark.parametrize("augmentation", [None, Augmentation(random_crop_padding=2, hflip=0.5)])
@pytest.mark.parametrize("size", [(28, 28), (32, 24)])
def test_batches_made_on_a_device_equal_those_on_the_cpu(monkeypatch, augmentation, size):
    """The device is simulated: whatever `to` does not move, or is made elsewhere, fails on the meta device."""
    here = module(size=size, augmentation=augmentation)
    expected = [*here.train_dataloader(), *here.eval_dataloader(here.size)]
    moved, to = [], TensorImages.to
    monkeypatch.setattr(TensorImages, "to", lambda images, device: (moved.append(device), to(images, device))[1])
    there = module(size=size, augmentation=augmentation)
    there.train_dataloader()  # of images that were made before the device is known
    there.to(torch.device("meta"))
    for loader in (there.train_dataloader(), there.eval_dataloader(there.size)):
        for images, labels in loader:
            assert images.device.type == labels.device.type == "meta"
    assert moved.count(torch.device("meta")) == 2
    there.to(torch.device("cpu"))
    for ours, on_cpu in zip([*there.train_dataloader(), *there.eval_dataloader(there.size)], expected, strict=True):
        assert torch.equal(ours[0], on_cpu[0]) and torch.equal(ours[1], on_cpu[1])
    one_by_one = here.test_images(size, range(30))[0]
    assert torch.equal(torch.cat([images for images, _ in there.eval_dataloader(there.size)]), one_by_one)


INFO = DatasetInfo("cifar10", ("a", "b"), 3, (8, 12), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
BORDER = 2


def pixels():
    return np.random.RandomState(0).randint(0, 256, (6, 8, 12, 3)).astype(np.uint8)


def shifted(augmentation=None, seed=0):
    augmentation = augmentation or Augmentation(random_crop_padding=BORDER, hflip=0.5)
    stored = torch.from_numpy(pixels()).permute(0, 3, 1, 2)
    return ShiftedImages(stored, np.arange(6) % 2, byte_values(INFO), augmentation, seed)


def drawn(data, epoch, *indices, repeats=0):
    return data[BatchIndices(np.array(indices), epoch, np.array(repeats))][0]


def all_crops(image):
    """Return all crops that torchvision can make of an image, by offset and flip."""
    bring = evaluation_transform(INFO, (8, 12), Augmentation())
    padded = T.Pad(BORDER)(Image.fromarray(image))
    crops = {}
    for top in range(2 * BORDER + 1):
        for left in range(2 * BORDER + 1):
            crop = padded.crop((left, top, left + 12, top + 8))
            crops[top, left, False], crops[top, left, True] = bring(crop), bring(hflip(crop))
    return crops


def which(image, crops):
    names = [name for name, crop in crops.items() if (image - crop).abs().max() < 1e-5]
    assert len(names) == 1
    return names[0]


def test_every_image_is_one_of_torchvisions_crops_and_all_of_them_come():
    data, crops = shifted(), all_crops(pixels()[3])
    seen = [which(drawn(data, epoch, 3)[0], crops) for epoch in range(600)]
    assert set(seen) == set(crops)
    assert 0.42 < np.mean([flip for _, _, flip in seen]) < 0.58


def test_the_draws_do_not_depend_on_the_batch():
    data = shifted()
    batch, labels = data[BatchIndices(np.arange(6), 4)]
    assert batch.shape == (6, 3, 8, 12) and batch.is_contiguous() and labels.tolist() == [0, 1] * 3
    for index in range(6):
        assert torch.equal(drawn(shifted(), 4, index)[0], batch[index])
    mixed = drawn(data, 4, 5, 1, 1, repeats=(0, 1, 0))
    assert torch.equal(mixed[0], batch[5]) and torch.equal(mixed[2], batch[1])
    assert torch.equal(mixed[1], drawn(shifted(), 4, 1, repeats=[1])[0])


@pytest.mark.parametrize(
    ("augmentation", "by_batches"),
    [
        (Augmentation(random_crop_padding=2), True),
        (Augmentation(random_crop_padding=2, hflip=0.5), True),
        (Augmentation(), False),
        (Augmentation(random_crop_padding=2, erasing=0.1), False),
        (Augmentation(hflip=0.5, rand_augment="rand-m9-mstd0.5-inc1"), False),
        (Augmentation(scale=(0.5, 1.0)), False),
        (Augmentation(color_jitter=0.1), False),
    ],
)
def test_only_crops_and_flips_are_done_by_batches(augmentation, by_batches):
    assert shifts_only(augmentation) is by_batches
    data = DataModule("digits", size=(28, 28), augmentation=augmentation, limit_train=40, limit_test=10)
    loader = data.train_dataloader()
    assert isinstance(loader.dataset, ShiftedImages) is by_batches
    assert next(iter(loader))[0].shape == (40, 1, 28, 28)
