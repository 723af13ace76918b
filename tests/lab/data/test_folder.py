"""Folders of images: classes, broken and hostile files, and what is missing."""

import os
import shutil
from functools import partial

import numpy as np
import pytest

from graticule.lab.data.module import DataModule
from graticule.lab.data.registry import load_dataset
from graticule.lab.data.sets.texts import load_text
from image_files import BROKEN, draw_image, write_folder


@pytest.mark.parametrize("val", ["val", "validation", "test"])
def test_a_folder_a_class_gives_its_images_in_colour_with_the_label(tmp_path, val):
    root = write_folder(tmp_path, val=val)
    (root / "train" / "README.txt").write_text("no class")
    (root / "train" / "cat" / "notes.txt").write_text("no image")
    draw_image(99).convert("L").save(root / "train" / "cat" / "grey.png")
    for split, length in (("train", 7), ("test", 6)):
        images, info = load_dataset("image_folder", split, root)
        assert len(images) == len(images.labels) == length
        assert (info.class_names, info.size, info.channels) == (("cat", "dog"), None, 3)
        assert all(image.mode == "RGB" and image.size == (56, 40) for image, _ in (images[i] for i in range(length)))
        assert [images[i][1] for i in range(length)] == images.labels.tolist() == [0] * (length - 3) + [1] * 3


@pytest.mark.parametrize("kind", BROKEN)
def test_training_passes_over_a_broken_image_and_names_it_once(tmp_path, kind, monkeypatch):
    path = write_folder(tmp_path) / "train" / "cat" / "1.JPEG"
    path.write_bytes(BROKEN[kind](path.read_bytes()))
    images, _ = load_dataset("image_folder", "train", tmp_path)
    warnings: list[str] = []
    monkeypatch.setattr("graticule.lab.data.images.log.warning", lambda text, *values: warnings.append(text % values))
    instead, label = images[1]
    assert label == 0
    np.testing.assert_array_equal(np.asarray(instead), np.asarray(images[2][0]))  # the next one
    assert images[1][1] == 0
    assert [str(skipped) for skipped in images.skipped] == [str(path)]
    assert [str(path) in warning for warning in warnings] == [True]


def test_the_replacement_of_a_broken_image_does_not_depend_on_earlier_reads(tmp_path):
    root = write_folder(tmp_path, per_class=4)
    for n in (1, 3):
        (root / "train" / "dog" / f"{n}.JPEG").write_bytes(b"")
    forward, backward = (load_dataset("image_folder", "train", root)[0] for _ in range(2))
    first = [np.asarray(forward[i][0]) for i in range(8)]
    second = [np.asarray(backward[i][0]) for i in reversed(range(8))]
    np.testing.assert_array_equal(first, second[::-1])


@pytest.mark.parametrize("kind", BROKEN)
def test_evaluation_stops_at_a_broken_image_and_names_it(tmp_path, kind):
    path = write_folder(tmp_path) / "val" / "dog" / "0.JPEG"
    path.write_bytes(BROKEN[kind](path.read_bytes()))
    images, _ = load_dataset("image_folder", "test", tmp_path)
    with pytest.raises(ValueError, match=r"dog.0\.JPEG"):
        images[3]


def test_a_folder_of_which_nothing_can_be_read_is_an_error_and_not_an_endless_search(tmp_path):
    root = write_folder(tmp_path)
    for path in (root / "train").rglob("*.JPEG"):
        path.write_bytes(b"")
    images, _ = load_dataset("image_folder", "train", root)
    with pytest.raises(ValueError, match=r"images that can be read, got none; one is .*cat.0\.JPEG"):
        images[0]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_images_skipped_by_a_worker_are_known_to_the_main_process(tmp_path):
    path = write_folder(tmp_path) / "train" / "dog" / "0.JPEG"
    path.write_bytes(b"")
    data = DataModule("image_folder", root=tmp_path, size=(16, 24), batch_size=2, workers=2)
    train = data.train_dataloader()
    assert len([*train]) == 3 and [str(skipped) for skipped in data.skipped] == [str(path)]


@pytest.mark.parametrize("name", ["image_folder", "unlabeled_folder", "hugging_face"])
def test_a_missing_root_is_named(tmp_path, name):
    load = partial(load_dataset, name, "train")
    with pytest.raises(FileNotFoundError, match=r"got none; a folder .* is written \./NAME"):
        load(root=None)
    with pytest.raises(FileNotFoundError, match="nowhere', which does not exist"):
        load(root=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("train", "must have a folder train, got"),
        ("val", "must have a folder val or validation or test, got"),
        ("train/*", "two classes or more, got 0 in .*train"),
        ("val/*", "two classes or more, got 0 in .*val"),
        ("train/[cd]*", "two classes or more, got 1 in .*train"),
        ("val/dog", "the same classes in training and evaluation; in training only: dog"),
        ("train/dog/*", r"must have images .* in every class, got none in .*dog\."),
    ],
)
def test_missing_and_empty_splits_and_classes_are_named(tmp_path, removed, message):
    for path in write_folder(tmp_path, classes=("cat", "dog", "wolf")).glob(removed):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        DataModule("image_folder", root=tmp_path, size=(8, 8))


def test_a_folder_that_is_the_training_folder_itself_is_recognized(tmp_path):
    root = write_folder(tmp_path) / "train"
    with pytest.raises(FileNotFoundError, match=rf"folder train, got {root}, .* are the classes, pass {tmp_path}\."):
        load_dataset("image_folder", "train", root)


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
