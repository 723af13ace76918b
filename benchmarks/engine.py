"""Time of a comparison on several processes relative to one run at a time.

    python benchmarks/engine.py --processes 2

Eight runs (two choices, four seeds) of a small ViT on the digits are trained one run at a time with all threads, and by
`--on local:N` in N processes of one thread each, and the wall times are printed; they include one import of PyTorch per
process.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from graticule.lab.recipes.load import load_recipe
from graticule.lab.studies.comparison import compare
from graticule.lab.studies.execution import executor_of
from graticule.lab.tasks.classification import Recipe

SEEDS = [0, 1, 2, 3]


def choices(epochs: int) -> dict[str, Recipe]:
    """Return the recipes to compare."""
    base = dataclasses.replace(
        load_recipe("digits_quick"), epochs=epochs, warmup_epochs=0, accelerator="cpu", checkpoint_steps=20
    )
    return {name: dataclasses.replace(base, joining=name) for name in ("default", "lape")}


def scores(epochs: int, folder: Path, executor: Any = None) -> tuple[dict[str, list[float]], float]:
    """Run the comparison in `folder`; returns the scores and the wall time in seconds."""
    start = time.perf_counter()
    found = compare(choices(epochs), SEEDS, folder, progress=False, executor=executor)
    return found.scores, time.perf_counter() - start


def main() -> None:
    """Parse the options, then time or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            _, alone = scores(options.epochs, Path(folder) / f"here-{number}")
            with executor_of(f"local:{options.processes}") as executor:
                _, together = scores(options.epochs, Path(folder) / f"local-{number}", executor)
            print(
                f"one at a time, {torch.get_num_threads()} threads: {alone:.1f} s; local:{options.processes}: "
                f"{together:.1f} s; ratio {together / alone:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
