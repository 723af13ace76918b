import gzip
import struct

import numpy as np
import pytest

from graticule.lab.data.registry import load_dataset

TRAIN = np.arange(6 * 28 * 28, dtype=np.int64).astype(np.uint8).reshape(6, 28, 28)
LABELS = np.array([0, 9, 3, 3, 1, 7], np.uint8)


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write(folder, packed):
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        "train-images-idx3-ubyte": TRAIN,
        "train-labels-idx1-ubyte": LABELS,
        "t10k-images-idx3-ubyte": TRAIN[:2],
        "t10k-labels-idx1-ubyte": LABELS[:2],
    }
    for name, array in arrays.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("below", [".", "FashionMNIST/raw"])
def test_the_files_are_read_as_written_packed_or_not_in_either_place(tmp_path, packed, below):
    write(tmp_path / below, packed)
    train, info = load_dataset("fashion_mnist", "train", tmp_path)
    test, _ = load_dataset("fashion_mnist", "test", tmp_path)
    assert (len(train), len(test), info.num_classes, info.channels) == (6, 2, 10, 1)
    for index in range(6):
        image, label = train[index]
        np.testing.assert_array_equal(np.asarray(image), TRAIN[index])
        assert label == LABELS[index]


def test_the_folder_that_the_environment_names_is_looked_at(tmp_path, monkeypatch):
    write(tmp_path, packed=True)
    monkeypatch.setenv("GRATICULE_DATA", str(tmp_path))
    assert len(load_dataset("fashion_mnist", "train")[0]) == 6


def test_a_root_without_the_files_is_refused_with_the_folders_that_were_searched(tmp_path):
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist") as caught:
        load_dataset("fashion_mnist", "train", tmp_path)
    assert str(tmp_path / "FashionMNIST" / "raw") in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>not found</html>", idx(TRAIN)[:-1], idx(TRAIN) + b"0", idx(LABELS)],
    ids=["empty", "page", "short", "long", "labels"],
)
@pytest.mark.parametrize("packed", [True, False])
def test_a_damaged_file_is_refused_by_name(tmp_path, content, packed):
    write(tmp_path, packed)
    name = "train-images-idx3-ubyte" + (".gz" if packed else "")
    (tmp_path / name).write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(ValueError, match=name):
        load_dataset("fashion_mnist", "train", tmp_path)


def test_a_truncated_archive_is_refused_by_name(tmp_path):
    write(tmp_path, packed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=path.name):
        load_dataset("fashion_mnist", "train", tmp_path)


@pytest.mark.parametrize("labels", [LABELS[:5], np.full(6, 10, np.uint8)], ids=["too few", "out of range"])
def test_labels_that_do_not_fit_the_images_are_refused(tmp_path, labels):
    write(tmp_path, packed=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(labels))
    with pytest.raises(ValueError, match="labels"):
        load_dataset("fashion_mnist", "train", tmp_path)
