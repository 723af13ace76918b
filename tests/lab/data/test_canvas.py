"""On a canvas the content keeps its scale; only the area around it changes."""

import torch

from graticule.lab.data.transforms import border_color, place


def occurrences(image, canvas):
    """Return how often `image` occurs on `canvas`, pixel for pixel."""
    windows = canvas.unfold(1, image.shape[1], 1).unfold(2, image.shape[2], 1)
    return (windows == image[:, None, None]).all(dim=(-1, -2)).all(dim=0).sum().item()


def test_a_larger_canvas_holds_the_image_once_and_its_border_color_elsewhere():
    image = torch.rand(3, 4, 6)
    canvas = place(image, (9, 8))
    assert canvas.shape == (3, 9, 8) and occurrences(image, canvas) == 1
    filled = (canvas == border_color(image)[:, None, None]).all(dim=0).sum().item()
    assert filled >= 9 * 8 - 4 * 6


def test_the_border_color_is_the_median_of_the_outermost_pixels():
    image = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 100.0, 5.0], [6.0, 7.0, 7.0]]])
    assert border_color(image).item() == 4.0  # the lower median of 1 2 3 4 5 6 7 7


def test_a_smaller_canvas_is_a_crop_and_the_same_size_is_the_image():
    image = torch.rand(2, 8, 7)
    assert occurrences(place(image, (3, 5)), image) == 1
    assert torch.equal(place(image, (8, 7)), image)
    mixed = place(image, (3, 9))  # cropped along one axis, padded along the other
    assert mixed.shape == (2, 3, 9) and sum(occurrences(image[:, top : top + 3], mixed) for top in range(6)) == 1
