"""Small image folders in ImageNet's layout, and these as Arrow files."""

import io

import numpy as np
from PIL import Image


def draw_image(seed, height=40, width=56):
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8))


def write_folder(root, classes=("cat", "dog"), per_class=3, val="val"):
    """Write `per_class` JPEGs per class; number n of class c is `draw_image(10 * c + n)`."""
    for split in ("train", val):
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for n in range(per_class):
                draw_image(10 * label + n).save(root / split / name / f"{n}.JPEG", quality=95)
    return root


def packed(root, output):
    """Write an image folder as Arrow files, as the docs say; returns `output`."""
    import datasets

    datasets.load_dataset("imagefolder", data_dir=str(root), cache_dir=f"{output}.cache").save_to_disk(str(output))
    return output


def numbered(number):
    """Return a PNG of one color that identifies it: its first channel is the low byte of the number."""
    content = io.BytesIO()
    Image.new("RGB", (6, 4), (number % 256, number // 256, 7)).save(content, "PNG")
    return content.getvalue()


def number_of(image):
    red, green, _ = np.asarray(image)[0, 0].tolist()
    return 256 * green + red


BROKEN = {
    "truncated": lambda content: content[: len(content) // 2],
    "not an image": lambda content: b"<html>not found</html>",
    "zero bytes": lambda content: b"",
}
