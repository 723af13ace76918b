"""Augmented images per second of one core, or of a GPU: ours by Pillow, timm's by Pillow, and ours for whole batches.

    python benchmarks/images.py                      # the recipe vit_lite_cifar10 on images of 32 x 32, one thread
    python benchmarks/images.py --device cuda        # whole batches on a GPU

The images are random bytes; all three have the recipe's crops, flips, RandAugment, normalization and erasing. They run
in turns, and the times are processor times, so another load on the machine changes them little. Goal: a run of
three minutes on CIFAR-10 needs 85,000 images per second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from timm.data.transforms_factory import create_transform
from turns import in_turns

from graticule.lab.data.device_transforms import AugmentedImages
from graticule.lab.data.images import ArrayImages, DatasetInfo
from graticule.lab.data.sampling import BatchIndices
from graticule.lab.data.transforms import ImageExamples, training_transform
from graticule.lab.recipes.load import load_recipe

INFO = DatasetInfo("cifar10", (*"0123456789",), 3, (32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def passes(recipe: str, count: int, device: str) -> dict[str, Callable[[], None]]:
    """Build the functions that augment `count` images once, by name."""
    augmentation, size = load_recipe(recipe).augmentation, (32, 32)
    pixels = np.random.default_rng(0).integers(256, size=(count, *size, 3)).astype(np.uint8)
    labels, indices, epochs = np.zeros(count, np.int64), np.arange(count), iter(range(10**9))
    examples = ImageExamples(ArrayImages(pixels, labels), indices, training_transform(INFO, size, augmentation))
    timms = create_transform(
        (3, *size),
        is_training=True,
        scale=augmentation.scale,
        hflip=augmentation.hflip,
        auto_augment=augmentation.rand_augment,
        interpolation="random",
        re_prob=augmentation.erasing,
        re_mode="pixel",
        mean=INFO.mean,
        std=INFO.std,
    )
    timms.transforms[-1].device = "cpu"
    stored = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    batches = AugmentedImages(stored, labels, INFO, size, augmentation, 0).to(torch.device(device))

    def ours_whole() -> None:
        epoch = next(epochs)
        for start in range(0, count, 128):
            batches[BatchIndices(indices[start : start + 128], epoch)]

    def ours_single() -> None:
        examples[BatchIndices(indices, next(epochs))]

    def timms_single() -> None:
        for image in pixels:
            timms(Image.fromarray(image))

    return {"ours by Pillow": ours_single, "timm's by Pillow": timms_single, "ours, whole batches": ours_whole}


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="vit_lite_cifar10")
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cpu", help="of whole batches; for a GPU, take 50,000 images")
    parser.add_argument("--quick", action="store_true", help="few images, as a test")
    options = parser.parse_args()
    if options.quick:
        options.images, options.rounds = 128, 2
    torch.set_num_threads(1)
    steps = passes(options.recipe, options.images, options.device)
    gpu = options.device == "cuda"
    if gpu:
        steps = {name: step for name, step in steps.items() if "whole" in name}
    clock = time.perf_counter if gpu else time.process_time
    times = in_turns(steps, rounds=options.rounds, warmup=1, device=options.device, clock=clock)
    print(f"{options.recipe}, {options.images} images, {options.device}, one thread, torch {torch.__version__}")
    for name, seconds in times.items():
        rates = [options.images / second for second in seconds]
        low, _, high = statistics.quantiles(rates, n=4, method="inclusive")
        print(f"{name:20s} {statistics.median(rates):10,.0f} images per second (quartiles {low:,.0f} to {high:,.0f})")


if __name__ == "__main__":
    main()
