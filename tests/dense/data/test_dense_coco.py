"""COCO's format: boxes, polygons, run lengths, crowds, and invalid files."""

import numpy as np
import pytest
import torch
from dense_files import block, coco_values, picture, rle, uncompressed, write_coco
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from graticule.data.coco import coco, coco_train, decoded_mask
from graticule.data.dense_module import load_dense


def changed(index, **values):
    """Return the annotations with entries of one of them replaced."""
    found = coco_values()
    found["annotations"][index] |= values
    return found


def test_objects_come_as_boxes_masks_and_classes_in_the_order_of_their_ids(tmp_path):
    images, info = coco("test", write_coco(tmp_path))
    assert info.class_names == ("dog", "cat") and info.category_ids == (3, 7)
    assert [target["image_id"] for _, target in images] == [5, 8, 11]
    image, target = images[2]
    assert image.shape == (3, 24, 40) and image.dtype == torch.uint8
    assert target["boxes"].tolist() == [[4, 2, 14, 10], [20, 5, 26, 17], [0, 0, 40, 6]]
    assert target["labels"].tolist() == [0, 1, 0]
    assert target["iscrowd"].tolist() == [False, False, True]
    for mask, box in zip(target["masks"], ([4, 2, 10, 8], [20, 5, 6, 12], [0, 0, 40, 6]), strict=True):
        assert torch.equal(mask, torch.from_numpy(block(box)))


def test_an_image_without_objects_has_empty_boxes_and_masks(tmp_path):
    images, _ = coco("train", write_coco(tmp_path))
    _, target = images[1]
    assert target["boxes"].shape == (0, 4) and target["labels"].shape == (0,) and target["masks"].shape == (0, 24, 40)


def test_crowds_and_boxes_without_area_are_counted_and_not_trained_on_but_evaluated(tmp_path):
    write_coco(tmp_path, changed(0, bbox=[4, 2, 0, 8]))
    train, test = (coco(split, tmp_path)[0] for split in ("train", "test"))
    assert train.left_out == 2 and len(train[2][1]["labels"]) == 1
    assert test.left_out == 0 and len(test[2][1]["labels"]) == 3
    again = coco_train("test", tmp_path)[0]
    assert len(again[2][1]["labels"]) == 3 and again.place(2) == train.place(2)


def test_masks_are_those_of_pycocotools(tmp_path):
    write_coco(tmp_path)
    theirs = COCO(tmp_path / "annotations" / "instances_val2017.json")
    images, _ = coco("test", tmp_path)
    for n, annotation in enumerate(theirs.loadAnns(theirs.getAnnIds([11]))):
        ours = coco_mask.encode(np.asfortranarray(images[2][1]["masks"][n].numpy()))
        assert coco_mask.iou([ours], [theirs.annToRLE(annotation)], [0]).item() == 1


def test_a_mask_survives_either_kind_of_run_lengths():
    mask = np.random.RandomState(0).rand(9, 13) < 0.4
    for form in (rle(mask), uncompressed(mask)):
        assert np.array_equal(decoded_mask(form, (9, 13), "x"), mask.astype(np.uint8))


def test_damaged_run_lengths_are_refused_before_they_are_decoded():
    good = rle(np.random.RandomState(0).rand(9, 13) < 0.4)["counts"]
    wrong = [good[:-1], good + "11", good + "\x7f", "o" * 12, "", 7, [5, -5, 117], [200], ["a"]]
    for counts in wrong:
        with pytest.raises(ValueError, match="run lengths of x"):
            decoded_mask({"size": [9, 13], "counts": counts}, (9, 13), "x")
    assert coco_mask.area({"size": [9, 13], "counts": good.encode()}) > 0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (changed(1, image_id=99), "`image_id` must be of an image of the file, got 99 in annotation 2"),
        (changed(1, category_id=4), "`category_id` must be of a category of the file, got 4"),
        (changed(1, bbox=[1, 2, 3]), "`bbox` must be left, top, width and height"),
        (changed(1, bbox=[1, 2, float("nan"), 3]), "`bbox` must be"),
        (coco_values(images=[{"id": 1, "file_name": "../x.jpg", "height": 1, "width": 1}]), "must be paths within"),
        (coco_values(images=[{"id": 1, "file_name": "/etc/x.jpg", "height": 1, "width": 1}]), "must be paths within"),
        (coco_values(images=[{"id": 1, "file_name": "a.jpg", "height": "9", "width": 1}]), "as `height`"),
        (coco_values(images=[]), "must have images with different ids"),
        (coco_values(categories=[]), "categories with different ids"),
        (coco_values(annotations=None), "must have the list `annotations`"),
        ([], "must have the list `images`"),
    ],
)
def test_a_file_that_is_wrong_is_refused_when_it_is_loaded(tmp_path, values, said):
    with pytest.raises(ValueError, match=said):
        coco("train", write_coco(tmp_path, values))


def test_a_missing_image_is_named_with_how_many_are_missing(tmp_path):
    write_coco(tmp_path)
    (tmp_path / "train2017" / "8.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 3 do not exist, such as .*8\.jpg"):
        coco("train", tmp_path)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda root: (root / "train2017" / "11.jpg").write_bytes(b"<html>"), "cannot identify"),
        (
            lambda root: picture(0, 24, 41).save(root / "train2017" / "11.jpg"),
            "24 x 41 pixels, and 24 x 40",
        ),
        (lambda root: write_coco(root, changed(1, segmentation=rle(block([0, 0, 2, 2], 24, 39)))), "has the size"),
        (lambda root: write_coco(root, changed(1, segmentation=[[1, 2, 3]])), "at least 3 points"),
    ],
    ids=["no image", "size", "mask", "polygon"],
)
def test_a_broken_image_is_counted_and_replaced_in_training_and_an_error_in_evaluation(tmp_path, fault, said):
    fault(write_coco(tmp_path))
    train, _ = coco("train", tmp_path)
    assert train[2][1]["image_id"] == 5  # the next one
    assert [path.name for path in train.skipped] == ["11.jpg"]
    test, _ = coco("test", tmp_path)
    (tmp_path / "val2017" / "11.jpg").write_bytes((tmp_path / "train2017" / "11.jpg").read_bytes())
    with pytest.raises(ValueError, match=f"11.jpg cannot be used .*{said}"):
        test[2]


def test_links_to_images_and_folders_elsewhere_are_followed(tmp_path):
    root = write_coco(tmp_path / "root")
    expected = coco("test", root)[0][2][0]
    (root / "val2017" / "11.jpg").rename(tmp_path / "11.jpg")
    (root / "val2017" / "11.jpg").symlink_to(tmp_path / "11.jpg")
    (root / "val2017").rename(tmp_path / "images")
    (root / "val2017").symlink_to(tmp_path / "images")
    assert torch.equal(coco("test", root)[0][2][0], expected)


def test_a_data_set_without_what_is_wanted_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="`dataset` must have classes, got 'coco', which has boxes and masks"):
        load_dense("coco", "test", write_coco(tmp_path), ("classes",))
    with pytest.raises(ValueError, match="got 'digits', which has one class per image"):
        load_dense("digits", "test", None, ("boxes",))
    with pytest.raises(FileNotFoundError, match=r"annotations/instances_val2017\.json"):
        load_dense("coco", "test", tmp_path / "nothing", ("boxes",))
