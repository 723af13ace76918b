"""Laws of transforms: the transformed truth is the truth of the transformed image, pixel by pixel."""

import colorsys

import numpy as np
import pytest
import torch
from torchvision import tv_tensors

from graticule.lab.data.augmentation import DenseAugmentation
from graticule.lab.data.dense import IGNORED, boxes_target
from graticule.lab.data.dense_transforms import (
    EvaluationTransform,
    TrainingTransform,
    crop_example,
    distorted,
    fit_size,
    flip,
    pad,
    resize_example,
)
from graticule.lab.data.sets.scenes import SIZE, scenes

#: Rectangles (left, top, right, bottom) in an image of 24 x 40.
BOXES = [[4, 2, 14, 10], [20, 6, 26, 18], [0, 0, 40, 24], [30, 20, 32, 22]]


def painted():
    """Return an image in which object n has the value n + 1, later ones on top, and its truth."""
    image = torch.zeros(3, 24, 40, dtype=torch.uint8)
    owner = torch.full((24, 40), -1)
    order = [2, 0, 1, 3]
    for n in order:
        left, top, right, bottom = BOXES[n]
        owner[top:bottom, left:right] = n
    image[:] = (owner + 1).to(torch.uint8)
    masks = torch.stack([owner == n for n in range(4)]).to(torch.uint8)
    target = boxes_target(np.array(BOXES), np.arange(4), (24, 40), 0)
    target["masks"] = tv_tensors.Mask(masks)
    target["classes"] = tv_tensors.Mask((owner + 1).to(torch.uint8))
    return tv_tensors.Image(image), target


def assert_truth_of(image, target):
    """Check that masks and classes match the pixels."""
    assert torch.equal(torch.as_tensor(target["classes"]), torch.as_tensor(image[0]))
    for label, mask in zip(target["labels"].tolist(), target["masks"], strict=True):
        assert torch.equal(torch.as_tensor(mask).bool(), torch.as_tensor(image[0] == label + 1))


