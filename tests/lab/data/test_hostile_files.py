"""Pipes, devices, circular links and absurd numbers in data are refused by name, before they take time or memory."""

import gzip
import inspect
import os
import pickle
import struct
import sys

import numpy as np
import pytest
from PIL import Image
from test_cifar import batch
from test_cifar import write as write_cifar
from test_fashion_mnist_files import write as write_fashion

from graticule.lab.data.registry import load_dataset, load_text
from graticule.lab.data.sets.cifar import read_pickle
from image_files import write_folder


def pipe(path):
    os.mkfifo(path)


def device(path):
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero


def loop(path):
    path.symlink_to(path.name)


def nowhere(path):
    path.symlink_to("nothing")


SPECIAL = {
    "pipe": (pipe, "got a pipe"),
    "loop": (loop, "link that leads nowhere"),
    "nowhere": (nowhere, "link that leads nowhere"),
}
if hasattr(os, "geteuid") and os.geteuid() == 0:
    SPECIAL["device"] = (device, "got a device")


def write_texts(root):
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        (root / split / "a.txt").write_text(f"some text for {split}")
    return root


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    ("write", "load", "where"),
    [
        (write_folder, lambda root: load_dataset("image_folder", "train", root), "train/cat/x.png"),
        (write_folder, lambda root: load_dataset("image_folder", "train", root), "val/dog/below/x.JPEG"),
        (write_texts, lambda root: load_text("text_folder", root), "train/x.txt"),
    ],
    ids=["image", "image below", "text"],
)
def test_pipes_devices_and_circular_links_are_refused_by_name_before_they_are_opened(
    tmp_path, kind, write, load, where
):
    root, (make, match) = write(tmp_path / "root"), SPECIAL[kind]
    load(root)
    (root / where).parent.mkdir(exist_ok=True)
    make(root / where)
    with pytest.raises(ValueError, match=match) as caught:
        load(root)
    assert str(root / where) in str(caught.value)


@pytest.mark.parametrize("kind", [name for name in SPECIAL if name != "nowhere"])
def test_published_files_must_be_plain(tmp_path, kind):
    make, _ = SPECIAL[kind]
    write_fashion(tmp_path, packed=False)
    for name in ("t10k-labels-idx1-ubyte", "t10k-labels-idx1-ubyte.gz"):
        (tmp_path / name).unlink(missing_ok=True)
        make(tmp_path / name)
    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte.* plain file"):
        load_dataset("fashion_mnist", "test", tmp_path)
    batch = write_cifar(tmp_path, "cifar10") / "test_batch"
    batch.unlink()
    make(batch)
    with pytest.raises(ValueError, match="test_batch must be a plain file"):
        load_dataset("cifar10", "test", tmp_path)


def test_a_class_that_is_a_circular_link_is_refused(tmp_path):
    root = write_folder(tmp_path)
    loop(root / "train" / "bird")
    loop(root / "val" / "bird")
    with pytest.raises(ValueError, match=r"train/bird must be .* leads nowhere, to bird"):
        load_dataset("image_folder", "train", root)


def test_a_folder_deeper_than_python_calls_go_is_read(tmp_path):
    root = write_folder(tmp_path)
    (root / "train" / "cat").joinpath(*["d"] * 300).mkdir(parents=True)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)
    try:
        assert len(load_dataset("image_folder", "train", root)[0]) == 6
    finally:
        sys.setrecursionlimit(limit)


def test_a_file_that_is_too_large_for_an_image_is_not_read(tmp_path):
    root = write_folder(tmp_path)
    os.truncate(root / "val" / "cat" / "0.JPEG", 1 << 40)  # sparse
    images, _ = load_dataset("image_folder", "test", root)
    with pytest.raises(ValueError, match=r"0\.JPEG must have at most"):
        images[0]


def test_a_file_that_is_too_large_for_a_text_is_not_read(tmp_path):
    os.truncate(write_texts(tmp_path) / "train" / "a.txt", 1 << 40)
    with pytest.raises(ValueError, match=r"a\.txt must have at most"):
        load_text("text_folder", tmp_path)


def test_a_broken_image_is_named_without_an_address_in_memory(tmp_path):
    root = write_folder(tmp_path)
    (root / "val" / "cat" / "0.JPEG").write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match=r"0\.JPEG cannot be used \(Pillow cannot identify it") as caught:
        load_dataset("image_folder", "test", root)[0][0]
    assert "BytesIO" not in str(caught.value)


