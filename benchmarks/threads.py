"""Time of a training step alone and beside a busy process, for several settings of OpenMP's spinning threads.

    python benchmarks/threads.py                                            # vit_nano_patch4_28, batch 50
    python benchmarks/threads.py --model vit_tiny_patch16_224 --batch 8

Each number is the median over the rounds of the median step of a new process, in milliseconds; the settings are
interleaved. Run nothing else meanwhile.
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
STEP = """
import statistics, sys, time
import torch
import graticule
name, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = graticule.create_model(name, num_classes=10)
optimizer = torch.optim.AdamW(model.parameters())
images, labels = torch.randn(batch, model.in_chans, *model.img_size), torch.randint(10, (batch,))
times = []
for _ in range(steps):
    start = time.perf_counter()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    times.append(time.perf_counter() - start)
print(statistics.median(times[steps // 4:]) * 1000)
"""


def measure(arguments: argparse.Namespace, setting: dict[str, str], busy: bool) -> float:
    """Return the milliseconds per step in a new process; if `busy`, beside another process that computes."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    beside = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        command = [sys.executable, "-c", STEP, arguments.model, str(arguments.batch), str(arguments.steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=inherited | setting)
    finally:
        if beside is not None:
            beside.kill()
            beside.wait()
    return float(done.stdout)


def main() -> None:
    """Measure the settings, interleaved, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="vit_nano_patch4_28")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[tuple[str, bool], list[float]] = {(name, busy): [] for name in SETTINGS for busy in (False, True)}
    for _ in range(arguments.rounds):
        for (name, busy), times in found.items():
            times.append(measure(arguments, SETTINGS[name], busy))
    print(f"{arguments.model}, batch {arguments.batch}, {os.cpu_count()} cores, ms per step")
    print("| setting | alone | beside a busy process |\n| --- | --- | --- |")
    for name in SETTINGS:
        alone, beside = (median(found[name, busy]) for busy in (False, True))
        print(f"| {name} | {alone:.0f} | {beside:.0f} |")


if __name__ == "__main__":
    main()
