"""Cost of the training loop over a plain PyTorch loop, interleaved in one process.

    python benchmarks/loop.py                                    # digits: a small ViT, and ViT-Lite-7/4 at 32 x 32
    python benchmarks/loop.py --device cuda --bf16 --compile --models vit_lite_7_4_32 --batch 128

Both read batches from the same kind of loader and run the same step of the same model with the same optimizer. The
training loop pauses every --steps steps while the plain ("bare") loop runs as many. The ratio is that of their times.

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
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2

from graticule.lab.tasks.classification import Classification, Recipe
from graticule.lab.training.callbacks import History, Progress
from graticule.lab.training.checkpoints import Checkpoints
from graticule.lab.training.loop import build_trainer
from graticule.lab.training.run import Run
from graticule.lab.training.task import build_data, build_model


class Enough(Exception):
    """Stops training after the last measurement."""


class Turns(L.Callback):
    """Times steps of the training loop, alternating with as many steps of the plain loop."""

    def __init__(self, bare: Any, steps: int, rounds: int, device: torch.device) -> None:
        self.bare, self.steps, self.rounds, self.device = bare, steps, rounds, device
        self.times: list[tuple[float, float]] = []
        self.start = 0.0

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
        theirs = self.now() - began
        if trainer.global_step > 2 * self.steps:  # two rounds of warm-up
            self.times.append((ours, theirs))
        if len(self.times) == self.rounds:
            raise Enough
        self.start = self.now()


def bare_loop(model: Any, data: Any, recipe: Recipe, device: torch.device, bf16: bool, compile: bool) -> Any:
    """Build a step of the plain loop."""
    model = model.to(device).train()
    optimizer = create_optimizer_v2(model, opt=recipe.optimizer, lr=recipe.lr, weight_decay=recipe.weight_decay)
    call = torch.compile(model) if compile else model
    batches = itertools.chain.from_iterable(iter(data.train_dataloader(data.train_order())) for _ in itertools.count())

    def step() -> None:
        images, labels = next(batches)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(call(images), labels, label_smoothing=recipe.label_smoothing)
        loss.backward()
        optimizer.step()

    return step


def measure(recipe: Recipe, options: argparse.Namespace) -> list[tuple[float, float]]:
    """Time rounds of steps; returns the seconds of the training loop and of the plain loop."""
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as place:
        run = Run(Path(place))
        data = build_data(recipe)
        model = build_model(recipe, num_classes=data.info.num_classes, channels=data.info.channels)
        turns = Turns(
            bare_loop(copy.deepcopy(model), data, recipe, device, options.bf16, options.compile),
            options.steps,
            options.rounds,
            device,
        )
        batches = data.train_order()
        if options.compile:
            model.compile()
        callbacks = [turns, History(run.metrics_file, run.log_file), Progress(recipe.metric)]
        trainer = build_trainer(recipe, run, [*callbacks, Checkpoints(run.checkpoints, 1, None, recipe.metric)])
        warnings.filterwarnings("ignore")
        turns.start = time.perf_counter()
        with contextlib.suppress(Enough):
            task = Classification(model, recipe, batches, None)
            trainer.fit(task, data.train_dataloader(batches), data.val_dataloader())
    return turns.times


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", nargs="+", default=["vit_nano_patch4_28", "vit_lite_7_4_32"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5, help="steps between alternations")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"batch {options.batch}, {'bfloat16' if options.bf16 else 'float32'}, ", end="")
    print(
        f"{'compiled' if options.compile else 'eager'}, {where}, torch {torch.__version__}, lightning {L.__version__}"
    )
    for name in options.models:
        side = 28 if name.endswith("28") else 32
        recipe = Recipe(
            model=name,
            img_size=(side, side),
            batch_size=options.batch,
            epochs=1000,
            accelerator="gpu" if options.device == "cuda" else "cpu",
            precision="bf16-mixed" if options.bf16 else "32-true",
        )
        times = measure(recipe, options)
        ratios = [ours / bare for ours, bare in times]
        low, median, high = statistics.quantiles(ratios, n=4)
        ours, bare = (1000 * statistics.median(column) / options.steps for column in zip(*times, strict=True))
        rate = 1000 * options.batch / ours
        print(f"{name}: ms per step: ours {ours:.2f}, bare {bare:.2f}; ours / bare {median:.4f} ", end="")
        print(f"(quartiles {low:.4f} to {high:.4f}); {rate:,.0f} images per second")


if __name__ == "__main__":
    main()
