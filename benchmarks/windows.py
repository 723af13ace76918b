"""Mixing without a matrix: time and memory of a GGQPE unit's product for several N, and PosMLP-T without windows.

    python benchmarks/windows.py --plot mixing.png   # the product, N from 49 to 16,384
    python benchmarks/windows.py --model 224 896                                  # PosMLP-T, whole grids as windows

The product: 96 channels in 4 groups, one sample, with the weights computed from the parameters, float32. "matrix"
computes the weights (4, N, N), "displacement" does not. Times are medians of interleaved
passes in one process, of a forward pass and of a forward and backward pass; memory is the rise of the peak resident
memory of a separate process in its first pass (Linux only). Cases that would need more than --gigabytes are not run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from turns import Step, in_turns

import graticule
from graticule.encodings.forms.mixing import MixingPosition
from graticule.encodings.gqpe import QuadraticMixing
from graticule.lab.training.cost import inference_cost
from graticule.layers.gating import mix_tokens
from graticule.position.grid import Grid

CHANNELS, GROUPS = 96, 4
PATHS = ("matrix", "displacement")
SIDES = (7, 10, 14, 20, 28, 40, 56, 80, 112, 128)


def product_step(path: str, side: int, backward: bool, device: str = "cpu") -> Step:
    """Build one product of a sample of `side` x `side` tokens."""
    torch.manual_seed(0)
    grid = Grid(side, side)
    position = MixingPosition([QuadraticMixing(grid, GROUPS)], bias=False, product=path).to(device)
    x = torch.randn(1, grid.patches, CHANNELS, device=device, requires_grad=backward)
    grad = torch.randn_like(x)

    def step() -> None:
        with torch.set_grad_enabled(backward):
            y = mix_tokens(x, position(grid)[0].mixing)
        if backward:
            position.zero_grad()
            x.grad = None
            y.backward(grad)

    return step


def matrices(side: int, backward: bool) -> float:
    """Return a lower bound of the gigabytes of the matrix path: weights and logits, and their gradients."""
    return side**4 * (4 if backward else 2) * 4 * GROUPS / 1e9


def peak(path: str, side: int, backward: bool) -> float:
    """Return the megabytes by which the peak memory of a new process rises in one pass."""
    command = [sys.executable, __file__, "--peak", path, str(side), str(int(backward))]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(path: str, side: int, backward: bool) -> None:
    """Measure the rise of the peak memory in this process and print it."""
    product_step(path, 7, backward)()  # loads libraries and starts their threads
    step = product_step(path, side, backward)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current value
    before = status("VmRSS")
    step()
    print(json.dumps((status("VmHWM") - before) / 1024))


def status(name: str) -> int:
    """Read an entry of this process's status, in KiB (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def products(options: argparse.Namespace) -> None:
    """Measure the product at every size, print a table and plot it."""
    found: dict[tuple[str, bool], list[tuple[int, float, float]]] = {}
    for backward in (False, True):
        print("\nforward and backward" if backward else "forward")
        for side in options.sides:
            paths = [path for path in PATHS if path != "matrix" or matrices(side, backward) <= options.gigabytes]
            steps = {path: product_step(path, side, backward) for path in paths}
            rounds = max(3, min(options.rounds, 100_000 // side**2))
            times = in_turns(steps, rounds=rounds, warmup=1, device="cpu")
            line = f"N {side * side:6,}"
            for path in PATHS:
                if path in times:
                    ms, mb = 1e3 * statistics.median(times[path]), peak(path, side, backward)
                    found.setdefault((path, backward), []).append((side * side, ms, mb))
                    line += f"   {path} {ms:9.2f} ms {mb:8.1f} MB"
                else:
                    line += f"   {path}: not run, over {options.gigabytes} GB"
            print(line, flush=True)
            del steps
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(found).savefig(options.plot, dpi=150)
        print(f"wrote {options.plot}")


def draw(found: dict[tuple[str, bool], list[tuple[int, float, float]]]) -> Figure:
    """Plot time and memory against N."""
    figure = Figure(figsize=(9.5, 4), layout="constrained")
    for index, (ax, name) in enumerate(zip(figure.subplots(1, 2), ("time (ms)", "memory (MB)"), strict=True), start=1):
        for (path, backward), rows in found.items():
            label = f"{path}, {'forward and backward' if backward else 'forward'}"
            style = {"color": "#D55E00" if path == "matrix" else "#0072B2", "linestyle": "--" if backward else "-"}
            ax.plot([row[0] for row in rows], [row[index] for row in rows], "o", ms=4, label=label, **style)
        ax.set(xscale="log", yscale="log", xlabel="N, mixed tokens", ylabel=name)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    figure.suptitle(f"One product of a GGQPE unit, {CHANNELS} channels, {GROUPS} groups, float32")
    return figure


def models(options: argparse.Namespace) -> None:
    """Measure folded PosMLP-T with and without its windows, on one image."""
    for size in options.model:
        image = torch.randn(1, 3, size, size)
        for name, windows in (
            ("windows 14, 14, 14, 7", None),
            ("no windows", [size // 4 >> stage for stage in range(4)]),
        ):
            torch.manual_seed(0)
            model = graticule.create_model(
                "posmlp_tiny_224", img_size=size, **({"windows": windows} if windows else {})
            )
            cost = inference_cost(graticule.fold(model.eval()), image)
            tokens = [min(side, size // 4 >> stage) ** 2 for stage, side in enumerate(model.windows)]
            print(f"{size} x {size}, {name}: N {tokens}, {1 / cost.images_per_second:.2f} s per image", flush=True)


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=int, nargs="+", default=SIDES)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--gigabytes", type=float, default=12)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--model", type=int, nargs="+", metavar="SIZE")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        path, side, backward = options.peak
        return print_peak(path, int(side), backward == "1")
    print(f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}")
    return models(options) if options.model else products(options)


if __name__ == "__main__":
    main()
