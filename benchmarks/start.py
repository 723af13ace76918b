"""Measure how long `import graticule` and commands that compute little take, each in new processes.

    python benchmarks/start.py

Prints the medians of the rounds: wall time and CPU time (user and system) in seconds; CPU time depends less on other
programs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

CASES = {
    "import graticule": ["-c", "import graticule"],
    "graticule --help": ["-m", "graticule", "--help"],
    "graticule trian (misspelt)": ["-m", "graticule", "trian"],
    "graticule compare --help": ["-m", "graticule", "compare", "--help"],
    "graticule runs --help": ["-m", "graticule", "runs", "--help"],
    "graticule runs --srot name (misspelt)": ["-m", "graticule", "runs", "--srot", "name"],
    "graticule runs FOLDER, 100 runs": ["-m", "graticule", "runs", "FOLDER"],
    "graticule models": ["-m", "graticule", "models"],
    "graticule identify timm:vit_small_patch16_dinov3": [
        "-m",
        "graticule",
        "identify",
        "timm:vit_small_patch16_dinov3",
    ],
    "import torch, timm (for comparison)": ["-c", "import torch, timm"],
}


def write_runs(root: Path, number: int) -> None:
    """Write runs of 300 epochs each, with the files that training writes."""
    metric = {"key": "top1", "label": "top-1", "unit": "%", "highest": True, "decimals": 2}
    described = {"recipe": {"model": "vit_nano_patch4_28", "epochs": 300, "joining": "lape"}, "metric": metric}
    rows = "".join(f"{epoch},1.5,1.25,{epoch / 4},0.001,10\n" for epoch in range(1, 301))
    for index in range(number):
        folder = root / str(index)
        folder.mkdir()
        (folder / "recipe.json").write_text(json.dumps(described))
        (folder / "metrics.csv").write_text("epoch,train_loss,val_loss,val_top1,lr,seconds\n" + rows)


def main() -> None:
    """Time the cases, interleaved, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round and ten runs, as a test")
    options = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        write_runs(Path(folder), 10 if options.quick else 100)
        for _ in range(1 if options.quick else options.rounds):
            for name, arguments in CASES.items():
                command = [folder if argument == "FOLDER" else argument for argument in arguments]
                start, used = time.perf_counter(), processor()
                subprocess.run([sys.executable, *command], capture_output=True, check="misspelt" not in name)
                times[name].append((time.perf_counter() - start, processor() - used))
    print("| command | seconds | CPU seconds |\n| --- | --- | --- |")
    for name, pairs in times.items():
        clock, used = map(median, zip(*pairs, strict=True))
        print(f"| {name} | {clock:.2f} | {used:.2f} |")


def processor() -> float:
    """Return the CPU seconds that the child processes have used so far."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    main()
