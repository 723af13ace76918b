"""COCO's format: boxes, polygons, run lengths, crowds, and invalid files."""

import numpy as np
import pytest
import torch
from dense_files import block, coco_values, draw_image, rle, write_coco
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from graticule.lab.data.dense_module import DenseModule
from graticule.lab.data.registry import load_dataset
from graticule.lab.data.sets.coco import coco, decoded_mask


def changed(index, **values):
    """Return the annotations with entries of one of them replaced."""
    file = coco_values()
    file["annotations"][index] |= values
    return file


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


def test_crowds_are_evaluated_and_not_trained_on_and_boxes_without_area_are_neither(tmp_path, capsys):
    write_coco(tmp_path, changed(0, bbox=[4, 2, 0, 8]))
    train, test = (coco(split, tmp_path)[0] for split in ("train", "test"))
    assert train.left_out == 2 and train[2][1]["labels"].tolist() == [1]
    assert test.left_out == 1 and test[2][1]["iscrowd"].tolist() == [False, True]
    assert (
        "of 4 objects, 1 are left out, as they have no area in their image, and 0 are clipped"
        in capsys.readouterr().err
    )


def test_boxes_are_clipped_to_their_image(tmp_path, capsys):
    write_coco(tmp_path, changed(0, bbox=[-50, -50, 5000, 60.5]))
    images, _ = coco("train", tmp_path)
    assert images[2][1]["boxes"].tolist()[0] == [0, 0, 40, 10.5] and images.left_out == 1
    assert "0 are left out, as they have no area in their image, and 1 are clipped" in capsys.readouterr().err


def test_masks_are_decoded_only_if_they_are_wanted(tmp_path, monkeypatch):
    write_coco(tmp_path)
    images, _ = load_dataset("coco", "train", tmp_path, ("boxes",))
    monkeypatch.setattr("graticule.lab.data.sets.coco.decoded_mask", None)
    assert "masks" not in images[2][1] and len(images[2][1]["boxes"]) == 2
    images, _ = load_dataset("coco", "train", tmp_path, ("boxes", "masks"))
    with pytest.raises(TypeError):
        images[2]


def test_a_file_of_boxes_alone_is_one_without_masks(tmp_path):
    write_coco(tmp_path, changed(0, segmentation=[]))
    assert len(load_dataset("coco", "train", tmp_path, ("boxes",))[0][2][1]["boxes"]) == 2
    with pytest.raises(ValueError, match="`dataset` must have masks, got 'coco', which has boxes"):
        load_dataset("coco", "train", tmp_path, ("boxes", "masks"))


def test_polygons_beyond_the_image_are_clipped_at_its_edge():
    expected = np.triu(np.ones((64, 64)))
    assert (decoded_mask([[0, 0, 5000, 0, 5000, 5000]], (64, 64), "x") != expected).mean() < 0.02


def test_damaged_masks_are_refused():
    good = rle(np.random.RandomState(0).rand(9, 13) < 0.4)["counts"]
    counts = [good + "11", "o" * 12, 7, [5, -5, 117], [200], ["a"]]
    polygons = [[[1, 2, 3, 4, 5, "x"]], [[1, 2, 3, 4, 5, {}]], [7], [[10**400] * 6], [[0, 0, 9e8, 0, 9e8, 9e8]]]
    for wrong in (*polygons, *({"size": [9, 13], "counts": value} for value in counts), {"size": [9, 13]}, None, "x"):
        with pytest.raises(ValueError, match="the mask of x is damaged"):
            decoded_mask(wrong, (9, 13), "x")


def test_the_fingerprint_changes_with_an_image_and_with_an_annotation(tmp_path):
    def fingerprint():
        return DenseModule("coco", truth=("boxes",), root=tmp_path, size=(24, 40)).fingerprint()

    write_coco(tmp_path)
    first = fingerprint()
    assert fingerprint() == first and first["test"]["examples"] == 3
    write_coco(tmp_path, changed(1, bbox=[20, 5, 7, 12]))
    assert fingerprint()["test"]["sha256"] != first["test"]["sha256"]
    draw_image(1).save(write_coco(tmp_path) / "val2017" / "8.jpg")
    last = fingerprint()
    assert last["train"]["sha256"] == first["train"]["sha256"] and last["test"]["sha256"] != first["test"]["sha256"]


