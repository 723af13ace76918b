"""Cost of the training loop over a plain PyTorch loop, interleaved in one process.

    python benchmarks/loop.py                                    # digits: a small ViT, and ViT-Lite-7/4 at 32 x 32
    python benchmarks/loop.py --quick                            # a few steps

Both read batches from the same kind of loader, on the device of the model, and run the same step of the same model
with the same optimizer. The training loop pauses every --steps steps while the plain ("bare") loop runs as many. The
ratio is that of their times within an epoch. `benchmarks/gpu.py` measures the same on a GPU.

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
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2

from graticule.lab.tasks.classification import Classification, Recipe
from graticule.lab.training.callbacks import Checkpoints, History, Progress
from graticule.lab.training.loop import build_trainer
from graticule.lab.training.module import TrainingModule
from graticule.lab.training.run import Run


class Enough(Exception):
    """Stops training after the last measurement."""


class Turns(L.Callback):
    """Times steps of the training loop, alternating with as many steps of the plain loop."""

    def __init__(self, bare: Callable[[], None], steps: int, rounds: int, device: torch.device) -> None:
        self.bare, self.steps, self.rounds, self.device = bare, steps, rounds, device
        self.times: list[tuple[float, float]] = []
        self.start, self.epoch = 0.0, 0

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        if trainer.global_step % self.steps:
            return
        ours = self.now() - self.start
        began = self.now()
        for _ in range(self.steps):
            self.bare()
        seconds = self.now() - began
        if trainer.global_step > 2 * self.steps and self.epoch == trainer.current_epoch:  # after two rounds of warm-up
            self.times.append((ours, seconds))
        if len(self.times) == self.rounds:
            raise Enough
        self.start, self.epoch = self.now(), trainer.current_epoch


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
    task = Classification(recipe)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        for written in (run.checkpoints, run.events):
            written.mkdir(parents=True)
        saver = Checkpoints(run.checkpoints, 1, None, recipe.metric)
        callbacks: list[L.Callback] = [History(run), Progress(recipe.metric), saver]
        trainer = build_trainer(task, run, callbacks)
        device = trainer.strategy.root_device
        data = task.build_data()
        model = task.build_model(task.describe(data))
        task.setup(model, data, device)
        turns = Turns(bare_loop(copy.deepcopy(model), data, recipe, device), steps, rounds, device)
        trainer.callbacks.insert(0, turns)
        batches = data.train_order()
        if recipe.compile:
            model.compile()
        turns.start = time.perf_counter()
        with contextlib.suppress(Enough), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, held_out = TrainingModule(task, model, batches), data.eval_dataloader(data.size)
            trainer.fit(module, data.train_dataloader(batches), held_out)
    return turns.times


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
    print(f"torch {torch.__version__}, lightning {L.__version__}")
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
