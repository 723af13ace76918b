import os
import pickle

import numpy as np
import pytest

from graticule.lab.data.registry import load_dataset

FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
PARTS = {
    "cifar10": [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"],
    "cifar100": ["train", "test"],
}


def batch(name, start):
    pixels = np.random.RandomState(start).randint(0, 256, (4, 3072)).astype(np.uint8)
    labels = [(start * 4 + n) % (10 if name == "cifar10" else 100) for n in range(4)]
    content = {b"batch_label": b"a batch", b"data": pixels, b"filenames": [b"a.png", b"b.png", b"c.png", b"d.png"]}
    if name == "cifar10":
        return content | {b"labels": labels}
    return content | {b"fine_labels": labels, b"coarse_labels": [0, 1, 2, 3]}


def write(root, name, protocol=2):
    folder = root / FOLDERS[name]
    folder.mkdir()
    for start, part in enumerate(PARTS[name]):
        (folder / part).write_bytes(pickle.dumps(batch(name, start), protocol))
    if name == "cifar10":
        meta, key, count = "batches.meta", b"label_names", 10
    else:
        meta, key, count = "meta", b"fine_label_names", 100
    (folder / meta).write_bytes(pickle.dumps({key: [f"class {n}".encode() for n in range(count)]}, protocol))
    return folder


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("protocol", [2, pickle.DEFAULT_PROTOCOL, 5])
def test_batches_give_the_images_in_order_row_by_row(tmp_path, name, protocol):
    folder = write(tmp_path, name, protocol)
    train, info = load_dataset(name, "train", tmp_path)
    test, _ = load_dataset(name, "test", folder)  # the folder itself works as well
    assert (len(train), len(test)) == (4 * (len(PARTS[name]) - 1), 4)
    assert (info.size, info.channels, info.num_classes) == ((32, 32), 3, 10 if name == "cifar10" else 100)
    assert info.class_names[3] == "class 3"
    for start in range(len(PARTS[name]) - 1):
        for n in range(4):
            image, label = train[4 * start + n]
            pixels = batch(name, start)[b"data"][n].reshape(3, 32, 32)  # red, green, blue, each row by row
            np.testing.assert_array_equal(np.asarray(image).transpose(2, 0, 1), pixels)
            assert label == (start * 4 + n) % info.num_classes


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("where", ["data_batch_3", "batches.meta"])
def test_a_pickle_that_would_run_code_is_refused_by_name_and_runs_none(tmp_path, protocol, where):
    folder, trace = write(tmp_path, "cifar10"), tmp_path / "trace"
    (folder / where).write_bytes(pickle.dumps(batch("cifar10", 0) | {b"more": Hostile(trace)}, protocol))
    with pytest.raises(ValueError, match=where):
        load_dataset("cifar10", "train", tmp_path)
    assert not trace.exists()
    pickle.loads((folder / where).read_bytes())  # it was hostile indeed
    assert trace.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"not a pickle", pickle.dumps([1, 2]), pickle.dumps({b"data": np.zeros((4, 3072), np.uint8)})],
    ids=["empty", "text", "list", "no labels"],
)
def test_a_damaged_batch_is_refused_by_name(tmp_path, content):
    (write(tmp_path, "cifar10") / "data_batch_2").write_bytes(content)
    with pytest.raises(ValueError, match="data_batch_2"):
        load_dataset("cifar10", "train", tmp_path)


def test_a_truncated_batch_is_refused_by_name(tmp_path):
    path = write(tmp_path, "cifar10") / "data_batch_2"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="data_batch_2"):
        load_dataset("cifar10", "train", tmp_path)


def test_a_label_out_of_range_is_refused(tmp_path):
    folder = write(tmp_path, "cifar10")
    wrong = batch("cifar10", 0) | {b"labels": [0, 1, 2, 10]}
    (folder / "test_batch").write_bytes(pickle.dumps(wrong, 2))
    with pytest.raises(ValueError, match="0 to 9"):
        load_dataset("cifar10", "test", tmp_path)


def test_a_missing_batch_is_named(tmp_path):
    (write(tmp_path, "cifar10") / "data_batch_4").unlink()
    with pytest.raises(FileNotFoundError, match="data_batch_4"):
        load_dataset("cifar10", "train", tmp_path)