def test_masks_are_those_of_pycocotools(tmp_path):
    write_coco(tmp_path)
    reference = COCO(tmp_path / "annotations" / "instances_val2017.json")
    images, _ = coco("test", tmp_path)
    for n, annotation in enumerate(reference.loadAnns(reference.getAnnIds([11]))):
        ours = coco_mask.encode(np.asfortranarray(images[2][1]["masks"][n].numpy()))
        assert coco_mask.iou([ours], [reference.annToRLE(annotation)], [0]).item() == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (changed(1, image_id=99), "`image_id` must be an `id` of `images`, got 99 in annotation 2"),
        (changed(1, category_id=4), "`category_id` must be an `id` of `categories`, got 4"),
        (changed(1, image_id=[1]), r"`annotations\[1\]\.image_id` must be a valid integer, got \[1\]"),
        (changed(1, bbox=[1, 2, 3]), r"`annotations\[1\]\.bbox\[3\]` must be given"),
        (changed(1, bbox=[1, 2, float("nan"), 3]), r"`annotations\[1\]\.bbox\[2\]` must be less than"),
        (changed(1, iscrowd="yes"), r"`annotations\[1\]\.iscrowd` must be 0 or 1, got 'yes'"),
        (
            coco_values(categories=[{"id": 1, "name": "a"}, {"id": 2, "name": "a"}]),
            "2 categories with 1 names",
        ),
        (coco_values(images=[{"id": 1, "file_name": "a.jpg", "height": "9", "width": 1}]), r"`images\[0\]\.height`"),
        (coco_values(images=[]), "got 0 images"),
        ([], "must be annotations of COCO's format: it must be a valid dictionary"),
    ],
)
def test_an_invalid_file_is_refused_when_it_is_loaded(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        coco("train", write_coco(tmp_path, values))


def test_a_missing_image_is_named_with_how_many_are_missing(tmp_path):
    write_coco(tmp_path)
    (tmp_path / "train2017" / "8.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 3 do not exist, such as .*8\.jpg"):
        coco("train", tmp_path)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda root: (root / "train2017" / "11.jpg").write_bytes(b"<html>"), "cannot identify"),
        (lambda root: draw_image(0, 24, 41).save(root / "train2017" / "11.jpg"), "24 x 41 pixels, and 24 x 40"),
        (lambda root: write_coco(root, changed(1, segmentation=rle(block([0, 0, 2, 2], 24, 39)))), "has the size"),
        (lambda root: write_coco(root, changed(1, segmentation=[[1, 2, 3]])), "annotation 2 is damaged"),
    ],
    ids=["no image", "size", "mask", "polygon"],
)
def test_a_broken_image_is_counted_and_replaced_in_training_and_an_error_in_evaluation(tmp_path, fault, message):
    fault(write_coco(tmp_path))
    train, _ = coco("train", tmp_path)
    assert train[2][1]["image_id"] == 5  # the next one
    assert [path.name for path in train.skipped] == ["11.jpg"]
    test, _ = coco("test", tmp_path)
    (tmp_path / "val2017" / "11.jpg").write_bytes((tmp_path / "train2017" / "11.jpg").read_bytes())
    with pytest.raises(ValueError, match=f"11.jpg cannot be used .*{message}"):
        test[2]


def test_a_data_set_without_the_needed_targets_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="`dataset` must have classes, got 'coco', which has boxes and masks"):
        load_dataset("coco", "test", write_coco(tmp_path), ("classes",))
    with pytest.raises(ValueError, match="got 'digits', which has one class per image"):
        load_dataset("digits", "test", None, ("boxes",))
    with pytest.raises(FileNotFoundError, match=r"annotations/instances_val2017\.json"):
        load_dataset("coco", "test", tmp_path / "nothing", ("boxes",))
