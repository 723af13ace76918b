"""Pipes, devices, circular links and absurd numbers in data are refused by name, before they take time or memory."""

import inspect
import os
import sys

import pytest
from PIL import Image

from graticule.lab.data.registry import load_dataset
from graticule.lab.data.sets.texts import load_text
from image_files import draw_image, write_folder


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


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    ("write", "load", "where"),
    [
        (write_folder, lambda root: load_dataset("image_folder", "train", root), "train/cat/x.png"),
        (write_folder, lambda root: load_dataset("image_folder", "train", root), "val/dog/below/x.JPEG"),
    ],
    ids=["image", "image below"],
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


def test_a_file_that_is_too_large_for_an_image_or_a_text_is_not_read(tmp_path):
    root = write_folder(tmp_path)
    os.truncate(root / "val" / "cat" / "0.JPEG", 1 << 40)  # sparse
    images, _ = load_dataset("image_folder", "test", root)
    with pytest.raises(ValueError, match=r"0\.JPEG must have at most"):
        images[0]
    (tmp_path / "a.txt").touch()
    os.truncate(tmp_path / "a.txt", 1 << 40)
    with pytest.raises(ValueError, match=r"a\.txt must have at most"):
        load_text("text_file", tmp_path / "a.txt")


def test_only_the_accepted_image_formats_are_opened(tmp_path):
    root = write_folder(tmp_path)
    draw_image(0).save(root / "val" / "cat" / "0.JPEG", format="EPS")  # Pillow would call Ghostscript to read it
    images, _ = load_dataset("image_folder", "test", root)
    with pytest.raises(ValueError, match="cannot identify"):
        images[0]


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


def test_a_folder_deeper_than_python_calls_go_is_read(tmp_path):
    root = write_folder(tmp_path)
    (root / "train" / "cat").joinpath(*["d"] * 300).mkdir(parents=True)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)
    try:
        assert len(load_dataset("image_folder", "train", root)[0]) == 6
    finally:
        sys.setrecursionlimit(limit)