@pytest.mark.parametrize(("width", "height"), [(501, 1), (2, 1001), (65_000, 100)])
def test_an_image_that_resizing_would_make_huge_is_broken(tmp_path, width, height):
    """With its shorter side at 256 pixels, an image of 65,000 x 1 has 4 billion pixels."""
    root = write_folder(tmp_path)
    for split in ("train", "val"):
        Image.new("RGB", (width, height)).save(root / split / "cat" / "0.JPEG")
    with pytest.raises(ValueError, match=rf"at most 500 times as long as wide, got {width} x {height} pixels"):
        load_dataset("image_folder", "test", root)[0][0]
    train, _ = load_dataset("image_folder", "train", root)
    assert train[0][1] == 0 and [path.name for path in train.skipped] == ["0.JPEG"]
    Image.new("RGB", (500, 1)).save(root / "val" / "cat" / "0.JPEG")
    assert load_dataset("image_folder", "test", root)[0][0][0].size == (500, 1)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", [(2**32 - 1,) * 3, (2**31, 2**31, 4), (2**22, 2**21, 2**21), (6, 28, 2**31)], ids=str)
def test_absurd_sizes_in_an_idx_file_are_refused_by_name(tmp_path, shape, packed):
    """The product of the second and third is 2**64, which is 0 in 64 bits."""
    write_fashion(tmp_path, packed)
    content = bytes([0, 0, 8, 3]) + struct.pack(">3I", *shape)
    name = "train-images-idx3-ubyte" + (".gz" if packed else "")
    (tmp_path / name).write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(ValueError, match=rf"{name} must have at most 268,435,456 values"):
        load_dataset("fashion_mnist", "train", tmp_path)


def test_a_gzipped_file_that_unpacks_to_more_than_its_header_says_is_not_unpacked(tmp_path):
    write_fashion(tmp_path, packed=True)
    name = "train-images-idx3-ubyte.gz"
    (tmp_path / name).write_bytes(gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">3I", 6, 28, 28) + bytes(1 << 27)))
    with pytest.raises(ValueError, match=r"damaged: more bytes where \(6, 28, 28\) asks for 4,704"):
        load_dataset("fashion_mnist", "train", tmp_path)


def python_2(pixels):
    """Pickle a batch like Python 2 and its NumPy: byte strings, the old names."""

    def string(text):
        return b"T" + struct.pack("<I", len(text)) + text

    shape = b"(" + b"".join(b"J" + struct.pack("<i", side) for side in pixels.shape) + b"t"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01" + shape
    array += b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    array += string(pixels.tobytes()) + b"tb"
    labels = b"](" + b"".join(b"K%c" % (n % 10) for n in range(len(pixels))) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + labels + b"u."


def test_a_batch_of_python_2_is_read_as_numpy_reads_it(tmp_path):
    path, pixels = tmp_path / "batch", np.random.RandomState(0).randint(0, 256, (4, 3072)).astype(np.uint8)
    path.write_bytes(python_2(pixels))
    assert np.array_equal(pickle.loads(path.read_bytes(), encoding="bytes")[b"data"], pixels)
    found = read_pickle(path)
    assert np.array_equal(found["data"], pixels) and found["labels"] == [0, 1, 2, 3]


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_an_array_in_the_order_of_fortran_is_read_as_numpy_reads_it(tmp_path, protocol):
    path, pixels = tmp_path / "batch", np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    path.write_bytes(pickle.dumps({b"data": pixels}, protocol))
    assert np.array_equal(read_pickle(path)["data"], pixels)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a memo with 2**31 values
        b"}p2147483647\n.",
        b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".",  # a string of 2**62 bytes
        b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"}.",  # a frame
        b"\x80\x02\x8b\xff\xff\xff\x7f.",  # a number of 2**31 bytes
        pickle.dumps(batch("cifar10", 0) | {b"data": np.zeros((4, 3072))}, 2),
        pickle.dumps(batch("cifar10", 0) | {b"data": np.array([[]] * 4, object)}, 2),
        pickle.dumps(batch("cifar10", 0) | {b"data": [[0] * 3072] * 4}, 2),
        pickle.dumps(batch("cifar10", 0) | {b"labels": [0, 1, 2, 10**30]}, 2),
        pickle.dumps(batch("cifar10", 0) | {b"labels": [0.5] * 4}, 2),
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(J\xff\xff\xff\x7ftU\x01btR.",
        b"\x80\x02cnumpy\ndtype\n(X\x01\x00\x00\x00OtR.",
        b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00hextR.",
        b"\x80\x02}(t" + b"\x85" * 50_000 + b"K\x01s.",  # tuples within tuples, to be hashed
        b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    ],
)
def test_an_absurd_pickle_is_refused_by_name(tmp_path, content):
    (write_cifar(tmp_path, "cifar10") / "test_batch").write_bytes(content)
    with pytest.raises(ValueError, match="test_batch"):
        load_dataset("cifar10", "test", tmp_path)


def test_names_of_classes_in_cifar_must_be_names_and_as_many_as_there_are_classes(tmp_path):
    meta = write_cifar(tmp_path, "cifar10") / "batches.meta"
    for wrong in (["cat"], ["cat"] * 10, list(range(10)), "abcdefghij"):
        meta.write_bytes(pickle.dumps({b"label_names": wrong}, 2))
        with pytest.raises(ValueError, match=r"batches\.meta must have 10 different names"):
            load_dataset("cifar10", "test", tmp_path)
