"""Time and memory of LaPE over the default joining, and of our DeiT-Ti over timm's, interleaved in one process.

    python benchmarks/overhead.py                                       # CPU, float32, batch 16
    python benchmarks/overhead.py --device cuda --batch 256 --bf16      # eager
    python benchmarks/overhead.py --device cuda --batch 256 --bf16 --compile

Every round runs each model once, in an order that rotates. Printed are the median and the quartiles of the ratios of
the two times of a round, so a machine that gets slower or faster during the run does not affect them. The ratio of two
runs of the same model shows the noise.

Goals: LaPE/default at most 1.01 in training (LaPE, 2023, Table 6, DeiT-Ti: 412 s / 410 s = 1.005), folded
LaPE/default at most 1.005 in inference, ours/timm at most 1.00 in both.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from turns import Step, in_turns, inference_step, print_ratios, training_step

import graticule

MODEL = "deit_tiny_patch16_224"
BUILDERS: dict[str, Callable[[], torch.nn.Module]] = {
    "default": lambda: graticule.create_model(MODEL),
    "default again": lambda: graticule.create_model(MODEL),
    "lape": lambda: graticule.create_model(MODEL, joining="lape"),
    "lape folded": lambda: graticule.fold(graticule.create_model(MODEL, joining="lape")),
    "timm": lambda: timm.create_model(MODEL),
}
PAIRS = [("lape", "default"), ("lape folded", "default"), ("default", "timm"), ("default again", "default")]


def build_step(name: str, phase: str, options: argparse.Namespace) -> Step:
    """Build the step to time: a training step including the optimizer step, or a forward pass."""
    torch.manual_seed(0)
    model = BUILDERS[name]().to(options.device)
    images = torch.randn(options.batch, 3, 224, 224, device=options.device)
    build = training_step if phase == "training" else inference_step
    return build(model, images, bf16=options.bf16, compile=options.compile)


def measure(phase: str, options: argparse.Namespace) -> None:
    """Time all models, interleaved, and print the ratios."""
    names = [name for name in BUILDERS if phase == "inference" or name != "lape folded"]
    steps = {name: build_step(name, phase, options) for name in names}
    times = in_turns(steps, rounds=options.rounds, warmup=options.warmup, device=options.device)
    print_ratios(phase, times, PAIRS)


def memory(phase: str, options: argparse.Namespace) -> None:
    """Print the peak memory of each model: of the device, or of a process that runs only this model."""
    found = {}
    for name in BUILDERS:
        if name == "default again" or (phase == "training" and name == "lape folded"):
            continue
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            step = build_step(name, phase, options)
            for _ in range(3):
                step()
            found[name] = torch.cuda.max_memory_allocated()
            del step
            gc.collect()
        else:
            command = [sys.executable, __file__, *sys.argv[1:], "--alone", name, phase]
            found[name] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{phase}: peak MB " + ", ".join(f"{name} {value / 1e6:.0f}" for name, value in found.items()))


def _peak_of_this_process() -> int:
    """Return the peak resident memory in bytes, from /proc, since getrusage keeps the parent's peak across exec."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--phases", nargs="+", default=["training", "inference"], choices=["training", "inference"])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--alone", nargs=2, metavar=("MODEL", "PHASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        step = build_step(*options.alone, options)
        for _ in range(3):
            step()
        print(_peak_of_this_process())
        return
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{MODEL}, batch {options.batch}, {'bfloat16' if options.bf16 else 'float32'}, ", end="")
    print(f"{'compiled' if options.compile else 'eager'}, {where}, torch {torch.__version__}, timm {timm.__version__}")
    for phase in options.phases:
        measure(phase, options)
        memory(phase, options)


if __name__ == "__main__":
    main()
