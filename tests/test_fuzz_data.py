"""Damaged data of every kind: an error that names the file, or a correct result; no other error and no hang."""

import io
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from fuzz import JSON, altered, changed, edited, fuzzed, outcome, replaced
from graticule.lab.data.images import EncodedImages
from graticule.lab.data.registry import load_dataset
from graticule.system.files import read_utf8


def encoded(kind, dtype=np.uint8, most=256, **options):
    content = io.BytesIO()
    shape = (12, 9, 3) if dtype == np.uint8 else (12, 9)
    pixels = np.random.RandomState(1).uniform(0, most, shape).astype(dtype)
    Image.fromarray(pixels).save(content, kind, **options)
    return content.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    root = tmp_path_factory.mktemp("arrow")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    images = [{"bytes": encoded("PNG"), "path": None}] * 6
    rows = datasets.Dataset.from_dict({"image": images, "label": [0, 0, 0, 1, 1, 1]}, features=features)
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(str(root))
    return root


@fuzzed(40, data=st.data())
def test_a_file_of_a_saved_data_set(packed, data):
    name = data.draw(st.sampled_from(["data-00000-of-00001.arrow", "state.json", "dataset_info.json"]))
    path = packed / "train" / name
    with replaced(path, data.draw(altered(path, header=900))):
        result = outcome(
            lambda: load_dataset("hugging_face", "train", packed),
            names=str(packed),
            allowed=(ValueError, FileNotFoundError),
        )
        if not isinstance(result, Exception):
            images, info = result
            for index, label in enumerate(images.labels):
                assert 0 <= label < info.num_classes and isinstance(images.read(index), bytes)


@fuzzed(20, content=st.one_of(edited("aé中😀".encode()), st.binary(max_size=20)))
def test_a_text(folder, content):
    (folder / "a.txt").write_bytes(content)
    result = outcome(lambda: read_utf8(folder / "a.txt", 1 << 20), names="a.txt")
    if isinstance(result, str):
        assert result.encode() == content.removeprefix(b"\xef\xbb\xbf")


class OneImage(EncodedImages):
    def __init__(self, content):
        super().__init__(np.zeros(1, np.int64), skip_broken=False)
        self.content = content

    def read(self, index):
        return self.content

    def place(self, index):
        return Path("image.png")


TURNED = Image.Exif()
TURNED[0x0112] = 6  # the orientation
#: Formats of images, with options.
FORMATS = [
    *((kind, {}) for kind in ("PNG", "JPEG", "BMP", "PPM", "TIFF", "WEBP")),
    *((kind, {"exif": TURNED}) for kind in ("PNG", "JPEG")),
    *((kind, {"dtype": np.uint16, "most": 4096}) for kind in ("PNG", "TIFF")),
    *(
        ("TIFF", {"dtype": dtype, "most": most})
        for dtype, most in ((np.float32, 1), (np.float32, 1e30), (np.int32, 256))
    ),
    ("TIFF", {"compression": "tiff_lzw"}),
]


@fuzzed(60, content=st.one_of(*(edited(encoded(kind, **options), header=100) for kind, options in FORMATS)))
def test_an_image(content):
    result = outcome(lambda: OneImage(content)[0], names="image.png")
    if isinstance(result, ValueError):
        assert "object at" not in str(result)
    else:
        assert result[0].mode == "RGB" and result[1] == 0


COCO = {
    "images": [{"id": 1, "file_name": "1.png", "height": 12, "width": 9}],
    "categories": [{"id": 7, "name": "cat"}],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 7, "iscrowd": 0, "area": 12, "bbox": [1, 2, 3, 4]}
        | {"segmentation": [[1, 2, 4, 2, 4, 6]]},
        {"id": 2, "image_id": 1, "category_id": 7, "iscrowd": 1, "area": 12, "bbox": [0, 0, 9, 12]}
        | {"segmentation": {"size": [12, 9], "counts": [50, 8, 50]}},
    ],
}
COORDINATES = st.sampled_from([-50, -20.5, 0, 4, 64, 5000, 65536, 1e7, 4e7, 9e8, 1e9, 1e300, -1e300, 10**400])
POLYGONS = st.lists(st.lists(COORDINATES, min_size=4, max_size=6), max_size=2)
#: Name of a data set -> its targets, and its files.
DENSE = {
    "coco": (("boxes", "masks"), {"annotations/instances_train.json": json.dumps(COCO), "train/1.png": encoded("PNG")}),
    "mask_folder": (
        ("classes",),
        {"images/train/1.png": encoded("PNG"), "classes.txt": "a\nb\n"}
        | {"annotations/train/1.png": encoded("PNG", bool, 2)},
    ),
}


@fuzzed(80, data=st.data())
def test_annotations_of_objects_and_pixels(tmp_path_factory, data):
    name = data.draw(st.sampled_from(["coco", *DENSE]))
    truth, files = DENSE[name]
    root = tmp_path_factory.mktemp("dense")
    edits = data.draw(st.sampled_from(sorted(files)))
    for path, content in files.items():
        content = content if isinstance(content, bytes) else content.encode()
        if path == edits and path.endswith(".json") and data.draw(st.integers(0, 3)):
            values = data.draw(changed(json.loads(content), st.one_of(JSON, COORDINATES, POLYGONS)))
            content = json.dumps(values).encode()
        elif path == edits:
            content = data.draw(edited(content, header=len(content)))
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    allowed = (ValueError, FileNotFoundError)
    result = outcome(lambda: load_dataset(name, "train", root, truth), names="", allowed=allowed)
    if isinstance(result, Exception):  # a file without any segmentation has no masks
        assert str(root) in str(result) or "`dataset` must have masks" in str(result), result
    else:
        images = result[0]
        target = outcome(lambda: images[0], names=str(root), allowed=allowed)
        if isinstance(target, tuple) and "boxes" in target[1]:
            assert target[1]["boxes"].isfinite().all() and (target[1]["labels"] < len(result[1].class_names)).all()
