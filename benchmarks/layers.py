"""Time and memory of parts of a layer over another way to compute the same, interleaved in one process.

    python benchmarks/layers.py                                           # all parts; CPU, float32
    python benchmarks/layers.py --parts bias --shapes 4096 --threads 1 --clock cpu   # on a machine with other work

- bias: one attention layer of DeiT-Ti (192 channels, 3 heads), batch 1, with a bias over one without. "factors" appends
  the channels of a bias of squared distances (4) or of a Sandwich of 4 channels per axis (9) to queries and keys;
  "table" passes a bias as (heads, N, N). "given" is computed beforehand, as in a folded model; "made" is computed from
  the grid in each pass, as a model does once per pass for all layers that share it; "learned" gets a gradient. Goal:
  factors / none at most 1.1 at 4,096 tokens.
- sampling: `deformable_sample` over `grid_sample` called per level, with the queries of an injector of ViT-Adapter-Ti
  (tokens of the ViT, which read three levels) and of an extractor (the cells of three levels, which read one). Goal: at
  most 1.

Peak memory is measured for one pass in a separate process, after a pass of a small shape: the growth of the resident
memory (read from /proc, so on Linux only). `benchmarks/gpu.py` measures on a GPU.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from turns import Step, in_turns, print_ratios

from graticule.dense.deformable import cell_centers, deformable_sample
from graticule.encodings.forms.bias import squared_distance_factors
from graticule.encodings.sandwich import Sandwich
from graticule.layers.attention import Attention
from graticule.position.grid import Grid
from graticule.position.layer import LayerPosition

DIM, BIAS_HEADS, HEADS, POINTS = 192, 3, 6, 4
#: Tokens -> side of a square grid.
SIDES = {str(side * side): (side,) for side in (14, 32, 64)}
IMAGES = {
    f"{kind} {height}x{width}": (kind, height, width)
    for height, width in ((512, 512), (800, 1344))
    for kind in ("injector", "extractor")
}


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
    layer = Attention(DIM, BIAS_HEADS)
    x = torch.randn(1, grid.tokens, DIM, requires_grad=train)
    weights = -torch.tensor([2**-4, 2**-8, 2**-2])
    few = squared_distance_factors(grid, weights)
    more = Sandwich(grid, BIAS_HEADS, channels=4).low_rank(grid)

    @functools.cache
    def table(learned: bool = False) -> Tensor:
        return torch.randn(BIAS_HEADS, grid.tokens, grid.tokens, requires_grad=learned)

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


def by_grid_sample(value: Tensor, shapes: list[tuple[int, int]], locations: Tensor, weights: Tensor) -> Tensor:
    """Compute the same as `deformable_sample`, by `grid_sample` on each level."""
    batch, _, heads, dim = value.shape
    mixed = value.new_zeros(batch * heads, dim, locations.shape[1])
    for level, cells in enumerate(value.split([height * width for height, width in shapes], 1)):
        maps = cells.permute(0, 2, 3, 1).reshape(batch * heads, dim, *shapes[level])
        at = 2 * locations[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
        sampled = F.grid_sample(maps, at, align_corners=False)
        mixed = mixed + (sampled * weights[:, :, :, level].transpose(1, 2).flatten(0, 1)[:, None]).sum(-1)
    return mixed.unflatten(0, (batch, heads)).permute(0, 3, 1, 2).flatten(2)


def levels(kind: str, height: int, width: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the sizes of the maps of the queries, and of the maps that they read."""
    spatial = [(height // stride, width // stride) for stride in (8, 16, 32)]
    tokens = [(height // 16, width // 16)]
    return (tokens, spatial) if kind == "injector" else (spatial, tokens)


def sampling_steps(kind: str, height: int, width: int, *, train: bool) -> dict[str, Step]:
    """Build passes of both implementations of sampling."""
    queries, read = levels(kind, height, width)
    at = cell_centers(queries, torch.zeros(1))
    cells = sum(height * width for height, width in read)
    value = torch.randn(1, cells, HEADS, DIM // HEADS, requires_grad=True)
    shape = (1, at.shape[1], HEADS, len(read), POINTS)
    sides = torch.tensor([(width, height) for height, width in read])[:, None]
    locations = (at[:, :, None, :, None] + 2 * torch.randn(*shape, 2) / sides).requires_grad_()
    weights = torch.rand(*shape, requires_grad=True)
    ways = {"ours": deformable_sample, "grid_sample": by_grid_sample}
    return {name: pass_of(partial(way, value, read, locations, weights), train) for name, way in ways.items()}


@dataclass(frozen=True)
class Part:
    """A part of a layer.

    Args:
        steps: builds a pass of every way to compute it, for a shape.
        shapes: name -> arguments of `steps`.
        small: arguments of a shape that is fast.
        base: the way that the others are divided by.
    """

    steps: Callable[..., dict[str, Step]]
    shapes: dict[str, tuple[Any, ...]]
    small: tuple[Any, ...]
    base: str


PARTS = {
    "bias": Part(bias_steps, SIDES, (4,), "none"),
    "sampling": Part(sampling_steps, IMAGES, ("injector", 64, 64), "grid_sample"),
}


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


def measure(name: str, shape: str, options: argparse.Namespace) -> None:
    """Time every way to compute a part, and print the ratios and the peak memory."""
    part = PARTS[name]
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    for train in (False, True):
        torch.manual_seed(0)
        steps = part.steps(*(part.small if options.quick else part.shapes[shape]), train=train)
        times = in_turns(steps, rounds=options.rounds, warmup=options.warmup, device="cpu", clock=clock)
        phase = "forward and backward" if train else "forward"
        print_ratios(f"{name}, {shape}, {phase}", times, [(way, part.base) for way in steps if way != part.base])
        ways = [way for way in steps if way != "none again"]
        if options.quick:
            small = [part.steps(*part.small, train=train) for _ in range(2)]
            peaks = [growth(small[0][way], small[1][way]) for way in ways]
        else:
            arguments = ["--threads", str(torch.get_num_threads()), "--memory-of", name]
            command = [sys.executable, __file__, *arguments, shape, str(int(train))]
            peaks = [float(subprocess.run([*command, way], capture_output=True, check=True).stdout) for way in ways]
        print("  peak MB " + ", ".join(f"{way} {peak:.0f}" for way, peak in zip(ways, peaks, strict=True)), flush=True)


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--shapes", nargs="+", help="such as 4096 (tokens) or 'injector 512x512'; all by default")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    parser.add_argument("--quick", action="store_true", help="a tiny shape of every part and two rounds, as a test")
    parser.add_argument("--memory-of", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        name, shape, train, way = options.memory_of
        build = partial(PARTS[name].steps, train=train == "1")
        print(growth(build(*PARTS[name].shapes[shape])[way], build(*PARTS[name].small)[way]))
        return
    if options.quick:
        options.rounds, options.warmup = 2, 1
    print(f"float32, CPU, {options.threads} threads, {options.clock} time, torch {torch.__version__}")
    for name in options.parts:
        shapes = ["small"] if options.quick else options.shapes or list(PARTS[name].shapes)
        if unknown := set(shapes) - {"small", *PARTS[name].shapes}:
            parser.error(f"--shapes of {name} must be of {', '.join(PARTS[name].shapes)}, got {', '.join(unknown)}.")
        for shape in shapes:
            measure(name, shape, options)


if __name__ == "__main__":
    main()
