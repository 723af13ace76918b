"""Operations on batches of images equal Pillow's, as timm calls them, image by image."""

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import NAME_TO_OP
from torchvision.transforms.functional import InterpolationMode, resized_crop

from graticule.lab.data.device_transforms import MATRICES
from graticule.lab.data.image_operations import PIXEL_OPERATIONS, affine, crop

#: Arguments of each operation, with the ends of the ranges of RandAugment.
ARGUMENTS = {
    **dict.fromkeys(("AutoContrast", "Equalize", "Invert"), (None,)),
    "Posterize": (0, 1, 3, 4, 8),
    "Solarize": (0, 1, 26, 128, 255, 256),
    "SolarizeAdd": (0, 1, 55, 99, 110),
    **dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), (0.0, 0.1, 0.37, 1.0, 1.234567, 1.9)),
    "Rotate": (-30.0, -7.3, 0.0, 0.01, 12.0, 30.0),
    **dict.fromkeys(("ShearX", "ShearY"), (-0.3, -0.11, 0.0, 0.2, 0.3)),
    **dict.fromkeys(("TranslateXRel", "TranslateYRel"), (-0.45, -0.25, 0.0, 0.1, 0.45)),
}


def images_of(channels, size=(12, 17)):
    """Return noise, smooth images, an almost constant one, a constant one, and one of two levels: (6, C, H, W)."""
    generator = np.random.default_rng(0)
    noise = generator.integers(256, size=(2, channels, *size))
    ramp = np.linspace(20, 230, size[0] * size[1]).reshape(1, 1, *size).repeat(channels, 1)
    almost = np.full((1, channels, *size), 77)
    almost[..., 3, 4] = 80
    levels = 40 + 170 * generator.integers(2, size=(1, channels, *size))
    images = [noise, ramp, almost, np.full((1, channels, *size), 255), levels]
    return torch.from_numpy(np.concatenate(images).astype(np.uint8))


def pillow(image):
    return Image.fromarray(image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).numpy())


def tensor(image):
    return torch.from_numpy(np.array(image)).reshape(image.height, image.width, -1).permute(2, 0, 1)


def difference(ours, expected):
    return int((ours.int() - torch.stack(expected).int()).abs().max())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", PIXEL_OPERATIONS)
def test_an_operation_on_pixels_equals_that_of_pillow(name, channels):
    images = images_of(channels)
    for argument in ARGUMENTS[name]:
        arguments = () if argument is None else (argument,)
        ours = PIXEL_OPERATIONS[name](images, torch.tensor(arguments or (0,), dtype=torch.float64).expand(len(images)))
        expected = [tensor(NAME_TO_OP[name](pillow(image), *arguments)) for image in images]
        assert ours.dtype == torch.uint8 and difference(ours, expected) == 0, argument


def test_arguments_belong_to_images():
    images = images_of(3)
    factors = torch.linspace(0.1, 1.9, len(images), dtype=torch.float64)
    for operation in (PIXEL_OPERATIONS[name] for name in ("Color", "Contrast", "Sharpness")):
        single = [operation(image[None], factor[None])[0] for image, factor in zip(images, factors, strict=True)]
        assert difference(operation(images, factors), single) == 0


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("cubic", [False, True])
@pytest.mark.parametrize("name", MATRICES)
def test_a_geometric_operation_is_within_one_gray_level_of_that_of_pillow(name, cubic, channels):
    images, fill = images_of(channels), (125, 123, 114)[:channels]
    resample = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    for argument in ARGUMENTS[name]:
        matrix = torch.from_numpy(MATRICES[name](np.full(len(images), argument), images.shape[2:]))
        ours = affine(images, matrix, torch.full((len(images),), cubic), torch.tensor(fill, dtype=torch.uint8))
        options = {"fillcolor": fill if channels == 3 else fill[0], "resample": resample}
        expected = [tensor(NAME_TO_OP[name](pillow(image), argument, **options)) for image in images]
        assert difference(ours, expected) <= 1, argument
        assert (ours != torch.stack(expected)).float().mean() < 0.002, argument


@pytest.mark.parametrize("size", [(12, 17), (9, 20), (5, 6)])
@pytest.mark.parametrize("cubic", [False, True])
def test_a_resized_crop_equals_that_of_pillow(cubic, size):
    images = images_of(3)
    boxes = torch.tensor([(0, 0, 12, 17), (1, 2, 10, 13), (3, 0, 9, 11), (0, 5, 12, 12), (4, 4, 3, 2), (2, 1, 7, 16)])
    ours = crop(images, boxes, torch.full((len(images),), cubic), size)
    mode = InterpolationMode.BICUBIC if cubic else InterpolationMode.BILINEAR
    expected = [
        tensor(resized_crop(pillow(image), *box, size, mode)) for image, box in zip(images, boxes.tolist(), strict=True)
    ]
    assert difference(ours, expected) == 0
