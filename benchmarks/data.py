"""Images per second of the loaders alone, and the rate that the models need, on this machine.

    python benchmarks/data.py [--workers 2] [--images 2000] [--device cuda]
    python benchmarks/data.py --reads                      # reading alone, in one process, image by image

Large images are crops of the two photographs that scikit-learn ships, as JPEG of 500 x 375, in a folder and packed,
with DeiT's augmentation. Small ones are 32 x 32 in color, in memory, like those of CIFAR: with the augmentation of
CIFAR's recipes, with crops and flips per image and per batch, and without augmentation.
Every row is the median of several interleaved passes over all images; the first pass of each is left out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader
from turns import training_step

import graticule
from graticule.lab.data.augmentation import Augmentation
from graticule.lab.data.images import ArrayImages, DatasetInfo
from graticule.lab.data.module import DataModule
from graticule.lab.data.registry import load_dataset
from graticule.lab.data.sampling import BatchOrder, EpochSampler
from graticule.lab.data.transforms import (
    SeededImages,
    ShiftedImages,
    TensorImages,
    evaluation_transform,
    training_transform,
)
from graticule.lab.recipes.load import load_recipe

SMALL = DatasetInfo("cifar10", tuple("0123456789"), 3, (32, 32), (0.5,) * 3, (0.25,) * 3)


def write_photographs(root: Path, count: int, size: tuple[int, int] = (375, 500)) -> None:
    """Write crops of two photographs, of `size` = (height, width), as a folder of two classes."""
    random = np.random.default_rng(0)
    for label, photograph in enumerate(load_sample_images().images):
        height, width = photograph.shape[:2]
        for split, number in (("train", count // 2), ("val", 4)):
            folder = root / split / str(label)
            folder.mkdir(parents=True)
            for index in range(number):
                top, left = random.integers(height - size[0]), random.integers(width - size[1])
                image = Image.fromarray(photograph[top : top + size[0], left : left + size[1]])
                image.save(folder / f"{index}.JPEG", quality=90)


def pack(folder: Path, output: Path) -> None:
    """Write an image folder as Arrow files, by Hugging Face `datasets`."""
    import datasets

    datasets.load_dataset("imagefolder", data_dir=str(folder), cache_dir=str(output.parent)).save_to_disk(str(output))


def seconds(loader: DataLoader) -> tuple[float, int]:
    """Time a pass; returns the seconds and the number of images."""
    start, images = time.perf_counter(), 0
    for batch, _ in loader:
        images += len(batch)
    return time.perf_counter() - start, images


def large(root: Path, workers: int) -> dict[str, Callable[[], DataLoader]]:
    """Return the loaders of large images."""
    augmentation = load_recipe("deit_tiny_imagenet").augmentation
    found: dict[str, Callable[[], DataLoader]] = {}
    for name, dataset in (("folder", "image_folder"), ("packed", "hugging_face")):
        data = DataModule(
            dataset, root=root / name, size=(224, 224), batch_size=64, workers=workers, augmentation=augmentation
        )
        data.setup()
        found[f"{name}, 500 x 375 to 224 x 224, DeiT's augmentation"] = data.train_dataloader
    return found


def small(images: int, workers: int) -> dict[str, Callable[[], DataLoader]]:
    """Return the loaders of small images."""
    random = np.random.default_rng(0)
    source = ArrayImages(random.integers(0, 256, (images, 32, 32, 3), dtype=np.uint8), random.integers(0, 10, images))
    shifts = Augmentation(random_crop_padding=4, hflip=0.5)
    recipe = load_recipe("vit_lite_cifar10").augmentation
    plain = evaluation_transform(SMALL, (32, 32), Augmentation())

    def loader(data, workers: int) -> Callable[[], DataLoader]:
        order = BatchOrder(EpochSampler(images, 0), 128)
        whole = not isinstance(data, SeededImages)
        return lambda: DataLoader(
            data, batch_sampler=order, num_workers=workers, collate_fn=(lambda batch: batch) if whole else None
        )

    return {
        "32 x 32 in memory, CIFAR's recipe": loader(
            SeededImages(source, training_transform(SMALL, (32, 32), recipe), 0), workers
        ),
        "32 x 32 in memory, crops and flips by the image": loader(
            SeededImages(source, training_transform(SMALL, (32, 32), shifts), 0), workers
        ),
        "32 x 32 in memory, crops and flips by the batch": loader(ShiftedImages(source, plain, shifts, SMALL, 0), 0),
        "32 x 32 in memory, no augmentation": loader(TensorImages(source, plain), 0),
    }


def need(name: str, side: int, batch: int, device: str) -> float:
    """Return the images per second that the training step of a model consumes."""
    torch.manual_seed(0)
    model = graticule.create_model(name, num_classes=1000).to(device)
    step = training_step(model, torch.randn(batch, 3, side, side, device=device), bf16=device == "cuda", compile=False)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return batch / statistics.median(times[1:])


def reads(passes: int) -> None:
    """Print the rate of reading images in epoch order: from a folder, and packed by `datasets`.

    The files are in the system's page cache. Ratios are relative to the folder.
    """
    for count, size in ((5000, (64, 64)), (2000, (375, 500))):
        with tempfile.TemporaryDirectory() as place:
            root = Path(place)
            write_photographs(root / "folder", count, size)
            pack(root / "folder", root / "packed")
            folder, _ = load_dataset("image_folder", "train", root / "folder")
            packed, _ = load_dataset("hugging_face", "train", root / "packed")
            order = EpochSampler(count, seed=0).indices(0).tolist()
            ways: dict[str, dict[str, Callable[[int], object]]] = {
                "bytes": {
                    "folder": folder.read,
                    "packed": packed.read,
                },
                "decoded": {
                    "folder": folder.__getitem__,
                    "packed": packed.__getitem__,
                },
            }
            for what, by_name in ways.items():
                chosen = order if what == "bytes" else order[:1000]
                rates: dict[str, list[float]] = {name: [] for name in by_name}
                for _ in range(passes):
                    for name, read in by_name.items():
                        start = time.perf_counter()
                        for index in chosen:
                            read(index)
                        rates[name].append(len(chosen) / (time.perf_counter() - start))
                first = statistics.median(rates["folder"])
                for name, found in rates.items():
                    rate = statistics.median(found)
                    print(f"{size[1]} x {size[0]}, {what}, {name}: {rate:,.0f} images/s, ratio {rate / first:.2f}")


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--reads", action="store_true", help="time only reading")
    options = parser.parse_args()
    if options.reads:
        return reads(options.passes)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {options.images} images per pass\n")
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write_photographs(root / "folder", options.images)
        pack(root / "folder", root / "packed")
        made = {
            (name, workers): build
            for workers in options.workers
            for name, build in (large(root, workers) | small(options.images, workers)).items()
            if workers == options.workers[0] or ("batch" not in name and "no aug" not in name)
        }
        rates: dict[tuple[str, int], list[float]] = {key: [] for key in made}
        for round in range(options.passes + 1):
            for key, build in made.items():
                spent, images = seconds(build())
                if round:
                    rates[key].append(images / spent)
    for (name, workers), found in sorted(rates.items()):
        low, high = min(found), max(found)
        how = f"{workers} workers" if "by the batch" not in name and "no aug" not in name else "by batches"
        print(f"{name}, {how}: {statistics.median(found):,.0f} images/s ({low:,.0f} to {high:,.0f})")
    print()
    for name, side, batch in (("deit_tiny_patch16_224", 224, 16), ("vit_lite_7_4_32", 32, 64)):
        where = torch.cuda.get_device_name() if options.device == "cuda" else "this CPU"
        print(f"the training step of {name} needs {need(name, side, batch, options.device):,.0f} images/s on {where}")


if __name__ == "__main__":
    main()
