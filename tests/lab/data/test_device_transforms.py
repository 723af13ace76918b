"""The augmentation of whole epochs: its draws have timm's distributions, and are functions of the image alone."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import LEVEL_TO_ARG
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation

from graticule.lab.data.augmentation import Augmentation, named_augmentation
from graticule.lab.data.device_transforms import ARGUMENTS, AugmentedImages, batch_augmentation, normals, uniforms
from graticule.lab.data.images import DatasetInfo
from graticule.lab.data.module import DataModule
from graticule.lab.data.sampling import BatchIndices, draw
from graticule.lab.data.transforms import ImageExamples, byte_values, training_transform
from graticule.lab.recipes.load import load_recipe

INFO = DatasetInfo("cifar10", (*"abcdefghij",), 3, (32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
FULL = load_recipe("vit_lite_cifar10").augmentation
NUMBERS = draw(BatchIndices(np.arange(20_000), 3), 7, 20_000)


def drawn(augmentation=FULL, info=INFO, size=(32, 32)):
    steps = batch_augmentation(info, size, augmentation)
    assert steps is not None
    return steps


def batches(augmentation=FULL, count=64, seed=5):
    pixels = torch.from_numpy(np.random.default_rng(0).integers(256, size=(count, 3, 32, 32)).astype(np.uint8))
    return AugmentedImages(pixels, np.arange(count) % 10, byte_values(INFO), drawn(augmentation), seed)


def close(ours, expected, errors=4.5):
    """Check that two samples, rows of values, have equal means and deviations within some standard errors."""
    ours, expected = np.asarray(ours, dtype=float), np.asarray(expected, dtype=float)
    error = np.sqrt(ours.var(0) / len(ours) + expected.var(0) / len(expected))
    assert (np.abs(ours.mean(0) - expected.mean(0)) <= errors * error + 1e-9).all()
    np.testing.assert_allclose(ours.std(0), expected.std(0), rtol=0.05, atol=1e-9)


def test_uniform_and_normal_values_are_those():
    values = np.stack([*uniforms(NUMBERS, 40)])
    assert values.min() >= 0 and values.max() < 1
    assert np.abs(np.corrcoef(values) - np.eye(40)).max() < 0.04
    np.testing.assert_allclose(values.mean(1), 0.5, atol=0.01)
    noise = normals(torch.from_numpy(NUMBERS[:500]), 300)
    assert torch.isfinite(noise).all() and abs(noise.mean()) < 0.015 and abs(noise.std() - 1) < 0.01
    assert abs((noise**4).mean() - 3) < 0.1 and torch.corrcoef(noise[:20]).fill_diagonal_(0).abs().max() < 0.3


@pytest.mark.parametrize("scale", [(0.8, 1.0), (0.08, 1.0)])
@pytest.mark.parametrize("size", [(32, 32), (16, 64)])
def test_crops_by_area_have_timms_distribution(scale, size):
    steps = drawn(Augmentation(scale=scale, hflip=0.5))
    boxes = steps.boxes(uniforms(NUMBERS, 26), size)
    random.seed(0)
    image = Image.new("RGB", size[::-1])
    timms = [RandomResizedCropAndInterpolation.get_params(image, scale, (3 / 4, 4 / 3)) for _ in range(20_000)]
    close(boxes, timms)
    assert (boxes[:, :2] >= 0).all() and (boxes[:, :2] + boxes[:, 2:] <= size).all()


def test_erased_rectangles_have_timms_distribution():
    boxes = drawn().erased(uniforms(NUMBERS, 23))
    random.seed(0)
    erasing = RandomErasing(0.25, mode="pixel", device="cpu")
    timms = []
    for _ in range(6_000):
        rows, columns = torch.where(erasing(torch.full((1, 32, 32), 9.0))[0] != 9)
        sides = [(int(x.min()), int(x.max() - x.min()) + 1) if len(x) else (0, 0) for x in (rows, columns)]
        timms.append((sides[0][0], sides[1][0], sides[0][1], sides[1][1]))
    close(boxes, timms)


@pytest.mark.parametrize("name", ["rand-m9-mstd0.5-inc1", "rand-m6-n3-mstd1.0-inc1", "rand-m5-p0.7", "rand-m9-mstd101"])
def test_operations_have_timms_distribution(name):
    steps = drawn(Augmentation(rand_augment=name, random_crop_padding=4))
    timms = named_augmentation(name, INFO.mean, (32, 32))
    record = []
    for number, op in enumerate(timms.ops):
        op.aug_fn = lambda image, *arguments, number=number, **options: record.append((number, *arguments)) or image
    random.seed(0)
    np.random.seed(0)
    for _ in range(20_000):
        timms(None)
    layers = [*steps.layers(uniforms(NUMBERS, 20))]
    assert len(layers) == timms.num_layers
    ours = np.concatenate([layer.index for layer in layers])
    arguments = np.concatenate([layer.argument for layer in layers])
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


def test_an_image_is_a_function_of_seed_epoch_index_and_repeat_alone():
    ours, index = batches(), np.array([5, 40, 7])
    first, labels = ours[BatchIndices(index, 2)]
    assert first.shape == (3, 3, 32, 32) and first.dtype == torch.float32 and labels.tolist() == [5, 0, 7]
    assert torch.equal(ours[BatchIndices(index[::-1].copy(), 2)][0], first.flip(0))
    other = ours[BatchIndices(index, 3)][0]
    assert all(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    repeated, _ = ours[BatchIndices(np.array([5, 5, 7]), 2, np.array([0, 1, 0]))]
    assert torch.equal(repeated[0], first[0]) and torch.equal(repeated[2], first[2])
    assert not torch.equal(repeated[1], first[0])
    assert torch.equal(batches()[BatchIndices(index, 2)][0], first)
    assert not torch.equal(batches(seed=6)[BatchIndices(index, 2)][0], first)


@pytest.mark.parametrize(
    "augmentation",
    [FULL, Augmentation(random_crop_padding=4, hflip=0.5, rand_augment="rand-m9-mstd0.5-inc1", erasing=0.25)],
)
def test_augmented_images_have_the_moments_of_pillows_path(augmentation):
    """The mean image over draws, and the mean square, within standard errors."""
    ramp = np.linspace(0, 255, 32 * 32 * 3).reshape(32, 32, 3).astype(np.uint8)
    info = INFO
    steps, transform = drawn(augmentation), training_transform(info, (32, 32), augmentation)
    count = 1_500
    pixels = torch.from_numpy(ramp).permute(2, 0, 1).expand(count, -1, -1, -1).contiguous()
    ours = AugmentedImages(pixels, np.zeros(count), byte_values(info), steps, 0)[BatchIndices(np.arange(count), 0)][0]
    images = [(Image.fromarray(ramp), 0)] * count
    expected = ImageExamples(images, np.arange(count), transform, 0)[BatchIndices(np.arange(count), 0)][0]
    for power in (1, 2):
        a, b = (
            (x.double() ** power).unfold(2, 8, 8).unfold(3, 8, 8).mean((-1, -2)).flatten(1) for x in (ours, expected)
        )
        error = (a.var(0) / count + b.var(0) / count).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() <= 4.5 * error).all()


@pytest.mark.parametrize(
    ("augmentation", "supported"),
    [
        (FULL, True),
        (Augmentation(random_crop_padding=4, erasing=0.1), True),
        (Augmentation(scale=(0.5, 1.0), interpolation="bilinear"), True),
        (Augmentation(hflip=0.5, rand_augment="rand-m9-mstd0.5"), True),
        (Augmentation(scale=(0.5, 1.0), interpolation="lanczos"), False),
        (Augmentation(color_jitter=0.4), False),
        (Augmentation(rand_augment="augmix-m5-w4-d2"), False),
        (Augmentation(rand_augment="original-mstd0.5"), False),
        (Augmentation(rand_augment="rand-m9-t3a"), False),
        (Augmentation(rand_augment="rand-m9-tweights"), False),
    ],
)
def test_steps_that_are_missing_here_leave_the_images_to_pillow(augmentation, supported):
    assert (batch_augmentation(INFO, (32, 32), augmentation) is not None) == supported


def test_the_cpu_keeps_its_draws_and_a_gpu_augments_the_stored_images(monkeypatch):
    augmentation = Augmentation(scale=(0.5, 1.0), rand_augment="rand-m9-mstd0.5-inc1", erasing=0.25)
    data = DataModule("digits", size=(36, 36), augmentation=augmentation, limit_train=40, limit_test=20, batch_size=8)
    assert isinstance(data.train_batches(), ImageExamples)
    monkeypatch.setattr(AugmentedImages, "to", lambda self, device: self)  # there is no GPU
    ours = data.to(torch.device("cuda")).train_batches()
    assert isinstance(ours, AugmentedImages) and ours.tensors.shape == (40, 1, 28, 28)
    images, labels = ours[BatchIndices(np.arange(8), 0)]
    assert images.shape == (8, 1, 36, 36) and torch.isfinite(images).all() and labels.shape == (8,)
