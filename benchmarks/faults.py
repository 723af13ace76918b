"""Replace the checkpoints of a run by a link, and fill its disk; check that nothing is lost, and nothing else changed.

    python benchmarks/faults.py --links 20 --disks 14 --seed 0

Links: while a run trains, its folder `checkpoints` is moved away at a random moment, and a link to another folder takes
its name, in which a file has the name of a checkpoint. However the run ends, that folder must stay as it was.

Disks: a run writes to a disk of 4 to 256 KB (a tmpfs, which only root can mount), and so do other commands on a
finished run. They must end with code 1 and one line that names the reason, or succeed, and leave no temporary or empty
file; the run, resumed on a larger disk, must end with the weights of a run that had space from the start.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from kills import COMMON, DIGITS, difference, runs_in, start, starts, wait

LINKED = f"train {DIGITS} --limit-train 800 --epochs 6".split()
FULL = f"{DIGITS} {COMMON} --limit-train 100 --epochs 2".split()
#: Commands that write to a disk, with the run and an output.
WRITERS = (
    "publish {run} {disk}/published",
    "export {run} --format torch-export --output {disk}/exported.pt2",
    "evaluate {run} --sizes 20 --output {disk}/evaluated",
    "report {run} --no-position --output {disk}/report.html",
    "correlations {run} --output {disk}/correlations",
    "explore {run} --no-open --output {disk}/explore.html",
    "gym --tasks column --steps 2 --test 4 --seeds 0 --choices encoding=none encoding=rope --output {disk}/gym",
    "translation {run} --images 2 --output {disk}/translation",
)
SIZES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # KB


def main() -> int:
    """Count the faults and their failures; returns 1 if there is a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=int, default=20, help="number of runs whose checkpoints become a link")
    parser.add_argument("--disks", type=int, default=len(SIZES), help="number of disks of different sizes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    given = parser.parse_args()
    moments = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        folder = Path(place)
        failures = [fault for number in range(given.links) for fault in swap(folder / f"link-{number}", moments)]
        if given.links:
            print(f"links: {given.links} runs whose checkpoints became a link, {len(failures)} failures")
        failures += disks(folder, given.disks)
    print(*failures, sep="\n")
    return 1 if failures else 0


def swap(folder: Path, moments: random.Random) -> list[str]:
    """Replace the checkpoints of a run by a link while it trains; returns the failures."""
    run, other = folder / "run", folder / "other"
    other.mkdir(parents=True)
    for name in ("step-000000001.ckpt", "step-000000003.ckpt", "best.json", "notes.txt", ".notes.tmp"):
        (other / name).write_text("precious")
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    process = start(LINKED, run)
    while not starts(run) and process.poll() is None:
        time.sleep(0.01)
    wait(process, moments.uniform(0, 3))
    if process.poll() is None:
        (run / "checkpoints").rename(run / "moved")
        (run / "checkpoints").symlink_to(other)
    process.wait(timeout=900)
    after = {path.name: path.read_bytes() for path in other.iterdir()}
    said = (folder / "said.txt").read_text()
    found = [f"{run}: {name} was removed or changed" for name in before if after.get(name) != before[name]]
    found += [f"{run}: {name} was written through the link" for name in sorted(after.keys() - before.keys())]
    return found + [f"{run}: a traceback" for _ in range("Traceback" in said)]


def disks(folder: Path, count: int) -> list[str]:
    """Fill `count` disks, by a run and by a command that writes; returns the failures."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(disk)]
    if count and subprocess.run(mount, capture_output=True).returncode:
        print("disks: not run, since no tmpfs can be mounted here")
        return []
    if not count:
        return []
    failures: list[str] = []
    try:
        whole = folder / "whole"
        command(["train", *FULL, "--output", whole])
        for number in range(count):
            size = SIZES[number % len(SIZES)]
            writer = WRITERS[number % len(WRITERS)].format(run=whole, disk=disk).split()
            for words in (["train", *FULL, "--output", disk / "run", "--auto-resume"], writer):
                resize(disk, f"{size}k")
                failures += [f"{size} KB, {words[0]}: {why}" for why in fill(words, disk)]
                if words[0] == "train":
                    resize(disk, "64m")
                    command(words)
                    (ours,), (theirs,) = runs_in(whole), runs_in(disk)
                    failures += [f"{size} KB, resumed: {why}" for why in [difference(ours, theirs)] if why]
                subprocess.run(["find", disk, "-mindepth", "1", "-delete"], check=True)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    print(f"disks: {count} of a run, {count} of another command, {len(failures)} failures")
    return failures


def resize(disk: Path, size: str) -> None:
    """Change the size of a disk."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


def fill(words: list[object], disk: Path) -> list[str]:
    """Run a command that fills a disk; returns what is wrong with its end."""
    done = run(words)
    said = done.stderr.strip().splitlines()
    left = [path for path in disk.rglob("*") if path.is_file() and path.name not in (".lock", "log.txt")]
    wrong = [f"left {path.name}" for path in left if path.suffix == ".tmp" or not path.stat().st_size]
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        wrong.append(f"ended with {done.returncode}: {said[-1:]}")
    if done.returncode == 1 and not ("graticule: error:" in said[-1] and re.search("space|disk full", said[-1])):
        wrong.append(f"said {said[-1]!r}")
    return wrong


def command(words: list[object]) -> None:
    """Run a command that must succeed."""
    done = run(words)
    if done.returncode:
        raise RuntimeError(done.stderr)


def run(words: list[object]) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    line = [sys.executable, "-m", "graticule", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=900)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
