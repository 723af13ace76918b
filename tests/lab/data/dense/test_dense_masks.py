"""Segmentation data in the layouts of ADE20K and CamVid."""

import numpy as np
import pytest
import torch
from dense_files import draw_image, write_masks
from PIL import Image

from graticule.lab.data.dense import read_image
from graticule.lab.data.registry import load_dataset
from graticule.lab.data.sets.mask_folder import CAMVID, ade20k, camvid, mask_folder


def test_values_mean_classes_and_the_ignored_one_is_255(tmp_path):
    root = write_masks(tmp_path, top=11)
    images, info = camvid("train", root)
    values = np.asarray(Image.open(root / "annotations" / "train" / "1.png"))
    classes = images[1][1]["classes"].numpy()
    assert info.class_names == CAMVID and len(images) == 3
    assert np.array_equal(classes[values < 11], values[values < 11]) and set(classes[values == 11]) == {255}


def test_ade20k_counts_its_classes_from_one_and_names_them_if_it_can(tmp_path):
    root = write_masks(tmp_path, top=150, splits=("training", "validation"))
    images, info = ade20k("test", root)
    values = np.asarray(Image.open(root / "annotations" / "validation" / "0.png")).astype(int)
    assert np.array_equal(images[0][1]["classes"].numpy(), np.where(values == 0, 255, values - 1))
    assert info.class_names[0] == "1" and len(info.class_names) == 150
    lines = ["Idx\tRatio\tTrain\tVal\tName", *(f"{n}\t0\t0\t0\tthing {n}, other" for n in range(1, 151))]
    (root / "objectInfo150.txt").write_text("\n".join(lines))
    assert ade20k("train", root)[1].class_names[:2] == ("thing 1", "thing 2")
    (root / "objectInfo150.txt").write_text("\n".join(lines[:80]))
    with pytest.raises(ValueError, match="must list 150 classes after its header, got 79"):
        ade20k("train", root)


def test_a_folder_of_masks_has_the_classes_that_it_lists(tmp_path):
    root = write_masks(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"classes\.txt"):
        mask_folder("train", root)
    (root / "classes.txt").write_text("sky\nroad\ncar\n")
    assert mask_folder("train", root)[1].class_names == ("sky", "road", "car")
    for names in ("sky\n", "sky\nsky\n", "sky\n\nroad\n"):
        (root / "classes.txt").write_text(names)
        with pytest.raises(ValueError, match="2 to 255 different names"):
            mask_folder("train", root)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda path: Image.fromarray(np.full((24, 40), 40, np.uint8)).save(path), "has the value 40"),
        (
            lambda path: Image.fromarray(np.zeros((24, 41), np.uint8)).save(path),
            r"it has 24 x 40 pixels, and 24 x 41 in .*\.png",
        ),
        (lambda path: path.write_bytes(path.read_bytes()[:60]), "cannot be used"),
        (lambda path: path.write_bytes(b""), "cannot be used"),
        (lambda path: draw_image(0).save(path), "one channel of 8 bits, got Pillow's mode RGB"),
    ],
    ids=["class", "size", "cut", "empty", "colors"],
)
def test_a_broken_mask_is_counted_and_replaced_in_training_and_an_error_in_evaluation(tmp_path, fault, message):
    root = write_masks(tmp_path, top=10)
    for split in ("train", "val"):
        fault(root / "annotations" / split / "1.png")
    train, _ = camvid("train", root)
    assert train[1][1]["image_id"] == 2 and [path.name for path in train.skipped] == ["1.jpg"]
    with pytest.raises(ValueError, match=rf"1\.jpg cannot be used.*{'' if 'cannot' in message else message}"):
        camvid("test", root)[0][1]


def test_an_image_without_a_mask_is_named(tmp_path):
    root = write_masks(tmp_path, top=10)
    (root / "annotations" / "train" / "2.png").unlink()
    with pytest.raises(ValueError, match=r"1 have no counterpart, such as .*2\.jpg"):
        camvid("train", root)
    with pytest.raises(FileNotFoundError, match="images/train and annotations/train"):
        camvid("train", tmp_path / "nothing")


@pytest.mark.parametrize("stated", [(24, 40), (40, 24)], ids=["stored", "displayed"])
def test_the_size_in_an_annotation_decides_whether_an_image_is_turned(tmp_path, stated):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    draw_image(0).save(tmp_path / "a.png", exif=exif)
    pixels = torch.from_numpy(np.array(draw_image(0))).permute(2, 0, 1)  # (3, 24, 40)
    expected = pixels if stated == (24, 40) else pixels.rot90(-1, (1, 2))
    assert torch.equal(read_image(tmp_path / "a.png", stated), expected)
    with pytest.raises(ValueError, match="it has 40 x 24 pixels, and 30 x 30 in the file"):
        read_image(tmp_path / "a.png", (30, 30))


def test_a_classifier_refuses_a_data_set_without_one_class_per_image(tmp_path):
    with pytest.raises(ValueError, match="one class per image, got 'camvid', which has classes; train it by a recipe"):
        load_dataset("camvid", "train", write_masks(tmp_path, top=10))
