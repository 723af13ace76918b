"""What needs a GPU, in two runs of a few minutes each.

    python -m evidence.on_gpu checks --output FOLDER --minutes 6.5      # ceilings, tests, benchmarks/gpu.py
    python -m evidence.on_gpu trainings --output FOLDER --minutes 6.5 --data-root CIFAR10    # LaPE's Table 2

With --quick both run the same code on the CPU, on tiny inputs. Each check is a process with a share of the time, so one
that fails or hangs does not stop the others. `on_gpu.json` has the state of every step, and is written after each, as
are the tables of the steps, so what is done is kept if the machine goes away. The trainings continue the table in
docs/data, and end 20 s before the time is over; with the same FOLDER and runs/ they resume from their checkpoints.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from evidence.studies.__main__ import main as train_study
from graticule.lab.training.run import surroundings
from graticule.system.files import make_folder, write_json

TOP = Path(__file__).parents[1]
TABLE = "study_lape_table2.csv"
#: Bytes of memory on the GPU that the benchmarks need.
MEMORY = 24 << 30
#: Seconds for the checkpoint of a run and the end of its process.
_RESERVE = 20.0
#: Tests that were never run on a GPU, and parts of benchmarks/gpu.py that missed their goals or were never run.
_TESTS = ("tests/gpu/test_device_runs.py", "tests/gpu/test_device_images.py")
_PARTS = (("models: deit", "loop"), ("position", "biases", "models: swin"))


class Steps:
    """Steps within some seconds from now on, and their states, which are written to a folder after each."""

    def __init__(self, output: Path, seconds: float, quick: bool) -> None:
        self.output, self.quick, self.until = make_folder(output), quick, time.monotonic() + seconds
        self.states: dict[str, Any] = {}

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return self.until - time.monotonic()

    def add(self, name: str, state: Any) -> None:
        """Print the state of a step, and write all."""
        print(f"{name}: {state}", flush=True)
        self.states[name] = state
        write_json(self.output / "on_gpu.json", {"quick": self.quick, **surroundings(), "steps": self.states})

    def call(self, name: str, arguments: list[str], share: float = 1.0) -> None:
        """Run Python with arguments within a share of the time that is left."""
        start, seconds = time.monotonic(), share * self.left
        try:
            done = subprocess.run([sys.executable, "-u", *arguments], cwd=TOP, timeout=max(seconds, 0), check=False)
            ended = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after its {max(seconds, 0):.0f} s"
        self.add(name, f"{ended}, {time.monotonic() - start:.0f} s")


def ceilings(steps: Steps) -> None:
    """Measure the products of bfloat16 matrices and the copies of memory."""
    device, size = ("cpu", 256) if steps.quick else ("cuda", 8192)
    a = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    copy = torch.empty_like(a)
    timers = [Timer(function, globals={"a": a, "copy": copy}) for function in ("a @ a", "copy.copy_(a)")]
    products, copies = (timer.timeit(20).median for timer in timers)
    steps.add("products", f"{2 * size**3 / products / 1e12:.4g} TFLOP/s, {size} x {size}, bfloat16")
    steps.add("copies", f"{4 * size**2 / copies / 1e9:.4g} GB/s, read and written")


def checks(steps: Steps, options: argparse.Namespace) -> None:
    """Measure the ceilings, run the tests, benchmarks/images.py, and benchmarks/gpu.py in the rest of the time."""
    ceilings(steps)
    quick = ["--quick"] if steps.quick else []
    chosen = ["-n", "0", "-k", "captured or operation"] if steps.quick else ["-n", "12"]
    tests = [test for test in _TESTS if (TOP / test).exists()]
    steps.call("tests", ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:benchmark", *chosen, *tests], share=0.35)
    images = quick or ["--device", "cuda", "--images", "50000", "--rounds", "5"]
    steps.call("images", ["benchmarks/images.py", *images], share=0.2)
    for parts in _PARTS[: 1 if steps.quick else None]:
        minutes = f"{max(steps.left - _RESERVE, 0) / 60:.2f}"
        arguments = [*quick, "--output", str(steps.output), "--minutes", minutes, "--parts", *parts]
        steps.call(f"benchmarks of {', '.join(parts)}", ["benchmarks/gpu.py", *arguments])


def trainings(steps: Steps, options: argparse.Namespace) -> None:
    """Train the runs that the table lacks, and copy the history of every run."""
    quick = ["--quick"] if steps.quick else []
    if not steps.quick and not (steps.output / TABLE).exists():
        shutil.copy(TOP / "docs/data" / TABLE, steps.output)
    data = ["--copies", "--data-root", str(options.data_root.resolve()), "--output", str(steps.output)]
    minutes = max(steps.left - _RESERVE, 1) / 60
    os.chdir(TOP)
    try:  # in this process, so that no import counts
        train_study(["lape_table2", *quick, *data, "--minutes", f"{minutes:.3f}"])
        steps.add("trainings", f"ended with {steps.left:.0f} s left")
    except Exception as error:
        steps.add("trainings", f"{type(error).__name__}: {error}")
    runs = TOP / "runs" / ("study-lape_table2" + "-quick" * steps.quick)
    histories = {
        str(path.parent.relative_to(runs)): path.read_text(encoding="utf-8") for path in runs.rglob("metrics.csv")
    }
    write_json(steps.output / "histories.json", histories)
    steps.add("histories", f"{len(histories)} runs")


def main(arguments: list[str] | None = None) -> None:
    """Run the checks or the trainings."""
    parser = argparse.ArgumentParser(
        "python -m evidence.on_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", choices=["checks", "trainings"])
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=6.5, help="time of the run")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="folder of CIFAR-10, for trainings")
    parser.add_argument("--quick", action="store_true", help="the same code on tiny inputs, on the CPU")
    options = parser.parse_args(arguments)
    if not options.quick and not torch.cuda.is_available():
        parser.error("no GPU found; --quick runs the same code on tiny inputs, on the CPU.")
    if not options.quick and (memory := torch.cuda.mem_get_info()[0]) < MEMORY:
        parser.error(f"the GPU must have {MEMORY >> 30} GiB of free memory, got {memory / 2**30:.1f} GiB.")
    steps = Steps(options.output.resolve(), 60 * options.minutes, options.quick)
    {"checks": checks, "trainings": trainings}[options.run](steps, options)


if __name__ == "__main__":
    main()
