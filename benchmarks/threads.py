"""Time of a training step alone and beside a busy process, for several settings of OpenMP's spinning threads.

    python benchmarks/threads.py                                            # vit_nano_patch4_28, batch 50
    python benchmarks/threads.py --model vit_tiny_patch16_224 --batch 8

Each number is the median over the rounds of the median step of a new process, in milliseconds, first alone, then beside
the busy process; the settings are interleaved. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from statistics import median

SETTINGS = {
    "no setting": {},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
}
STEPS = """
import statistics, subprocess, sys, time
import torch
import graticule
name, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = graticule.create_model(name, num_classes=10)
optimizer = torch.optim.AdamW(model.parameters())
images, labels = torch.randn(batch, model.in_chans, *model.img_size), torch.randint(10, (batch,))
def measure():
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[steps // 4:]) * 1000
alone = measure()
busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    print(alone, measure())
finally:
    busy.kill()
    busy.wait()
"""


def measure(options: argparse.Namespace, setting: dict[str, str]) -> tuple[float, float]:
    """Return the milliseconds per step in a new process, alone and beside another process that computes."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-c", STEPS, options.model, str(options.batch), str(options.steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=inherited | setting)
    alone, beside = map(float, done.stdout.split())
    return alone, beside


def main() -> None:
    """Measure the settings, interleaved, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_nano_patch4_28")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--quick", action="store_true", help="one setting and four steps, as a test")
    options = parser.parse_args()
    if options.quick:
        options.settings, options.steps, options.rounds, options.batch = options.settings[-1:], 4, 1, 4
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in options.settings}
    for _ in range(options.rounds):
        for name, rounds in times.items():
            rounds.append(measure(options, SETTINGS[name]))
    print(f"{options.model}, batch {options.batch}, {os.cpu_count()} cores, ms per step")
    print("| setting | alone | beside a busy process |\n| --- | --- | --- |")
    for name, rounds in times.items():
        alone, beside = map(median, zip(*rounds, strict=True))
        print(f"| {name} | {alone:.0f} | {beside:.0f} |")


if __name__ == "__main__":
    main()
