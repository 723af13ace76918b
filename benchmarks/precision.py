"""Time of a training step in bf16-mixed and in float32 on this CPU, for small ViTs of several widths.

    python benchmarks/precision.py --rounds 8 --data docs/data/measured/precision.csv

A step is forward pass, loss, backward pass and AdamW on 50 images, on one thread; both precisions alternate. CPU time
of the process is measured, since other programs may run. --data writes the table to a file, from which
`python -m evidence.measured` writes it into docs/results/precision.md.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import platform
import time
from datetime import date
from pathlib import Path
from statistics import quantiles

import torch
import torch.nn.functional as F

import graticule
from evidence.measured import Cell

#: Channels, layers and side of the images: 5 x 5 or 7 x 7 patches and a class token.
MODELS = ((64, 4, 20), (64, 6, 28), (128, 4, 20), (192, 4, 20), (192, 4, 28))
BATCH = 50


def step_times(channels: int, depth: int, side: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds per step in float32 and in bf16-mixed."""
    sizes = {"embed_dim": channels, "depth": depth, "num_heads": channels // 32, "img_size": side}
    models = [graticule.create_model("vit_nano_patch4_28", **sizes) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in models]
    images, labels = torch.randn(BATCH, 1, side, side), torch.randint(0, 10, (BATCH,))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):  # the first is warm-up
        for mixed, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            start = time.process_time()
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(mixed)):
                loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            times[mixed].append(1e3 * (time.process_time() - start))
    return times[0][1:], times[1][1:]


def main() -> None:
    """Measure and print, and write the table if --data is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--data", type=Path, help="CSV file for the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = []
    for channels, depth, side in MODELS:
        plain, mixed = step_times(channels, depth, side, options.rounds)
        ratios = [b / a for a, b in zip(plain, mixed, strict=True)]
        row = f"{channels} channels, {depth} layers, {side} x {side} pixels"
        for column, values, places in (("float32 (ms)", plain, 0), ("bf16-mixed (ms)", mixed, 0), ("ratio", ratios, 2)):
            low, middle, high = (f"{value:.{places}f}" for value in quantiles(values, n=4))
            empty = dict.fromkeys(("unit", "deviation", "p", "adjusted"), "")
            origin = {
                "command": f"python benchmarks/precision.py --rounds {options.rounds}",
                "date": date.today().isoformat(),
                "machine": f"1 thread, {platform.machine()}, torch {torch.__version__}",
            }
            spread = {"low": low, "high": high} if column == "ratio" else {"low": "", "high": ""}
            cells.append(Cell(keys="model", row=row, column=column, value=middle, **spread, **empty, **origin))
        print(row, *(f"{cell.column} {cell}" for cell in cells[-3:]), sep=", ", flush=True)
    if options.data is not None:
        with options.data.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(field.name for field in dataclasses.fields(Cell))
            writer.writerows(dataclasses.astuple(cell) for cell in cells)


if __name__ == "__main__":
    main()
