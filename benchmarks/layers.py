"""Time and memory of an attention layer with a bias over one without, interleaved in one process.

    python benchmarks/layers.py                                           # all shapes; CPU, float32
    python benchmarks/layers.py --shapes 4096 --threads 1 --clock cpu     # on a machine with other work

The layer is one of DeiT-Ti (192 channels, 3 heads), batch 1. "factors" appends the channels of a bias of squared
distances (4) or of a Sandwich of 4 channels per axis (9) to queries and keys; "table" passes a bias as (heads, N, N).
"given" is computed beforehand, as in a folded model; "made" is computed from the grid in each pass, as a model does
once per pass for all layers that share it; "learned" gets a gradient. Goal: factors / none at most 1.1 at 4,096 tokens.

Peak memory is that of one pass in a separate process, after a pass of a small shape: the growth of the resident memory
(read from /proc, so on Linux only). `benchmarks/gpu.py` measures on a GPU.
"""

from __future__ import annotations

import argparse
import functools
import math
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from turns import Step, in_turns, print_ratios

from graticule.encodings.forms.bias import squared_distance_factors
from graticule.encodings.sandwich import Sandwich
from graticule.layers.attention import Attention
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition

DIM, HEADS = 192, 3
#: Side of a grid that is fast.
SMALL = 4


def pass_of(call: Callable[[], Tensor], train: bool) -> Step:
    """Build a forward pass, or a forward and backward pass if `train`."""

    def step() -> None:
        with torch.set_grad_enabled(train):
            output = call()
        if train:
            output.sum().backward()

    return step


def bias_steps(side: int, *, train: bool) -> dict[str, Step]:
    """Build passes of attention with every kind of bias."""
    grid = Grid(side, side)
    layer = Attention(DIM, HEADS)
    x = torch.randn(1, grid.tokens, DIM, requires_grad=train)
    weights = -torch.tensor([2**-4, 2**-8, 2**-2])
    few = squared_distance_factors(grid, weights)
    more = Sandwich(grid, HEADS, channels=4).low_rank(grid)

    @functools.cache
    def table(learned: bool = False) -> Tensor:
        return torch.randn(HEADS, grid.tokens, grid.tokens, requires_grad=learned)

    biases: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "none again": lambda: None,
        "factors (4), given": lambda: few,
        "factors (9), given": lambda: more,
        "table, given": table,
        "factors (4), made": lambda: squared_distance_factors(grid, weights),
        "table, made": lambda: weights[:, None, None] * grid.offsets().to(weights.dtype).square().sum(-1),
        "table, learned": partial(table, learned=True),
    }

    def attend(bias: Callable[[], Any]) -> Tensor:
        return layer(x, LayerPosition(bias=bias()))

    return {name: pass_of(partial(attend, bias), train) for name, bias in biases.items()}


def status(name: str) -> float:
    """Return an entry of this process's status in MB: 'VmRSS' is the resident memory, 'VmHWM' its peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def growth(step: Step, small: Step) -> float:
    """Return the peak memory of a pass in MB, after a small pass, which allocates what only a first one allocates."""
    small()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, which the imports have raised
    before = status("VmRSS")
    step()
    return max(0.0, status("VmHWM") - before)


def measure(side: int, options: argparse.Namespace) -> None:
    """Time attention with every kind of bias, and print the ratios and the peak memory."""
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    for train in (False, True):
        torch.manual_seed(0)
        steps = bias_steps(side, train=train)
        times = in_turns(steps, rounds=options.rounds, warmup=options.warmup, device="cpu", clock=clock)
        phase = "forward and backward" if train else "forward"
        print_ratios(f"{side * side} tokens, {phase}", times, [(way, "none") for way in steps if way != "none"])
        ways = [way for way in steps if way != "none again"]
        if options.quick:
            small = [bias_steps(side, train=train) for _ in range(2)]
            peaks = [growth(small[0][way], small[1][way]) for way in ways]
        else:
            arguments = ["--threads", str(torch.get_num_threads()), "--memory-of", str(side), str(int(train))]
            command = [sys.executable, __file__, *arguments]
            peaks = [float(subprocess.run([*command, way], capture_output=True, check=True).stdout) for way in ways]
        print("  peak MB " + ", ".join(f"{way} {peak:.0f}" for way, peak in zip(ways, peaks, strict=True)), flush=True)


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=int, default=[196, 1024, 4096], help="tokens of square grids")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    parser.add_argument("--quick", action="store_true", help="a tiny grid and two rounds, as a test")
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        side, train, way = options.memory_of
        steps = (bias_steps(int(rows), train=train == "1")[way] for rows in (side, SMALL))
        print(growth(*steps))
        return
    if options.quick:
        options.shapes, options.rounds, options.warmup = [SMALL * SMALL], 2, 1
    print(f"float32, CPU, {options.threads} threads, {options.clock} time, torch {torch.__version__}")
    for tokens in options.shapes:
        measure(math.isqrt(tokens), options)


if __name__ == "__main__":
    main()
