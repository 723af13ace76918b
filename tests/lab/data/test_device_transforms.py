"""The augmentation of whole epochs: its draws have timm's distributions, and are functions of the image alone."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import LEVEL_TO_ARG
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation

from graticule.lab.data.augmentation import Augmentation, named_augmentation
from graticule.lab.data.device_transforms import ARGUMENTS, AugmentedImages, augments_on_device
from graticule.lab.data.images import DatasetInfo
from graticule.lab.data.module import DataModule
from graticule.lab.data.sampling import BatchIndices
from graticule.lab.data.transforms import ImageExamples, training_transform
from graticule.lab.recipes.load import load_recipe

INFO = DatasetInfo("cifar10", (*"abcdefghij",), 3, (32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
FULL = load_recipe("vit_lite_cifar10").augmentation
COUNT = 20_000


def batches(augmentation=FULL, count=64, seed=5, pixels=None):
    if pixels is None:
        pixels = torch.from_numpy(np.random.default_rng(0).integers(256, size=(count, 3, 32, 32)).astype(np.uint8))
    return AugmentedImages(pixels, np.arange(len(pixels)) % 10, INFO, (32, 32), augmentation, seed)


def draws():
    return iter(np.random.default_rng(0).random((60, COUNT)))


def close(ours, expected, errors=4.5):
    """Check that two samples, rows of values, have equal means and variances within some standard errors."""
    ours, expected = np.asarray(ours, dtype=float), np.asarray(expected, dtype=float)
    for power in (1, 2):
        a, b = ((sample - expected.mean(0)) ** power for sample in (ours, expected))
        error = np.sqrt(a.var(0) / len(a) + b.var(0) / len(b))
        assert (np.abs(a.mean(0) - b.mean(0)) <= errors * error + 1e-9).all()


@pytest.mark.parametrize("scale", [(0.8, 1.0), (0.08, 1.0)])
@pytest.mark.parametrize("size", [(32, 32), (28, 36)])
def test_crops_by_area_have_timms_distribution(scale, size):
    boxes = batches(Augmentation(scale=scale, hflip=0.5)).draw_boxes(draws(), size)
    random.seed(0)
    image = Image.new("RGB", size[::-1])
    timms = [RandomResizedCropAndInterpolation.get_params(image, scale, (3 / 4, 4 / 3)) for _ in range(20_000)]
    close(boxes, timms)
    assert (boxes[:, :2] >= 0).all() and (boxes[:, :2] + boxes[:, 2:] <= size).all()


def test_erased_rectangles_have_timms_distribution():
    boxes = batches().draw_erased(draws())
    random.seed(0)
    erasing = RandomErasing(0.25, mode="pixel", device="cpu")
    timms = []
    for _ in range(6_000):
        rows, columns = torch.where(erasing(torch.full((1, 32, 32), 9.0))[0] != 9)
        sides = [(int(x.min()), int(x.max() - x.min()) + 1) if len(x) else (0, 0) for x in (rows, columns)]
        timms.append((sides[0][0], sides[1][0], sides[0][1], sides[1][1]))
    close(boxes, timms)
    assert (boxes >= 0).all() and (boxes[:, :2] + boxes[:, 2:] <= 32).all()


@pytest.mark.parametrize("name", ["rand-m9-mstd0.5-inc1", "rand-m6-n3-mstd1.0-inc1", "rand-m5-p0.7", "rand-m9-mstd101"])
def test_operations_have_timms_distribution(name):
    images = batches(Augmentation(rand_augment=name, scale=(0.5, 1.0), random_interpolation=True))
    timms = named_augmentation(name, INFO.mean, (32, 32))
    record = []
    for number, op in enumerate(timms.ops):
        op.aug_fn = lambda image, *arguments, number=number, **options: record.append((number, *arguments)) or image
    random.seed(0)
    np.random.seed(0)
    for _ in range(20_000):
        timms(None)
    layers = [*images.draw_layers(draws())]
    assert len(layers) == timms.num_layers
    ours, arguments, cubic = (np.concatenate(column) for column in zip(*layers, strict=True))
    assert abs(cubic.mean() - 0.5) < 0.02
    close(
        np.eye(16)[ours][:, :15], np.eye(16)[[entry[0] for entry in record] + [15] * (len(ours) - len(record))][:, :15]
    )
    for number in range(15):
        values = [entry[1] for entry in record if entry[0] == number and len(entry) > 1]
        if values:
            close(arguments[ours == number], values)


def test_arguments_of_levels_are_timms(monkeypatch):
    levels = np.linspace(0, 1.2, 61)
    for name, argument in ARGUMENTS.items():
        if (timms := LEVEL_TO_ARG[name]) is None:
            continue
        for sign, uniform in ((1.0, 0.0), (-1.0, 1.0)):
            monkeypatch.setattr(random, "random", lambda uniform=uniform: uniform)
            expected = [timms(10 * level, {})[0] for level in levels]
            np.testing.assert_allclose(argument(levels, np.full(61, sign)), expected, atol=1e-12, err_msg=name)


def test_an_image_is_a_function_of_seed_epoch_and_index_alone():
    ours, index = batches(), np.array([5, 40, 7])
    first, labels = ours[BatchIndices(index, 2)]
    assert first.shape == (3, 3, 32, 32) and first.dtype == torch.float32 and labels.tolist() == [5, 0, 7]
    other = ours[BatchIndices(index, 3)][0]
    assert all(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert torch.equal(ours[BatchIndices(index[::-1].copy(), 2)][0], first.flip(0))
    assert torch.equal(batches()[BatchIndices(index, 2)][0], first)
    assert not torch.equal(batches(seed=6)[BatchIndices(index, 2)][0], first)


def test_the_images_that_are_augmented_at_once_do_not_change_them(monkeypatch):
    expected = batches()[BatchIndices(np.arange(64), 1)][0]
    monkeypatch.setattr("graticule.lab.data.device_transforms._AT_ONCE", 10 * 3 * 32 * 32)
    assert torch.equal(batches()[BatchIndices(np.arange(64), 1)][0], expected)


def test_erased_pixels_are_normal_and_others_unchanged():
    without, erased = (
        batches(dataclasses.replace(FULL, erasing=chance), 500)[BatchIndices(np.arange(500), 0)][0]
        for chance in (0.0, 1.0)
    )
    changed = (without != erased).all(1)
    share = changed.float().mean((1, 2))
    assert share.min() > 0.01 and share.max() < 0.36
    inside = changed[:, None].expand(-1, 3, -1, -1)
    values = erased[inside]
    assert abs(values.mean()) < 0.02 and abs(values.std() - 1) < 0.02
    assert torch.equal(
        without[~changed[:, None].expand(-1, 3, -1, -1)], erased[~changed[:, None].expand(-1, 3, -1, -1)]
    )


def test_augmented_images_have_the_moments_of_pillows_path():
    """The mean over draws and the mean square, in squares of 8 pixels, within standard errors."""
    ramp, count = np.linspace(0, 255, 32 * 32 * 3).reshape(32, 32, 3).astype(np.uint8), 1_500
    pixels = torch.from_numpy(ramp).permute(2, 0, 1).expand(count, -1, -1, -1).contiguous()
    ours = batches(pixels=pixels)[BatchIndices(np.arange(count), 0)][0]
    transform = training_transform(INFO, (32, 32), FULL)
    examples = ImageExamples([(Image.fromarray(ramp), 0)] * count, np.arange(count), transform, 0)
    expected = examples[BatchIndices(np.arange(count), 0)][0]
    for power in (1, 2):
        a, b = (
            (x.double() ** power).unfold(2, 8, 8).unfold(3, 8, 8).mean((-1, -2)).flatten(1) for x in (ours, expected)
        )
        error = (a.var(0) / count + b.var(0) / count).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() <= 4.5 * error).all()


@pytest.mark.parametrize(
    ("changes", "supported"),
    [
        ({}, True),
        ({"erasing": 0.0, "rand_augment": None, "color_jitter": 0.0}, True),
        ({"random_interpolation": False, "interpolation": "bilinear"}, True),
        ({"rand_augment": "rand-m9-mstd0.5"}, True),
        ({"random_interpolation": False, "interpolation": "lanczos"}, False),
        ({"ratio": (1.5, 2.0)}, False),
        ({"rand_augment": None}, False),  # the color jitter is then used
        *(({"rand_augment": name}, False) for name in ("augmix-m5-w4-d2", "original-mstd0.5", "rand-m9-tweights")),
        ({"rand_augment": "rand-m9-t3a"}, False),
    ],
)
def test_steps_that_are_missing_here_leave_the_images_to_pillow(changes, supported):
    assert augments_on_device(INFO, dataclasses.replace(FULL, **changes)) is supported
    assert not augments_on_device(dataclasses.replace(INFO, size=None), FULL)


def test_the_cpu_keeps_its_draws_and_a_gpu_augments_the_stored_images(monkeypatch):
    augmentation = Augmentation(scale=(0.5, 1.0), rand_augment="rand-m9-mstd0.5-inc1", erasing=0.25)
    data = DataModule("digits", size=(36, 36), augmentation=augmentation, limit_train=40, limit_test=20, batch_size=8)
    assert isinstance(data.train_batches(), ImageExamples)
    monkeypatch.setattr(AugmentedImages, "to", lambda self, device: self)  # there is no GPU
    ours = data.to(torch.device("cuda")).train_batches()
    assert isinstance(ours, AugmentedImages) and ours.tensors.shape == (40, 1, 28, 28)
    images, labels = ours[BatchIndices(np.arange(8), 0)]
    assert images.shape == (8, 1, 36, 36) and torch.isfinite(images).all() and labels.shape == (8,)
