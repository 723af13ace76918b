import shutil

import numpy as np
import pytest

from graticule.lab.data.registry import load_dataset
from image_files import BROKEN, picture, write_folder


@pytest.mark.parametrize("val", ["val", "validation", "test"])
def test_a_folder_a_class_gives_its_images_in_colour_with_the_label(tmp_path, val):
    root = write_folder(tmp_path, val=val)
    (root / "train" / "README.txt").write_text("no class")
    (root / "train" / "cat" / "notes.txt").write_text("no image")
    picture(99).convert("L").save(root / "train" / "cat" / "grey.png")
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
    np.testing.assert_array_equal(np.asarray(instead), np.asarray(images[2][0]))  # the next one of the class
    assert images[1][1] == 0
    assert [str(skipped) for skipped in images.skipped] == [str(path)]
    assert [str(path) in warning for warning in warnings] == [True]


def test_the_replacement_of_a_broken_image_does_not_depend_on_earlier_reads(tmp_path):
    root = write_folder(tmp_path, each=4)
    for n in (1, 3):
        (root / "train" / "dog" / f"{n}.JPEG").write_bytes(b"")
    forward, backward = (load_dataset("image_folder", "train", root)[0] for _ in range(2))
    first = [np.asarray(forward[i][0]) for i in range(8)]
    second = [np.asarray(backward[i][0]) for i in reversed(range(8))]
    for a, b in zip(first, reversed(second), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", BROKEN)
def test_evaluation_stops_at_a_broken_image_and_names_it(tmp_path, kind):
    path = write_folder(tmp_path) / "val" / "dog" / "0.JPEG"
    path.write_bytes(BROKEN[kind](path.read_bytes()))
    images, _ = load_dataset("image_folder", "test", tmp_path)
    with pytest.raises(ValueError, match=r"dog.0\.JPEG"):
        images[3]


def test_a_class_of_which_nothing_can_be_read_is_an_error_and_not_an_endless_search(tmp_path):
    root = write_folder(tmp_path)
    for path in (root / "train" / "cat").iterdir():
        path.write_bytes(b"")
    images, _ = load_dataset("image_folder", "train", root)
    with pytest.raises(ValueError, match="cat"):
        images[0]


def test_a_missing_root_is_named(tmp_path):
    for root, said in ((None, r"got none; .* is written \./NAME"), (tmp_path / "nowhere", "nowhere', which does not")):
        with pytest.raises(FileNotFoundError, match=said):
            load_dataset("image_folder", "train", root)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_missing_or_empty_split_is_named(tmp_path, split):
    shutil.rmtree(write_folder(tmp_path) / split)
    with pytest.raises(FileNotFoundError, match=split):
        load_dataset("image_folder", "train", tmp_path)
    (tmp_path / split).mkdir()
    with pytest.raises(ValueError, match=split):
        load_dataset("image_folder", "train", tmp_path)


def test_one_class_is_too_few(tmp_path):
    with pytest.raises(ValueError, match="two classes"):
        load_dataset("image_folder", "train", write_folder(tmp_path, classes=("cat",)))


def test_classes_that_differ_between_the_splits_are_named(tmp_path):
    (write_folder(tmp_path) / "val" / "dog").rename(tmp_path / "val" / "wolf")
    with pytest.raises(ValueError, match=r"dog.*wolf"):
        load_dataset("image_folder", "train", tmp_path)


def test_a_class_without_images_is_named(tmp_path):
    for path in (write_folder(tmp_path) / "train" / "dog").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="dog"):
        load_dataset("image_folder", "train", tmp_path)


def test_a_link_that_leads_back_is_refused(tmp_path):
    root = write_folder(tmp_path / "root")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "back").symlink_to(root / "train" / "cat")
    (root / "train" / "cat" / "other").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match=r"other/back must not be a link to a folder that contains it"):
        load_dataset("image_folder", "train", root)
