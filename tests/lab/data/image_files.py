"""Small image folders in ImageNet's layout."""

import numpy as np
from PIL import Image


def picture(seed, height=40, width=56):
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8))


def write_folder(root, classes=("cat", "dog"), each=3, val="val"):
    """Write `each` JPEGs per class; number n of class c is `picture(10 * c + n)`."""
    for split in ("train", val):
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for n in range(each):
                picture(10 * label + n).save(root / split / name / f"{n}.JPEG", quality=95)
    return root


BROKEN = {
    "truncated": lambda content: content[: len(content) // 2],
    "not an image": lambda content: b"<html>not found</html>",
    "zero bytes": lambda content: b"",
}
