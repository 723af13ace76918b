"""Damaged data of every kind: an error that names the file, or a correct result; no other error and no hang."""

import gzip
import io
import json
import os
import pickle
import struct
import tarfile
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fuzz import JSON, SCALARS, edited, fuzzed, outcome
from graticule.data import BytePairTokenizer, load_dataset, load_text
from graticule.data.byte_pickle import read_pickle
from graticule.data.encoded import EncodedImages
from graticule.data.fashion_mnist import read_idx
from graticule.data.hugging_face import read_plan
from graticule.data.pack import pack
from graticule.data.tars import class_names, read_tar, tar_files
from graticule.data.text import read_utf8

PIXELS = np.random.RandomState(0).randint(0, 256, (3, 4, 5)).astype(np.uint8)
IDX = bytes([0, 0, 8, 3]) + struct.pack(">3I", *PIXELS.shape) + PIXELS.tobytes()
BATCH = {b"data": PIXELS.reshape(3, 20), b"labels": [0, 1, 2], b"filenames": [b"a.png", b"b.png", b"c.png"]}

#: A name for which GNU and POSIX tars have special headers.
LONG = "d" * 60 + "/" + "b" * 60


def encoded(kind, **options):
    content = io.BytesIO()
    Image.fromarray(np.random.RandomState(1).randint(0, 256, (12, 9, 3)).astype(np.uint8)).save(
        content, kind, **options
    )
    return content.getvalue()


def tar(style):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=style) as file:
        for name, member in (
            ("a.png", encoded("PNG")),
            ("a.cls", b"0"),
            (f"{LONG}.jpg", b"123"),
            (f"{LONG}.cls", b"1"),
        ):
            header = tarfile.TarInfo(name)
            header.size = len(member)
            file.addfile(header, io.BytesIO(member))
    return content.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@given(content=edited(IDX, header=16))
@fuzzed(30)
def test_an_idx_file(folder, content):
    for name, stored in (("images", content), ("images.gz", gzip.compress(content))):
        (folder / name).write_bytes(stored)
        found = outcome(lambda name=name: read_idx(folder / name, 3), names=name)
        if not isinstance(found, ValueError):
            assert found.shape == struct.unpack(">3I", content[4:16]) and found.tobytes() == content[16:]


@given(content=edited(gzip.compress(IDX, mtime=0), header=20))
@fuzzed(12)
def test_a_gzipped_idx_file(folder, content):
    (folder / "packed.gz").write_bytes(content)
    found = outcome(lambda: read_idx(folder / "packed.gz", 3), names="packed.gz")
    assert isinstance(found, ValueError) or found.size == prod(found.shape)


@given(content=st.one_of(*(edited(pickle.dumps(BATCH, protocol), header=300) for protocol in (0, 2, 4, 5))))
@fuzzed(60)
def test_a_pickle_of_arrays(folder, content):
    (folder / "batch").write_bytes(content)
    found = outcome(lambda: read_pickle(folder / "batch"), names="batch")
    if isinstance(found, dict):
        arrays = [value for value in found.values() if isinstance(value, np.ndarray)]
        assert all(array.dtype == np.uint8 and array.nbytes <= len(content) for array in arrays)


