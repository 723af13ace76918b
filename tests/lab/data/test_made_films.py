"""Films and volumes that are made as they are read; the class is in the arrangement of their frames or cubes."""

from itertools import product

import numpy as np
import pytest
import torch

import graticule
from graticule.lab.data.augmentation import Augmentation
from graticule.lab.data.module import DataModule
from graticule.lab.data.registry import load_dataset
from graticule.lab.data.sets.films import FRAMES, MOTIONS, SHAPES, SOLID_CELLS, VOXELS
from in_turn import in_turn

NAMES = ("moving_digits", "moving_digits_order", "solids")


def frames_of(film):
    return sorted(frame.tobytes() for frame in film)


@in_turn("name", NAMES)
def test_a_set_is_a_function_of_split_and_index_and_its_classes_are_balanced(name):
    (train, info), (again, _), (test, _) = (load_dataset(name, split) for split in ("train", "train", "test"))
    film, label = train[5]
    assert film.shape == info.size and film.dtype == np.uint8 and label == train.labels[5]
    assert np.array_equal(film, again[5][0]) and not np.array_equal(film, test[5][0])
    counts = np.bincount(train.labels)
    assert len(counts) == info.num_classes and counts.min() == counts.max()
    shown = np.stack([train[index][0] for index in range(0, len(train), 7)]) / 255
    assert abs(shown.mean() - info.mean[0]) < 0.01 and abs(shown.std() - info.std[0]) < 0.01


@in_turn(("name", "classes"), [("moving_digits", 4), ("moving_digits_order", 2)])
def test_the_films_of_a_group_have_the_same_frames_in_different_orders(name, classes):
    films, _ = load_dataset(name, "test")
    for group in range(0, 40, classes):
        shown = [films[index][0] for index in range(group, group + classes)]
        assert [films[index][1] for index in range(group, group + classes)] == list(range(classes))
        assert len({bytes(b"".join(frames_of(film))) for film in shown}) == 1
        assert len({film.tobytes() for film in shown}) == classes


def test_a_digit_moves_once_or_twice_forward_or_back():
    films, info = load_dataset("moving_digits", "train")
    for index in range(16):
        film, label = films[index]
        starts = [np.argwhere(frame).min(0) for frame in film]
        cells = np.array([(start - starts[list(MOTIONS.values())[label].index(0)]) // 8 for start in starts])
        assert tuple(cells.max(1)) == MOTIONS[info.class_names[label]] and len(cells) == FRAMES


def test_the_larger_digit_is_in_the_first_half_of_even_films():
    films, _ = load_dataset("moving_digits_order", "train")
    digits, _ = load_dataset("digits", "train")
    ink = {
        np.pad(image.reshape(14, 2, 14, 2).mean((1, 3)).round().astype(np.uint8), 1).tobytes(): label
        for image, label in zip(digits.images, digits.labels, strict=True)
    }
    for index in range(20):
        film, label = films[index]
        seen = []
        for frame in film:
            window = next(
                frame[y : y + 16, x : x + 16]
                for y, x in product((0, 8, 16), repeat=2)
                if frame[y : y + 16, x : x + 16].sum() == frame.sum()
                and np.ascontiguousarray(frame[y : y + 16, x : x + 16]).tobytes() in ink
            )
            seen.append(ink[np.ascontiguousarray(window).tobytes()])
        assert len(set(seen[:3])) == len(set(seen[3:])) == 1 and (seen[0] < seen[3]) == bool(label)


def test_a_volume_shows_its_solid_in_whole_cells():
    volumes, info = load_dataset("solids", "train")
    assert info.num_classes == 6 and all(np.prod(sides) == 4 for sides in SHAPES.values())
    for index in range(18):
        volume, label = volumes[index]
        means = volume.reshape(SOLID_CELLS, VOXELS, SOLID_CELLS, VOXELS, SOLID_CELLS, VOXELS).mean((1, 3, 5))
        cells = np.argwhere(means > 70)
        assert len(cells) == 4 and tuple(np.ptp(cells, axis=0) + 1) == SHAPES[info.class_names[label]]
        assert means[means > 70].std() < 5  # cubes of one brightness


@torch.no_grad()
def test_a_model_without_position_is_right_in_one_of_four_films():
    data = DataModule("moving_digits", size=(6, 32, 32), limit_test=None)
    data.setup()
    images, labels = data.test_images((6, 32, 32), range(40))
    model = graticule.create_model(
        "vit_nano_patch4_28",
        img_size=(6, 32, 32),
        patch_size=(1, 8, 8),
        in_chans=1,
        num_classes=4,
        encoding="none",
        depth=2,
    )
    logits = model.double().eval()(images.double())
    same = logits.unflatten(0, (10, 4))
    torch.testing.assert_close(same, same[:, :1].expand_as(same), rtol=0, atol=1e-12)
    assert int((same.mean(1)[:, None].expand_as(same).flatten(0, 1).argmax(-1) == labels).sum()) == 10


@in_turn("workers", [0, 1])
def test_batches_are_the_films_normalized_in_memory_or_by_workers(workers, monkeypatch):
    if workers:
        monkeypatch.setattr("graticule.lab.data.module._IN_MEMORY_BYTES", 0)
    data = DataModule("moving_digits", size=(6, 32, 32), batch_size=8, limit_train=16, limit_test=8)
    data.setup()
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (8, 1, 6, 32, 32) and images.dtype == torch.float32 and labels.shape == (8,)
    test, _ = next(iter(data.eval_dataloader((6, 32, 32))))
    film, _ = load_dataset("moving_digits", "test")[0][0]
    expected = (torch.from_numpy(film).float() / 255 - data.info.mean[0]) / data.info.std[0]
    assert any(torch.equal(one[0], expected) for one in test)
    larger, _ = next(iter(data.eval_dataloader((12, 64, 32))))
    assert larger.shape == (8, 1, 12, 64, 32)


def test_what_films_cannot_have_is_refused():
    data = DataModule("solids", size=(20, 20, 20), augmentation=Augmentation(hflip=0.5), limit_train=8, batch_size=4)
    data.setup()
    with pytest.raises(ValueError, match="`augmentation` must be off for films and volumes"):
        data.train_dataloader()
    with pytest.raises(
        ValueError, match="`img_size` must be height and width, such as 64 64, or depth, height and width"
    ):
        graticule.Recipe(img_size=(32,))
    with pytest.raises(ValueError, match="DEPTHxHEIGHTxWIDTH, such as 224 or 8x320x224"):
        graticule.Recipe(img_size=(6, 32, 32), train_sizes=("32x32",))
