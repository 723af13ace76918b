"""COCO's average precision and intersection over union: constructed cases, and results that pycocotools reads."""

import contextlib
import io
import json

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from graticule.lab.tasks.parts.detection_scores import CocoScores, encode_mask
from graticule.lab.tasks.segmentation import class_ious, confusion, mean_iou, per_class


def truth_of(number, boxes, labels, crowd=(), size=(60, 90)):
    """Return a truth with rectangular masks."""
    boxes = torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4)
    masks = torch.zeros(len(boxes), *size, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.long().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    return {
        "image_id": number,
        "size": size,
        "boxes": boxes,
        "labels": torch.tensor(labels),
        "iscrowd": torch.tensor([n in crowd for n in range(len(boxes))], dtype=torch.bool),
        "area": masks.sum((1, 2)).double(),
        "masks": masks,
    }


def detect(target, boxes=None, labels=None, scores=None, masks=True):
    """Return detections equal to a truth, except for the given values."""
    boxes = target["boxes"] if boxes is None else torch.as_tensor(boxes, dtype=torch.float64).reshape(-1, 4)
    detections = {
        "boxes": boxes.float(),
        "labels": target["labels"] + 1 if labels is None else torch.as_tensor(labels),
        "scores": torch.linspace(0.9, 0.5, len(boxes)) if scores is None else torch.as_tensor(scores),
    }
    return detections | ({"masks": target["masks"][:, None].float()} if masks else {})


def planted(seed=0):
    """Return scores of five images with random objects, some found, shifted, or of another class."""
    random = np.random.RandomState(seed)
    scores = CocoScores(category_ids=(3, 7, 11))
    for number in (4, 9, 12, 30, 31):
        count = random.randint(0, 6)
        corners = random.randint(0, 40, (count, 2))
        sides = random.randint(4, 20, (count, 2))
        boxes = np.concatenate([corners, corners + sides], 1)
        target = truth_of(number, boxes.tolist(), random.randint(0, 3, count).tolist(), crowd=(0,))
        shift = random.normal(0, 1.5, (count, 4))
        labels = random.randint(1, 4, count)
        scores.add(target, detect(target, boxes + shift, labels, random.rand(count)), (60, 90))
    return scores


def test_exact_detections_score_100_and_missed_objects_0():
    target = truth_of(1, [[5, 5, 25, 30], [40, 10, 80, 50]], [0, 1])
    perfect, missed, crowd = CocoScores(), CocoScores(), CocoScores()
    perfect.add(target, detect(target), (60, 90))
    assert perfect.compute()["box_map"] == pytest.approx(100) and perfect.compute()["mask_map"] == pytest.approx(100)
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0).long(), "scores": torch.zeros(0)}
    missed.add(target, nothing, (60, 90))
    assert missed.compute()["box_map"] == 0
    crowd.add(truth_of(1, [[5, 5, 25, 30], [40, 10, 80, 50]], [0, 1], crowd=(1,)), detect(target), (60, 90))
    assert crowd.compute()["box_map"] == pytest.approx(100)  # the crowd is ignored


def test_a_shift_is_scored_by_the_thresholds_that_its_overlap_reaches():
    target = truth_of(1, [[10, 10, 50, 50]], [0])
    scores = CocoScores()
    scores.add(target, detect(target, [[10, 10, 50, 40]], masks=False), (60, 90))  # overlap 30 / 40 = 0.75
    values = scores.compute()
    assert values["box_map"] == pytest.approx(100 * 6 / 10)  # 0.50, 0.55, ..., 0.75
    assert values["box_map_50"] == values["box_map_75"] == pytest.approx(100)


def test_boxes_and_masks_are_brought_back_to_the_original_image():
    target = truth_of(1, [[20, 10, 60, 40]], [0])
    small = {
        "boxes": target["boxes"].float() / 2,
        "labels": torch.tensor([1]),
        "scores": torch.tensor([0.8]),
        "masks": target["masks"][:, None, ::2, ::2].float(),
    }
    scores = CocoScores()
    scores.add(target, small, (30, 45))
    assert scores.boxes[0]["bbox"] == [20, 10, 40, 30] and scores.masks[0]["segmentation"]["size"] == [60, 90]
    assert scores.compute()["box_map"] == pytest.approx(100) and scores.compute()["mask_map"] == pytest.approx(100)


def test_results_in_json_have_the_same_score_by_pycocotools_to_the_last_digit(tmp_path):
    scores = planted()
    values = scores.compute()
    assert 0 < values["box_map"] < 100 and 0 < values["mask_map"] < 100
    (tmp_path / "truth.json").write_text(json.dumps(scores.truth()))
    for kind, name, results in (("bbox", "box_map", scores.boxes), ("segm", "mask_map", scores.masks)):
        (tmp_path / "found.json").write_text(json.dumps(results))
        with contextlib.redirect_stdout(io.StringIO()):
            truth = COCO(tmp_path / "truth.json")
            evaluation = COCOeval(truth, truth.loadRes(str(tmp_path / "found.json")), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        assert 100 * float(evaluation.stats[0]) == values[name]
        by_class = [value for key, value in values.items() if key.startswith(f"{name}_class")]
        assert np.mean(by_class) == pytest.approx(values[name])


def test_run_lengths_of_a_mask_are_text():
    mask = torch.zeros(4, 6, dtype=torch.uint8)
    mask[1:3, 2:5] = 1
    assert json.loads(json.dumps(encode_mask(mask)))["size"] == [4, 6]


def test_sizes_without_objects_have_no_average_precision():
    target = truth_of(1, [[5, 5, 25, 30]], [0])
    scores = CocoScores()
    scores.add(target, detect(target, labels=[2]), (60, 90))
    values = scores.compute()
    assert values["box_map_small"] == values["mask_map_small"] == 0
    assert values["box_map_medium"] is values["mask_map_large"] is None


def test_intersection_over_union_is_that_of_a_case_by_hand():
    truth = torch.tensor([[0, 0, 1], [1, 2, 255]])
    predicted = torch.tensor([[0, 1, 1], [1, 1, 0]])
    assert confusion(predicted, truth, 4).tolist() == [[1, 1, 0, 0], [0, 2, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    counts = per_class(confusion(predicted, truth, 4))
    assert class_ious(counts) == [50.0, 50.0, 0.0, None]  # 1/2, 2/4, 0/1, and an absent class
    assert mean_iou(counts) == pytest.approx(100 / 3)
