"""Images of many sizes: one row of tokens, one batch per size, one image at a time, and padded to the largest.

    python benchmarks/packed.py                        # ViT-Ti with rope, 32 images of 96 to 384 px, CPU, one thread
    python benchmarks/packed.py --model deit_small_patch16_224 --encoding learnable

The sides of each image are multiples of 16 drawn at random with a fixed seed; "padded" has black borders and computes
its tokens too, so its outputs are others: it is the cost of a batch without anything of this kind.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
from torch import Tensor
from turns import in_turns, print_ratios

import graticule


def draw(count: int, patch: int, sizes: int) -> list[Tensor]:
    """Draw images of `sizes` different shapes with sides from 96 to 384 px."""
    generator = torch.Generator().manual_seed(0)
    sides = torch.randint(96 // patch, 384 // patch + 1, (sizes, 2), generator=generator) * patch
    return [torch.randn(3, *sides[index % sizes].tolist(), generator=generator) for index in range(count)]


def main() -> None:
    """Time the four ways in turns and print tokens per second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--encoding", default="rope")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 8], help="numbers of different shapes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="three images and two rounds, as a test")
    options = parser.parse_args()
    if options.quick:
        options.count, options.sizes, options.rounds = 3, [2], 2
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = graticule.create_model(options.model, encoding=options.encoding).eval()
    for sizes in options.sizes:
        images = draw(options.count, model.patch_size[0], sizes)
        tokens = sum(model.grid_of(image[None]).tokens for image in images)
        largest = [max(image.shape[axis] for image in images) for axis in (1, 2)]
        padded = torch.stack(
            [
                torch.nn.functional.pad(image, (0, largest[1] - image.shape[2], 0, largest[0] - image.shape[1]))
                for image in images
            ]
        )
        shapes = {image.shape for image in images}
        batches = [torch.stack([image for image in images if image.shape == shape]) for shape in shapes]

        def run(batches: list[Tensor]) -> None:
            for batch in batches:
                model(batch)

        steps = {
            "packed": partial(model.forward_packed, images),
            "grouped": partial(run, batches),
            "one by one": partial(run, [image[None] for image in images]),
            "padded": partial(run, [padded]),
        }
        with torch.inference_mode():
            times = in_turns(steps, rounds=options.rounds, warmup=1, device="cpu")
        title = f"{len(images)} images of {len(shapes)} shapes, {tokens} tokens"
        pairs = [(name, "packed") for name in ("grouped", "one by one", "padded")]
        print_ratios(title, times, pairs)
        rates = ", ".join(f"{name} {tokens / statistics.median(rounds):,.0f}" for name, rounds in times.items())
        print(f"tokens per second: {rates}")


if __name__ == "__main__":
    main()
