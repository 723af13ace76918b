"""The gym: labels follow from the images, splits share no image, and without position every model is at chance."""

import dataclasses

import numpy as np
import pytest
import torch

import graticule
from graticule.lab.data.registry import load_dataset
from graticule.lab.data.sets.gym import COUNTS, DISTRACTED, GLYPHS, draw
from graticule.lab.recipes.load import load_recipe
from graticule.lab.training.loop import train
from graticule.lab.training.run import Run
from in_turn import in_turn

CLASSES = {"place": 9, "border": 2, "symmetry": 2, "order": 2, "region": 5}
CLASSES |= {"neighbors": 4, "displacement": 8, "direction": 4, "distance": 3, "scale": 3}


def marks(pixels, glyph):
    """Return the coordinates (row, column) of the cells of an image, 24 x 24 bytes, that show a glyph."""
    cells = (pixels.astype(int).reshape(6, 4, 6, 4).swapaxes(1, 2) - 128) / 127
    return [tuple(map(int, place)) for place in np.argwhere((cells == GLYPHS[glyph]).all((2, 3)))]


def answer(task, first, second):
    """Return the class of an image by the coordinates of its marks A and B, in plain arithmetic."""
    (y, x), *others = first
    if task == "place":
        return 3 * (y // 2) + x // 2
    if task == "border":
        return int(y in (0, 5) or x in (0, 5))
    if task == "symmetry":
        return int(y == others[0][0] and x + others[0][1] == 5)
    if task == "region":
        return sum(row < 3 for row, _ in first)
    if task == "scale":
        corners = {(y + down, x + right) for down in (0, others[-1][0] - y) for right in (0, others[-1][1] - x)}
        assert corners == set(first) and others[-1][0] - y == others[-1][1] - x
        return others[-1][0] - y - 1
    ((below, right),) = second
    if task == "neighbors":
        return sum(max(abs(row - below), abs(column - right)) == 1 for row, column in first)
    dy, dx = below - y, right - x
    if task == "order":
        return int((below, right) < (y, x))
    if task == "distance":
        return min(max(abs(dy), abs(dx)), 3) - 1
    way = [-dy, -dx, dx, dy].index(max(-dy, -dx, dx, dy))  # above, left, right, below
    if task == "direction":
        return way
    assert min(abs(dy), abs(dx)) == 0
    return 2 * way + abs(dy + dx) - 1


@in_turn("task", CLASSES)
def test_labels_follow_from_the_marks_that_the_images_show(task):
    images, info = load_dataset(f"gym_{task}", "test")
    assert (info.size, info.channels, info.num_classes) == ((24, 24), 1, CLASSES[task])
    for pixels, label in zip(images.images, images.labels, strict=True):
        assert answer(task, marks(pixels, 1), marks(pixels, 2)) == label


@in_turn("task", CLASSES)
def test_no_image_is_in_both_splits_or_twice_in_one_and_classes_are_equally_frequent(task):
    splits = {split: load_dataset(f"gym_{task}", split)[0] for split in COUNTS}
    for split, images in splits.items():
        assert len(images) == COUNTS[split]
        assert set(np.bincount(images.labels)) == {COUNTS[split] // CLASSES[task]}
    assert len({pixels.tobytes() for images in splits.values() for pixels in images.images}) == sum(COUNTS.values())


@in_turn("task", CLASSES)
def test_images_of_a_group_have_the_same_patches_and_one_of_each_class(task):
    symbols, labels = draw(f"gym_{task}", "train")
    patches = np.sort(symbols.reshape(-1, CLASSES[task], 36))
    assert (patches == patches[:, :1]).all() and (labels.reshape(-1, CLASSES[task]) == range(CLASSES[task])).all()
    assert ((symbols > 2).sum((1, 2)) == DISTRACTED).all()
    shown = np.bincount(symbols.ravel(), minlength=6)[3:] / (symbols > 2).sum()
    np.testing.assert_allclose(shown, 1 / 3, atol=0.03)  # thousands of draws


@in_turn("task", CLASSES)
def test_a_vit_without_position_is_exactly_at_chance_and_one_with_position_is_not_bound_to_it(task):
    images, _ = load_dataset(f"gym_{task}", "test")
    values = (torch.from_numpy(images.images)[:, None].double() - 128) / 127
    small = {"img_size": 24, "in_chans": 1, "embed_dim": 12, "depth": 1, "num_heads": 2, "num_classes": CLASSES[task]}
    logits = {}
    for encoding in ("none", "learnable(std=1)"):
        model = graticule.create_model("vit_nano_patch4_28", encoding=encoding, **small).double().eval()
        torch.nn.init.normal_(model.get_classifier().weight)
        with torch.no_grad():
            logits[encoding] = model(values).unflatten(0, (-1, CLASSES[task]))  # a group of images, one of each class
    spread = {encoding: (values - values[:, :1]).abs().amax() for encoding, values in logits.items()}
    assert spread["none"] < 1e-12 and spread["learnable(std=1)"] > 1e-6
    right = logits["none"].flatten(0, 1).argmax(1) == torch.from_numpy(images.labels)
    assert right.double().mean().item() == pytest.approx(1 / CLASSES[task], abs=1e-12)


def test_the_recipe_trains_on_another_data_set_of_the_gym(tmp_path):
    recipe = dataclasses.replace(load_recipe("gym"), dataset="gym_region").quick()
    run = train(recipe, tmp_path / "run", progress=False)
    assert run.finished and Run.open(run.folder).described()["class_names"] == tuple("01234")
