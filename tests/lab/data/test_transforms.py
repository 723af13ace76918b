import dataclasses

import numpy as np
import pytest
import torch
from timm.data import create_transform, resolve_model_data_config
from timm.models import get_pretrained_cfg, list_pretrained

from graticule import create_model
from graticule.lab.data.augmentation import Augmentation
from graticule.lab.data.images import DatasetInfo
from graticule.lab.data.transforms import border_color, evaluation_transform, place, training_transform
from graticule.lab.training.opening import describe_model
from image_files import draw_image

FOLDER = DatasetInfo("image_folder", ("a", "b"), 3, None, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
NATIVE = dataclasses.replace(FOLDER, name="cifar10", size=(32, 32))
GREY = DatasetInfo("digits", ("0", "1"), 1, (28, 28), (0.1,), (0.3,))
EVERYTHING = Augmentation(
    random_crop_padding=4, hflip=0.5, rand_augment="rand-m9-mstd0.5-inc1", erasing=1.0, crop_pct=0.875
)


def image_of(info):
    height, width = info.size or (60, 75)
    image = draw_image(1, height, width)
    return image.convert("L") if info.channels == 1 else image


@pytest.mark.parametrize("info", [FOLDER, NATIVE, GREY], ids=lambda info: info.name)
@pytest.mark.parametrize("size", [(32, 32), (24, 40), (48, 28)])
def test_a_tensor_has_the_size_that_was_asked_for_height_first(info, size):
    choices = [
        Augmentation(),
        EVERYTHING,
        Augmentation(scale=(0.3, 1.0), hflip=1.0),
        Augmentation(color_jitter=0.4),
        Augmentation(scale=(0.3, 1.0), rand_augment="rand-m9-mstd0.5-inc1"),
    ]
    for augmentation in choices:
        for build in (training_transform, evaluation_transform):
            tensor = build(info, size, augmentation)(image_of(info))
            assert tensor.shape == (info.channels, *size)
            assert tensor.dtype == torch.float32


def test_an_image_of_native_size_is_normalised_and_nothing_else():
    image = image_of(GREY)
    tensor = evaluation_transform(GREY, (28, 28), Augmentation())(image)
    pixels = torch.from_numpy(np.asarray(image) / 255).float()
    torch.testing.assert_close(tensor[0], (pixels - 0.1) / 0.3)


def test_the_preprocessing_of_every_pretrained_model_of_timm_equals_timms():
    model, names = create_model("vit_nano_patch4_28", in_chans=3, img_size=32, depth=1), list_pretrained()
    keys = ("crop_mode", "crop_pct", "interpolation")
    configurations = {tuple(getattr(get_pretrained_cfg(name), key) for key in keys) for name in names}
    assert {mode for mode, *_ in configurations} == {"center", "squash", "border"} and len(configurations) > 40
    images = [draw_image(1, *size) for size in ((64, 160), (160, 64), (96, 96))]
    for values in configurations:
        model.pretrained_cfg = {
            **dict(zip(keys, values, strict=True)),
            "mean": FOLDER.mean,
            "std": FOLDER.std,
            "input_size": (3, 32, 32),
        }
        opened = describe_model("a model", model, "")
        ours = evaluation_transform(opened.images, opened.size, opened.augmentation)
        timms = create_transform(**resolve_model_data_config(model))
        for image in images:
            assert torch.equal(ours(image), timms(image)), values


def test_a_random_crop_is_the_image_shifted_by_at_most_the_padding():
    image = image_of(NATIVE)
    plain = evaluation_transform(NATIVE, (32, 32), Augmentation())(image)
    black = ((0 - torch.tensor(NATIVE.mean)) / torch.tensor(NATIVE.std))[:, None, None].expand(3, 40, 40).clone()
    black[:, 4:-4, 4:-4] = plain
    windows = [black[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    transform = training_transform(NATIVE, (32, 32), Augmentation(random_crop_padding=4))
    matches = []
    for _ in range(20):
        crop = transform(image)
        matches.append([i for i, window in enumerate(windows) if torch.allclose(window, crop)])
    assert all(len(fitting) == 1 for fitting in matches)
    assert len({fitting[0] for fitting in matches}) > 5


def test_random_interpolation_is_bilinear_or_bicubic():
    image = draw_image(3, 64, 64)
    uncropped = Augmentation(scale=(1.0, 1.0), ratio=(1.0, 1.0))

    def crop(**kwargs):
        return training_transform(FOLDER, (32, 32), dataclasses.replace(uncropped, **kwargs))(image)

    known = [crop(interpolation=name) for name in ("bilinear", "bicubic")]
    drawn = [crop(random_interpolation=True) for _ in range(30)]
    matches = [[torch.equal(image_drawn, other) for other in known] for image_drawn in drawn]
    assert all(sum(fitting) == 1 for fitting in matches)
    assert {fitting.index(True) for fitting in matches} == {0, 1}


def occurrences(image, canvas):
    """Return how often `image` occurs on `canvas`, pixel for pixel."""
    windows = canvas.unfold(1, image.shape[1], 1).unfold(2, image.shape[2], 1)
    return (windows == image[:, None, None]).all(dim=(-1, -2)).all(dim=0).sum().item()


def test_a_larger_canvas_has_the_image_once_and_its_border_color_elsewhere():
    image = torch.rand(3, 4, 6)
    canvas = place(image, (9, 8))
    assert canvas.shape == (3, 9, 8) and occurrences(image, canvas) == 1
    assert (canvas == border_color(image)[:, None, None]).all(dim=0).sum().item() >= 9 * 8 - 4 * 6
    image = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 100.0, 5.0], [6.0, 7.0, 7.0]]])
    assert border_color(image).item() == 4.0  # the lower median of 1 2 3 4 5 6 7 7


def test_a_smaller_canvas_is_a_crop_and_the_same_size_is_the_image():
    image = torch.rand(2, 8, 7)
    assert occurrences(place(image, (3, 5)), image) == 1
    assert torch.equal(place(image, (8, 7)), image)
    mixed = place(image, (3, 9))  # cropped along one axis, padded along the other
    assert mixed.shape == (2, 3, 9) and sum(occurrences(image[:, top : top + 3], mixed) for top in range(6)) == 1
