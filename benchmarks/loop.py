"""Cost of the training loop over a plain PyTorch loop, interleaved in one process.

    python benchmarks/loop.py                                    # digits: a small ViT, and ViT-Lite-7/4 at 32 x 32
    python benchmarks/loop.py --quick                            # a few steps

Both read batches from the same kind of loader, on the device of the model, and run the same step of the same model
with the same optimizer. The training loop pauses every --steps steps while the plain ("bare") loop runs as many. The
ratio is taken of their times within an epoch. `benchmarks/gpu.py` measures the same on a GPU.

Goal: at most 1.03.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning_fabric
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2

from graticule.lab.tasks.classification import Classification
from graticule.lab.tasks.options import Recipe
from graticule.lab.training.loop import train


class Enough(Exception):
    """Stops training after the last measurement."""


class Turns(Classification):
    """Classification that times the steps of the training loop, in turns with as many steps of the plain loop.

    Every step calls `mix` once, before its loss or its graph, so the time between two calls is the time of a step.
    """

    steps: int
    rounds: int
    device: torch.device
    bare: Callable[[], None] | None = None

    def setup(self, model: Any, data: Any, device: torch.device) -> None:
        """Build the plain loop for a copy of the model."""
        super().setup(model, data, device)
        self.device = device
        self.times: list[tuple[float, float]] = []
        self.count, self.start, self.epoch = 0, 0.0, 0
        self.bare = bare_loop(copy.deepcopy(model), data, self.recipe, device)

    def now(self) -> float:
        """Return the time after all work of the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def mix(self, batch: Any, epoch: int) -> Any:
        """Return the batch; before that, every `steps` steps, let the plain loop make as many."""
        if self.count % self.steps == 0 and self.bare is not None:
            ours = self.now() - self.start
            began = self.now()
            for _ in range(self.steps):
                self.bare()
            if self.count > 2 * self.steps and self.epoch == epoch:  # after two rounds of warm-up
                self.times.append((ours, self.now() - began))
            if len(self.times) == self.rounds:
                raise Enough
            self.epoch = epoch
            self.start = self.now()
        self.count += 1
        return super().mix(batch, epoch)


def bare_loop(model: Any, data: Any, recipe: Recipe, device: torch.device) -> Callable[[], None]:
    """Build a step of the plain loop."""
    model = model.to(device).train()
    optimizer = create_optimizer_v2(model, opt=recipe.optimizer, lr=recipe.lr, weight_decay=recipe.weight_decay)
    call = torch.compile(model) if recipe.compile else model
    batches = itertools.chain.from_iterable(iter(data.train_dataloader(data.train_order())) for _ in itertools.count())

    def step() -> None:
        images, labels = next(batches)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16-mixed"):
            loss = F.cross_entropy(call(images), labels, label_smoothing=recipe.label_smoothing)
        loss.backward()
        optimizer.step()

    return step


def measure(recipe: Recipe, steps: int, rounds: int) -> list[tuple[float, float]]:
    """Time rounds of steps; returns the seconds of the training loop and of the plain loop."""
    task = Turns(recipe)
    task.steps, task.rounds = steps, rounds
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.suppress(Enough),
        mock.patch("graticule.lab.training.loop.task_of", return_value=task),
    ):
        train(recipe, Path(folder) / "run")
    return task.times


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit_nano_patch4_28", "vit_lite_7_4_32"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5, help="steps between alternations")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="a few steps of the first model")
    options = parser.parse_args()
    if options.quick:
        options.models, options.steps, options.rounds = options.models[:1], 1, 3
    print(f"batch {options.batch}, CPU, {torch.get_num_threads()} threads, ", end="")
    print(f"torch {torch.__version__}, lightning-fabric {lightning_fabric.__version__}")
    for name in options.models:
        side = 28 if name.endswith("28") else 32
        recipe = Recipe(model=name, img_size=(side, side), batch_size=options.batch, epochs=1000, accelerator="cpu")
        times = measure(recipe, options.steps, options.rounds)
        ratios = [ours / bare for ours, bare in times]
        low, median, high = statistics.quantiles(ratios, n=4)
        ours, bare = (1000 * statistics.median(column) / options.steps for column in zip(*times, strict=True))
        rate = 1000 * options.batch / ours
        print(f"{name}: ms per step: ours {ours:.2f}, bare {bare:.2f}; ours / bare {median:.4f} ", end="")
        print(f"(quartiles {low:.4f} to {high:.4f}); {rate:,.0f} images per second")


if __name__ == "__main__":
    main()