def tight(masks):
    """Return the boxes of masks."""
    boxes = []
    for mask in masks:
        rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        boxes.append([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
    return torch.tensor(boxes, dtype=torch.float64)


def test_a_flip_flips_image_boxes_masks_and_classes_alike_and_twice_is_nothing():
    image, target = painted()
    there = flip(image, target)
    assert_truth_of(*there)
    assert there[1]["boxes"].tolist() == [[40 - b[2], b[1], 40 - b[0], b[3]] for b in BOXES]
    back = flip(*there)
    assert torch.equal(back[0], image) and torch.equal(back[1]["boxes"], target["boxes"])


@pytest.mark.parametrize("box", [(0, 0, 24, 40), (3, 5, 9, 21), (1, 18, 20, 22), (12, 0, 7, 40)])
def test_a_crop_applies_to_masks_and_boxes_and_drops_objects_outside_of_it(box):
    image, target = painted()
    small, changed = crop_example(image, target, box)
    assert small.shape[1:] == box[2:]
    assert_truth_of(small, changed)
    top, left, height, width = box
    expected = {
        n: [max(b[0] - left, 0), max(b[1] - top, 0), min(b[2] - left, width), min(b[3] - top, height)]
        for n, b in enumerate(BOXES)
    }
    inside = [n for n, b in expected.items() if b[2] > b[0] and b[3] > b[1]]
    assert changed["labels"].tolist() == inside
    assert changed["boxes"].tolist() == [expected[n] for n in inside]
    assert len(changed["area"]) == len(changed["iscrowd"]) == len(changed["masks"]) == len(inside)


@pytest.mark.parametrize("size", [(48, 80), (72, 40), (24, 120)])
def test_a_resize_by_whole_numbers_repeats_the_pixels_of_masks_and_multiplies_boxes(size):
    image, target = painted()
    large, changed = resize_example(image, target, size)
    down, right = size[0] // 24, size[1] // 40
    assert large.shape[1:] == size
    for name in ("masks", "classes"):
        repeated = torch.as_tensor(target[name]).repeat_interleave(down, -2).repeat_interleave(right, -1)
        assert torch.equal(torch.as_tensor(changed[name]), repeated)
    assert torch.equal(changed["boxes"].as_subclass(torch.Tensor), target["boxes"] * torch.tensor([right, down] * 2))
    assert torch.equal(tight(changed["masks"][[0, 1, 3]]), changed["boxes"][[0, 1, 3]].as_subclass(torch.Tensor))


def test_padding_is_at_the_bottom_and_on_the_right_and_its_classes_are_ignored():
    image, target = painted()
    large, changed = pad(image, target, (30, 41))
    assert large.shape == (3, 30, 41) and changed["masks"].shape == (4, 30, 41)
    assert torch.equal(large[:, :24, :40], image) and torch.equal(changed["boxes"], target["boxes"])
    outside = torch.ones(30, 41, dtype=torch.bool)
    outside[:24, :40] = False
    assert (changed["classes"][outside] == IGNORED).all() and not large[:, outside].any()


@pytest.mark.parametrize("size", [(480, 640), (640, 480), (333, 500), (100, 900), (7, 7)])
@pytest.mark.parametrize("within", [(800, 1333), (96, 96), (512, 2048)])
def test_an_image_is_fitted_as_large_as_it_can_be_at_its_aspect_ratio(size, within):
    height, width = fit_size(size, within)
    assert min(height, width) <= within[0] and max(height, width) <= within[1]
    assert min(height, width) == within[0] or max(height, width) == within[1]
    assert height / size[0] == pytest.approx(width / size[1], abs=1 / min(size))


def test_a_crop_larger_than_the_image_is_padded_and_the_rest_ignored():
    transform = TrainingTransform((24, 40), DenseAugmentation(crop=(32, 64)))
    image, target = transform(*painted())
    assert image.shape == (3, 32, 64) and (target["classes"][24:] == IGNORED).all()
    assert target["boxes"].tolist() == BOXES


def test_crops_avoid_one_class_that_fills_them_if_they_can():
    image, target = painted()
    target["classes"][:, 20:] = 1
    target["classes"][:, :20] = 2
    transform = TrainingTransform((24, 40), DenseAugmentation(crop=(8, 8), crop_majority=0.75))
    torch.manual_seed(0)
    shares = []
    for _ in range(40):
        classes = transform(image, dict(target))[1]["classes"]
        shares.append(float((classes == 1).float().mean()))
    mixed = sum(0.25 < share < 0.75 for share in shares)
    assert mixed > 20  # about 5 of 33 positions are mixed, and each is tried 11 times: 4 in 5


def test_detr_s_part_is_cut_before_the_resize():
    transform = TrainingTransform((800, 1333), DenseAugmentation(part=1.0))
    torch.manual_seed(0)
    target = boxes_target(np.array([[0, 0, 640, 480]]), np.zeros(1), (480, 640), 0)
    ratios = set()
    for _ in range(4):
        image, changed = transform(tv_tensors.Image(torch.zeros(3, 480, 640, dtype=torch.uint8)), dict(target))
        assert min(image.shape[1:]) == 800 or max(image.shape[1:]) == 1333
        assert changed["boxes"][0].tolist() == pytest.approx([0, 0, image.shape[2], image.shape[1]], abs=1e-3)
        ratios.add(round(image.shape[2] / image.shape[1], 2))
    assert len(ratios) > 1


def test_colors_are_distorted_as_in_mmsegmentation_and_channels_keep_their_order(monkeypatch):
    image = torch.randint(0, 256, (3, 6, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    image[:, 0, :3] = torch.tensor([0, 90, 255], dtype=torch.uint8)  # gray
    x = image.double() / 255

    def by_pixel(x, change):
        pixels = [colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*p))) for p in x.flatten(1).T.tolist()]
        return torch.tensor(pixels, dtype=torch.float64).T.unflatten(1, x.shape[1:])

    def turned(x):
        return by_pixel(x, lambda h, s, v: ((h + 0.06) % 1, s, v))

    bright, strong = (x + 0.6 * 32 / 255).clamp(0, 1), (1.3 * x).clamp(0, 1)
    saturated = by_pixel(x, lambda h, s, v: (h, min(1.3 * s, 1), v))
    yes, no, at = 0.0, 0.9, 0.8  # at: share of the range of a change
    cases = [  # contrast early; brightness; (contrast;) saturation; hue; (contrast)
        ((no, no, no, no, no), x),
        ((no, yes, at, no, no, no), bright),
        ((yes, no, yes, at, no, no), strong),
        ((no, no, no, no, yes, at), strong),
        ((no, no, yes, at, no, no), saturated),
        ((no, no, no, yes, at, no), turned(x)),
        ((yes, no, yes, at, no, yes, at), turned(strong)),
        ((no, no, no, yes, at, yes, at), (1.3 * turned(x)).clamp(0, 1)),
    ]
    for draws, expected in cases:
        numbers = iter(draws)
        monkeypatch.setattr("graticule.lab.data.dense_transforms._uniform", lambda numbers=numbers: next(numbers))
        torch.testing.assert_close(distorted(image).double(), expected, rtol=0, atol=1e-5)
        assert next(numbers, None) is None  # every draw is used


def test_evaluation_resizes_the_image_and_keeps_the_truth_of_the_original():
    image, target = painted()
    small, truth = EvaluationTransform((12, 20))(image, target)
    assert small.shape == (3, 12, 20) and truth["size"] == (24, 40)
    assert torch.equal(truth["boxes"], target["boxes"]) and truth["masks"].shape == (4, 24, 40)


def test_a_scene_is_a_function_of_its_index_and_its_target_has_the_visible_pixels():
    (train, _), (again, info), (test, _) = scenes("train"), scenes("train"), scenes("test")
    image, target = train[7]
    assert torch.equal(image, again[7][0]) and not torch.equal(image, test[7][0])
    assert image.shape == (3, *SIZE) and len(target["labels"]) >= 1
    assert torch.equal(tight(target["masks"]), target["boxes"].as_subclass(torch.Tensor))
    assert (target["masks"].sum(0) <= 1).all()  # a digit hides those below it
    classes = sum((label + 1) * mask.int() for label, mask in zip(target["labels"], target["masks"], strict=True))
    assert torch.equal(torch.as_tensor(target["classes"]).int(), torch.as_tensor(classes).int())
    assert info.pixel_names[0] == "background" and len(info.class_names) == 10
