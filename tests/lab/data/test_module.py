import pytest
import torch

from graticule.lab.data.augmentation import Augmentation
from graticule.lab.data.module import DataModule
from graticule.lab.data.transforms import TensorImages


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
    with pytest.raises(ValueError, match=r"`batch_size` must be even.*15"):
        DataModule("digits", size=(28, 28), batch_size=15, drop_last=True)
    with pytest.raises(ValueError, match=r"`batch_size`.*40.*64"):
        module(drop_last=True, batch_size=64)


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
