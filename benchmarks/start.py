"""How long `import graticule` and commands that only print take, each in new processes: the median of the rounds.

python benchmarks/start.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median

ROUNDS = 3
CASES = {
    "import graticule": ["-c", "import graticule"],
    "graticule --help": ["-m", "graticule.cli", "--help"],
    "graticule --version": ["-m", "graticule.cli", "--version"],
    "graticule trian (misspelt)": ["-m", "graticule.cli", "trian"],
    "graticule pack --help": ["-m", "graticule.cli", "pack", "--help"],
    "graticule compare --help": ["-m", "graticule.cli", "compare", "--help"],
    "graticule runs": ["-m", "graticule.cli", "runs", os.devnull],
    "graticule models": ["-m", "graticule.cli", "models"],
    "import torch, timm (for comparison)": ["-c", "import torch, timm"],
}


def main() -> None:
    """Time every case in turns, and print a table."""
    found: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(ROUNDS):
        for name, arguments in CASES.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
            found[name].append(time.perf_counter() - start)
    print("| command | seconds |\n| --- | --- |")
    for name, seconds in found.items():
        print(f"| {name} | {median(seconds):.2f} |")


if __name__ == "__main__":
    main()
