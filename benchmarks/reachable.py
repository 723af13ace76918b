"""Objects that FCOS can learn, and an upper bound of the score, for several finest strides.

    python benchmarks/reachable.py --data-root COCO

torchvision's FCOS learns an object at the points of cells that lie in its box, near its center, at the levels for its
size; a point that several boxes share is assigned to the smallest. An object without a point is never learned. For the
images of the recipe coco_overfit, this counts the objects with a point, as torchvision matches them, and scores their
true boxes, with the NMS of the recipe, as if a model had predicted them exactly. Nothing is trained.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torchvision.ops import batched_nms

from graticule.lab.recipes.load import load_recipe
from graticule.lab.tasks.parts.detection_scores import CocoScores
from graticule.lab.training.task import task_of


def reached(recipe: Any) -> tuple[int, int, dict[str, float]]:
    """Return the number of objects other than crowds, how many of them have a point, and the scores of those."""
    task = task_of(recipe)
    data = task.build_data()
    model = task.build_model(task.describe(data)).train()
    matched: list[Any] = []
    model.model.head.compute_loss = lambda targets, outputs, anchors, found: matched.extend(found) or {}
    scores, objects, found = CocoScores(), 0, 0
    truths = {int(target["image_id"]): target for _, batch in data.eval_dataloader(recipe.fit) for target in batch}
    for images, targets in data.train_dataloader():
        matched.clear()
        with torch.no_grad():
            model(images, [{**target, "labels": target["labels"] + 1} for target in targets])
        for image, target, points in zip(images, targets, matched, strict=True):
            objects += len(target["boxes"])
            chosen = points[points >= 0].unique()
            boxes, labels = target["boxes"][chosen].float(), target["labels"][chosen]
            kept = batched_nms(boxes, torch.ones(len(boxes)), labels, model.model.nms_thresh)
            found += len(chosen)
            exact = {"boxes": boxes[kept], "labels": labels[kept] + 1, "scores": torch.ones(len(kept))}
            scores.add(truths[int(target["image_id"])], exact, (image.shape[-2], image.shape[-1]))
    return objects, found, scores.compute()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-root", type=Path, required=True, help="folder of COCO")
    options = parser.parse_args()
    print("| finest stride | objects with a point | box mAP | small | medium | large |")
    print("| --- | --- | --- | --- | --- | --- |")
    for first in range(3):
        neck = f"simple_pyramid(channels=64, first={first})"
        recipe = dataclasses.replace(load_recipe("coco_overfit"), data_root=options.data_root, neck=neck)
        objects, found, scores = reached(recipe)
        values = [f"{scores[f'box_map{kind}']:.1f}" for kind in ("", "_small", "_medium", "_large")]
        print(f"| {2 << first} | {found} of {objects} | " + " | ".join(values) + " |", flush=True)


if __name__ == "__main__":
    main()
