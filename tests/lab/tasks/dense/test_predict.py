"""`graticule predict`: images and JSON of runs."""

import json

import numpy as np
import pytest
import torch
from dense_runs import detector
from PIL import Image

from commands import refused, run_command
from graticule.lab.commands.predict import color, draw_prediction
from graticule.lab.training.loop import train
from graticule.lab.training.results import Prediction, above, image_ids

pytestmark = pytest.mark.usefixtures("quick_figures")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, segmentation_run, plain_run):
    """Return runs of a segmentation model, of a classifier, and of a detector with masks, of one step."""
    folder, small = tmp_path_factory.mktemp("predict"), {"limit_train": 4, "limit_test": 2, "epochs": 1}
    masks = detector(head="mask_rcnn(score=0.0, most=5)", neck="simple_pyramid(channels=8)", **small)
    detection = train(masks, folder / "detection", progress=False)
    return {"detection": detection, "segmentation": segmentation_run, "classification": plain_run}


@pytest.fixture
def photos(tmp_path):
    """Write two images of different sizes, neither square."""
    for name, size in (("000000000400", (40, 70, 3)), ("12", (64, 50, 3))):
        pixels = np.random.RandomState(0).randint(0, 256, size).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{name}.jpg")
    return [tmp_path / "000000000400.jpg", tmp_path / "12.jpg"]


def test_a_detector_writes_results_in_coco_s_format_and_a_figure_of_each_image(runs, photos, capsys):
    code, out, err = run_command(capsys, "predict", runs["detection"].folder, *photos, "--threshold", "0.01")
    assert code == 0, err
    folder = runs["detection"].folder / "predictions"
    boxes, masks = (json.loads((folder / f"{name}.json").read_text()) for name in ("boxes", "masks"))
    assert {entry["image_id"] for entry in boxes} == {400, 12} and len(masks) == len(boxes)
    assert set(boxes[0]) == {"image_id", "category_id", "score", "bbox"}
    assert all(1 <= entry["category_id"] <= 10 for entry in boxes)
    for entry in boxes:
        width, height = (70, 40) if entry["image_id"] == 400 else (50, 64)
        left, top, wide, tall = entry["bbox"]
        assert left >= 0 and top >= 0 and left + wide <= width + 1e-3 and top + tall <= height + 1e-3
    assert {tuple(entry["segmentation"]["size"]) for entry in masks} == {(40, 70), (64, 50)}
    assert (folder / "12.png").stat().st_size > 1000 and str(photos[0]) in out


def test_a_segmentation_model_writes_the_class_of_every_pixel(runs, photos, tmp_path, capsys):
    code, out, err = run_command(capsys, "predict", runs["segmentation"].folder, *photos, "--output", tmp_path / "out")
    assert code == 0, err
    classes = np.asarray(Image.open(tmp_path / "out" / "12.classes.png"))
    assert classes.shape == (64, 50) and classes.max() < 11
    entries = json.loads((tmp_path / "out" / "classes.json").read_text())
    names = ["background", *"0123456789"]
    assert entries[1]["shares"] == {names[n]: pytest.approx((classes == n).mean()) for n in np.unique(classes)}
    assert " %" in out


def test_a_classifier_names_the_five_likeliest_classes(runs, photos, tmp_path, capsys):
    code, out, err = run_command(
        capsys, "predict", runs["classification"].folder, photos[0], "--output", tmp_path / "o"
    )
    assert code == 0, err
    (entry,) = json.loads((tmp_path / "o" / "classes.json").read_text())
    shares = [likely["probability"] for likely in entry["top"]]
    assert len(shares) == 5 and shares == sorted(shares, reverse=True) and sum(shares) <= 1
    assert f"{entry['top'][0]['class']} {100 * shares[0]:.1f} %" in out


def test_invalid_predictions_are_refused_in_one_line(runs, photos, tmp_path, capsys):
    (tmp_path / "broken.png").write_bytes(b"<html>")
    (tmp_path / "more").mkdir()
    twin = tmp_path / "more" / "12.jpg"
    twin.write_bytes(photos[1].read_bytes())
    run = runs["detection"].folder
    cases = [
        ([run, tmp_path / "nothing.jpg"], "`images` must be files, got"),
        ([run, tmp_path / "broken.png"], "cannot be read as one"),
        ([run, photos[1], twin], "`images` must differ in their names"),
        ([run, photos[0], "--threshold", "2"], "`threshold` must be at most 1"),
        ([runs["classification"].folder, photos[0], "--threshold", "0.9"], "`threshold` must be left out for a mod"),
        ([tmp_path / "no_run", photos[0]], "no_run"),
        ([run], "`IMAGE ...`"),
    ]
    for arguments, message in cases:
        assert message in refused(capsys, "predict", *arguments)


def test_images_keep_the_numbers_that_are_their_names(tmp_path):
    assert image_ids([tmp_path / "000000000400.jpg", tmp_path / "7.png"]) == [400, 7]
    assert image_ids([tmp_path / "a.jpg", tmp_path / "7.png"]) == [1, 2]
    assert image_ids([tmp_path / "07.jpg", tmp_path / "7.png"]) == [1, 2]


def test_boxes_of_a_lower_score_are_not_drawn_and_colors_of_classes_differ():
    image = torch.zeros(3, 20, 30, dtype=torch.uint8)
    boxes, entries = torch.tensor([[1.0, 2, 10, 12], [3, 4, 20, 15]]), {"boxes.json": [{"score": 0.9}, {"score": 0.1}]}
    likely = above(Prediction(image, boxes, ["a 0.90", "b 0.10"], [0, 1], entries=entries), 0.5)
    assert likely.labels == ["a 0.90"] and likely.boxes.tolist() == [[1, 2, 10, 12]]
    (axes,) = draw_prediction(likely, "title").axes
    (patch,) = [box for box in axes.patches if box.get_width() == 9]
    assert patch.get_xy() == (0.5, 1.5) and patch.get_height() == 10
    assert len({color(n) for n in range(150)}) == 150
