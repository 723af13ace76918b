"""Pipes and absurd numbers in data are refused by name, before they take time or memory."""

import os

import pytest

from graticule.lab.data.registry import load_dataset
from graticule.lab.data.sets.texts import load_text
from image_files import draw_image, write_folder


def test_a_pipe_is_broken_and_never_opened(tmp_path):
    root = write_folder(tmp_path)
    for split in ("train", "val"):
        os.mkfifo(root / split / "cat" / "x.png")
    train, test = (load_dataset("image_folder", split, root)[0] for split in ("train", "test"))
    assert train[3][1] == 1 and train.skipped == [root / "train" / "cat" / "x.png"]
    with pytest.raises(ValueError, match=r"x\.png must be a plain file, got a pipe"):
        test[3]


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
