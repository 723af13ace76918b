"""Cost of a bias on the attention logits: as two factors, as a table, and without one, interleaved in one process.

    python benchmarks/bias.py                                  # CPU, float32, N = 196, 1,024 and 4,096
    python benchmarks/bias.py --threads 1 --clock cpu          # CPU time, for a machine with other work
    python benchmarks/bias.py --device cuda --bf16

One attention layer of DeiT-Ti (192 channels, 3 heads), batch 1. "factors" appends the channels of a bias of squared
distances (4) or of a Sandwich of 4 channels per axis (9) to queries and keys; "table" passes a bias as (heads, N, N).
"given" is computed beforehand, as in a folded model; "made" is computed from the grid in each pass, as a model does
once per pass for all layers that share it. "learned" is a table that gets a gradient.

Peak memory is that of one pass in a separate process, including the bias: allocated memory on CUDA, the growth of the
resident memory on the CPU (read from /proc, so on Linux only).

Goal: factors / none at most 1.1 at 4,096 tokens on the CPU.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from turns import Step, in_turns, print_ratios

from graticule.encodings.forms.bias import squared_distance_factors
from graticule.encodings.sandwich import Sandwich
from graticule.layers.attention import Attention
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition

HEADS, DIM = 3, 192
SIDES = {196: 14, 1024: 32, 4096: 64}


def makers(grid: Grid, device: str) -> dict[str, Callable[[], Any]]:
    """Return the function that computes the bias of each kind: a table, factors or None."""
    weights = -torch.tensor([2**-4, 2**-8, 2**-2], device=device)
    few, more = squared_distance_factors(grid, weights), Sandwich(grid, HEADS, channels=4).to(device).low_rank(grid)

    @functools.cache
    def table(learned: bool = False) -> torch.Tensor:
        return torch.randn(HEADS, grid.tokens, grid.tokens, device=device, requires_grad=learned)

    return {
        "none": lambda: None,
        "none again": lambda: None,
        "factors (4), given": lambda: few,
        "factors (9), given": lambda: more,
        "table, given": table,
        "factors (4), made": lambda: squared_distance_factors(grid, weights),
        "table, made": lambda: weights[:, None, None] * grid.offsets(device).to(weights.dtype).square().sum(-1),
        "table, learned": functools.partial(table, learned=True),
    }


def step(make: Callable[[], Any], layer: Attention, x: torch.Tensor, *, train: bool, bf16: bool) -> Step:
    """Build a forward pass, or a forward and backward pass."""

    def run() -> None:
        with torch.set_grad_enabled(train), torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            y = layer(x, LayerPosition(bias=make()))
        if train:
            y.sum().backward()

    return run


def steps(tokens: int, options: argparse.Namespace, train: bool) -> dict[str, Step]:
    """Build the steps of all requested kinds."""
    torch.manual_seed(0)
    grid = Grid(SIDES[tokens], SIDES[tokens])
    layer = Attention(DIM, HEADS).to(options.device)
    x = torch.randn(1, tokens, DIM, device=options.device, requires_grad=train)
    made = makers(grid, options.device)
    wanted = {name: made[name] for name in made if not options.only or name == options.only}
    return {name: step(make, layer, x, train=train, bf16=options.bf16) for name, make in wanted.items()}


def growth(tokens: int, options: argparse.Namespace, train: bool) -> float:
    """Return the peak memory of one pass, in MB."""
    if options.device == "cuda":
        next(iter(steps(tokens, options, train).values()))()
        return torch.cuda.max_memory_allocated() / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, which the imports have raised
    before = resident("VmRSS")
    next(iter(steps(tokens, options, train).values()))()
    return resident("VmHWM") - before


def resident(key: str) -> float:
    """Return the resident memory of this process, in MB: 'VmRSS' is the current value, 'VmHWM' the peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 2**10


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", choices=["forward", "both"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(growth(options.tokens[0], options, options.memory_of == "both"))
        return
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {options.threads} threads"
    print(f"{'bfloat16' if options.bf16 else 'float32'}, {where}, {options.clock} time, torch {torch.__version__}")
    for tokens in options.tokens:
        for phase, train in (("forward", False), ("forward and backward", True)):
            made = steps(tokens, options, train)
            times = in_turns(made, rounds=options.rounds, warmup=options.warmup, device=options.device, clock=clock)
            print_ratios(f"{tokens} tokens, {phase}", times, [(name, "none") for name in made if name != "none"])
    for tokens in options.tokens:
        for phase in ("forward", "both"):
            call = [sys.executable, __file__, "--tokens", str(tokens), "--device", options.device, "--memory-of", phase]
            names = [name for name in makers(Grid(2, 2), "cpu") if name != "none again"]
            peaks = {
                name: float(subprocess.run([*call, "--only", name], capture_output=True, check=True, text=True).stdout)
                for name in names
            }
            print(f"\n{tokens} tokens, {phase}: peak MB " + ", ".join(f"{n} {mb:.0f}" for n, mb in peaks.items()))


if __name__ == "__main__":
    main()