@given(
    content=st.one_of(
        *(edited(tar(style), header=600) for style in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    )
)
@fuzzed(40)
def test_the_headers_of_a_tar(folder, content):
    (folder / "0.tar").write_bytes(content)
    found = outcome(lambda: read_tar(folder / "0.tar"), names="0.tar")
    if not isinstance(found, ValueError):
        assert found and all(0 <= image.size <= len(content) - image.offset for image in found)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    root = tmp_path_factory.mktemp("arrow")
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (root / "folder" / split / name).mkdir(parents=True)
            for number in range(3):
                (root / "folder" / split / name / f"{number}.png").write_bytes(encoded("PNG"))
    pack(root / "folder", root / "packed", progress=False)
    (root / "packed" / "pack.json").unlink()  # as saved by other programs
    return root / "packed"


@given(data=st.data())
@fuzzed(40)
def test_a_file_of_a_saved_data_set(packed, data):
    name = data.draw(st.sampled_from(["data-00000-of-00001.arrow", "state.json", "dataset_info.json"]))
    path = packed / "train" / name
    content = path.read_bytes()
    path.write_bytes(data.draw(edited(content, header=len(content) if name[0] != "d" else 900)))
    try:
        found = outcome(
            lambda: load_dataset("hugging_face", "train", packed),
            names=str(packed),
            allowed=(ValueError, FileNotFoundError),
        )
        if not isinstance(found, Exception):
            images, info = found
            for index, label in enumerate(images.labels):
                assert 0 <= label < info.num_classes and isinstance(images.read(index), bytes)
    finally:
        path.write_bytes(content)


@given(content=st.one_of(edited(b"cat\ndog\nbird\r\n"), st.binary(max_size=40)))
@fuzzed(20)
def test_a_list_of_classes(folder, content):
    (folder / "classes.txt").write_bytes(content)
    found = outcome(lambda: class_names(folder), names="classes.txt")
    if not isinstance(found, ValueError):
        assert all(found) and len(set(found)) == len(found) > 0
        assert "\n".join(found) == content.decode().removesuffix("\n").replace("\r\n", "\n").removesuffix("\r")


@given(
    plan=st.one_of(
        JSON, st.fixed_dictionaries({"images": st.dictionaries(st.sampled_from(["train", "test"]), SCALARS)})
    )
)
@fuzzed(16)
def test_the_plan_of_packing(folder, plan):
    (folder / "pack.json").write_text(json.dumps(plan))
    found = outcome(lambda: read_plan(folder), names="pack.json")
    assert isinstance(found, ValueError) or all(type(found["images"][part]) is int for part in ("train", "test"))


@given(content=st.one_of(edited("aé中😀".encode()), st.binary(max_size=20)))
@fuzzed(20)
def test_a_text(folder, content):
    (folder / "a.txt").write_bytes(content)
    found = outcome(lambda: read_utf8(folder / "a.txt"), names="a.txt")
    if isinstance(found, str):
        assert found.encode() == content.removeprefix(b"\xef\xbb\xbf")


@given(merges=st.lists(st.tuples(st.integers(-1, 275), st.integers(-1, 275)), max_size=20))
@fuzzed(20)
def test_the_merges_of_a_tokenizer(merges):
    found = outcome(lambda: BytePairTokenizer(merges), names="`merges`")
    if not isinstance(found, ValueError):
        text = "a text of \x00\x01\x02\x03 and aé中😀"
        assert found.decode(found.encode(text)) == text and 257 <= found.vocab_size <= 257 + len(merges)


@given(data=st.data())
@fuzzed(30)
def test_a_saved_tokenizer(folder, data):
    path = BytePairTokenizer([(97, 98), (256, 99)]).save(folder / "tokenizer.json")
    values = json.loads(path.read_text())
    if data.draw(st.booleans()):
        changed = st.dictionaries(st.sampled_from(["format", "fingerprint", "merges"]), JSON, min_size=1)
        path.write_text(json.dumps(values | data.draw(changed)))
    else:
        path.write_bytes(data.draw(edited(path.read_bytes(), header=200)))
    before = path.read_bytes()
    found = outcome(lambda: BytePairTokenizer.load(path), names="tokenizer")
    assert path.read_bytes() == before
    assert isinstance(found, ValueError) or (found.decode(found.encode("abc")), found.merges) == (
        "abc",
        ((97, 98), (256, 99)),
    )


class OneImage(EncodedImages):
    def __init__(self, content):
        super().__init__(np.zeros(1, np.int64), skip_broken=False)
        self.content = content

    def read(self, index):
        return self.content

    def place(self, index):
        return Path("image.png")


FORMATS = [
    ("PNG", {}),
    ("JPEG", {}),
    ("BMP", {}),
    ("PPM", {}),
    ("TIFF", {}),
    ("TIFF", {"compression": "tiff_lzw"}),
    ("WEBP", {}),
]


@given(content=st.one_of(*(edited(encoded(kind, **options), header=100) for kind, options in FORMATS)))
@fuzzed(60)
def test_an_image(content):
    found = outcome(lambda: OneImage(content)[0], names="image.png")
    if isinstance(found, ValueError):
        assert "object at" not in str(found)
    else:
        assert found[0].mode == "RGB" and found[1] == 0


KINDS = ["file", "empty", "folder", "pipe", "loop", "up", "out", "broken"]
NAMES = [
    "train",
    "val",
    "cat",
    "dog",
    "x.png",
    "y.JPEG",
    "a.txt",
    "0.tar",
    "classes.txt",
    ".hidden",
    "a\nb.png",
]


def plant(root, name, kind, outside):
    """Create an object of `kind` at `name` in `root`, unless `name` exists or is outside of `root`."""
    place = root / name
    if os.path.lexists(place) or Path(os.path.realpath(place.parent)) != Path(os.path.abspath(place.parent)):
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError:  # a file or a link is in the way
        return
    if kind in ("file", "empty"):
        place.write_bytes(CONTENT.get(place.suffix, b"text") if kind == "file" else b"")
    elif kind == "folder":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to({"loop": place.name, "up": "..", "out": outside, "broken": "nothing"}[kind])


CONTENT = {".png": encoded("PNG"), ".JPEG": encoded("JPEG"), ".tar": tar(tarfile.USTAR_FORMAT)}
BASE = {
    "image_folder": [f"{split}/{name}/0.png" for split in ("train", "val") for name in ("cat", "dog")],
    "tars": ["train/a.tar", "val/a.tar"],
    "text_folder": ["train/1.txt", "val/1.txt"],
}


@given(
    dataset=st.sampled_from(list(BASE)),
    entries=st.lists(
        st.tuples(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4), st.sampled_from(KINDS)), max_size=4
    ),
    missing=st.integers(-4, 3),
)
@fuzzed(30)
def test_a_folder(tmp_path_factory, folder, dataset, entries, missing):
    root = Path(os.path.realpath(tmp_path_factory.mktemp("tree")))
    for number, name in enumerate(BASE[dataset]):
        if number != missing:
            plant(root, name, "file", folder)
    for parts, kind in entries:
        plant(root, "/".join(parts), kind, folder)
    load = {
        "image_folder": lambda: load_dataset("image_folder", "train", root),
        "tars": lambda: tar_files(root),
        "text_folder": lambda: load_text("text_folder", root),
    }
    found = outcome(load[dataset], names=str(root), allowed=(ValueError, FileNotFoundError))
    if dataset == "image_folder" and not isinstance(found, Exception):
        images, info = found
        assert len(images) >= info.num_classes >= 2 and all(path.is_file() for path, _ in images.files)
