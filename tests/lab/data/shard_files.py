"""Small folders of distinct images, and tars made by hand."""

import io
import tarfile

import numpy as np
from PIL import Image


def numbered(number):
    """Return a PNG of one color that identifies it: its first channel is the low byte of the number."""
    content = io.BytesIO()
    Image.new("RGB", (6, 4), (number % 256, number // 256, 7)).save(content, "PNG")
    return content.getvalue()


def number_of(image):
    red, green, _ = np.asarray(image)[0, 0].tolist()
    return 256 * green + red


def write_numbered(root, classes=2, train=37, val=3):
    """Write image folders; the images of both splits are numbered from 0, class by class."""
    for split, each in (("train", train), ("val", val)):
        for label in range(classes):
            folder = root / split / f"class {label}"
            folder.mkdir(parents=True)
            for n in range(each):
                (folder / f"{n:04d}.PNG").write_bytes(numbered(each * label + n))
    return root


def write_tar(path, members, mode="w"):
    """Write a tar of (name, content); if content is None, `name` is a TarInfo that defines the member."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            if content is None:
                tar.addfile(name)
            else:
                header = tarfile.TarInfo(name)
                header.size = len(content)
                tar.addfile(header, io.BytesIO(content))
    return path


def samples(labels, first=0):
    """Return the members of a shard: an image and the number of its class for every label."""
    for number, label in enumerate(labels, start=first):
        yield f"{number:03d}.png", numbered(number)
        yield f"{number:03d}.cls", str(label).encode()
