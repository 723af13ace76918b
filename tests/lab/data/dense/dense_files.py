"""Small data sets in the layouts of COCO and ADE20K."""

import json

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask


def draw_image(seed, height=24, width=40):
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8))


def rle(mask):
    """Return the compressed run lengths of a mask, as in COCO's files."""
    runs = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": list(runs["size"]), "counts": runs["counts"].decode()}


def uncompressed(mask):
    """Return the run lengths of a mask as a list, column by column, starting with zeros."""
    flat = mask.astype(np.uint8).T.reshape(-1)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flat, [2]])))
    runs = np.diff(np.concatenate([[0], edges]))
    return {"size": list(mask.shape), "counts": runs.tolist()}


def block(box, height=24, width=40):
    """Return a mask of ones in (left, top, width, height)."""
    mask = np.zeros((height, width), np.uint8)
    left, top, wide, tall = box
    mask[top : top + tall, left : left + wide] = 1
    return mask


def coco_values(**changes):
    """Return annotations of three images: two objects and a crowd, one object, none; classes 3 and 7."""
    boxes = [[4, 2, 10, 8], [20, 5, 6, 12], [0, 0, 40, 6], [1, 1, 5, 5]]
    polygon = [[4, 2, 14, 2, 14, 10, 4, 10]]
    shapes = [polygon, rle(block(boxes[1])), uncompressed(block(boxes[2])), rle(block(boxes[3]))]
    annotations = [
        {
            "id": number + 1,
            "image_id": (11, 11, 11, 5)[number],
            "category_id": (3, 7, 3, 7)[number],
            "bbox": box,
            "area": float(box[2] * box[3]),
            "iscrowd": int(number == 2),
            "segmentation": shapes[number],
        }
        for number, box in enumerate(boxes)
    ]
    images = [{"id": n, "file_name": f"{n}.jpg", "height": 24, "width": 40} for n in (11, 5, 8)]
    categories = [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}]
    return {"images": images, "annotations": annotations, "categories": categories, **changes}


def write_coco(root, values=None, splits=("train2017", "val2017")):
    """Write both splits with the same annotations."""
    values = coco_values() if values is None else values
    for split in splits:
        (root / split).mkdir(parents=True, exist_ok=True)
        for image in coco_values()["images"]:
            draw_image(image["id"]).save(root / split / f"{image['id']}.jpg", quality=95)
        (root / "annotations").mkdir(exist_ok=True)
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(values))
    return root


def write_masks(root, top=2, splits=("train", "val"), count=3):
    """Write images and masks with values from 0 to `top`."""
    for split in splits:
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True)
        for number in range(count):
            draw_image(number).save(root / "images" / split / f"{number}.jpg")
            values = np.random.RandomState(number).randint(0, top + 1, (24, 40)).astype(np.uint8)
            Image.fromarray(values).save(root / "annotations" / split / f"{number}.png")
    return root
