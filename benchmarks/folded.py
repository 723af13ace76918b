"""Cost of position information after folding: inference of folded LaPE over the default joining, interleaved.

    python benchmarks/folded.py                                                # eager, DeiT-Ti and Swin-Ti
    python benchmarks/folded.py --run eager compile torch-export onnx --batch 1
    python benchmarks/folded.py --models vit_nano_patch4_28 --rounds 5 --batch 2   # a quick trial

All models run in one process; each round runs each model once, in an order that rotates. For each model and each
runtime it prints the median and quartiles of the ratios per round, and whether the median reaches the goal: folded LaPE
takes at most 1.005 times as long as the default joining. The default joining over itself shows the noise: if its
quartiles are farther from 1 than the goal, the result is inconclusive. Exported programs are always folded.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from turns import Step, in_turns, inference_step, print_ratios

import graticule
from graticule.backbones.base import Backbone
from graticule.backbones.registry import MODELS

GOAL = 1.005
#: Name -> the arguments of the model; Swin's relative bias is kept in addition to the table.
CHOICES: dict[str, dict[str, Any]] = {
    "default": {"joining": "default"},
    "default again": {"joining": "default"},
    "lape": {"joining": "lape"},
    "lape folded": {"joining": "lape"},
}
PAIRS = [("lape folded", "default"), ("lape folded", "lape"), ("default again", "default")]
SUFFIXES = {"torch-export": ".pt2", "onnx": ".onnx"}


def build(model: str, name: str) -> Backbone:
    """Build a model of `CHOICES`; adds an absolute table if the model has none by default."""
    torch.manual_seed(0)
    kind = MODELS[model].kind
    encoding = kind.default_encoding
    if "learnable" not in encoding:
        encoding = f"learnable + {encoding}"
    built = graticule.create_model(model, encoding=encoding, **CHOICES[name]).eval()
    return graticule.fold(built) if name == "lape folded" else built


def step_of(model: Backbone, images: Tensor, run: str, folder: Path) -> Step:
    """Build a forward pass: of the module, of the compiled module, or of an exported file."""
    if run in ("eager", "compile"):
        return inference_step(model, images, bf16=False, compile=run == "compile")
    from graticule.surgery.export import FORMATS

    path = folder / f"{id(model)}{SUFFIXES[run]}"
    graticule.export(model, path, run, dynamic=["batch"] if len(images) > 1 else [])
    call: Callable[[Tensor], Sequence[Tensor]] = FORMATS[run].open(path)

    def step() -> None:
        call(images)

    return step


def within_goal(times: Mapping[str, Sequence[float]]) -> str:
    """Return a line that says whether the median ratio is at most the goal."""
    ratios = [a / b for a, b in zip(times["lape folded"], times["default"], strict=True)]
    middle = statistics.median(ratios)
    return f"  folded LaPE takes {middle:.4f} times the default: {'at most' if middle <= GOAL else 'above'} {GOAL}"


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["deit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
    parser.add_argument("--run", nargs="+", default=["eager"], choices=["eager", "compile", *SUFFIXES])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, for a machine with other load")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    print(f"batch {options.batch}, float32, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for model in options.models:
        for run in options.run:
            with tempfile.TemporaryDirectory() as folder:
                built = {name: build(model, name) for name in CHOICES if run in ("eager", "compile") or name != "lape"}
                sizes = (next(iter(built.values())).in_chans, *next(iter(built.values())).img_size)
                images = torch.randn(options.batch, *sizes)
                steps = {name: step_of(one, images, run, Path(folder)) for name, one in built.items()}
                times = in_turns(steps, rounds=options.rounds, warmup=options.warmup, device="cpu", clock=clock)
            print_ratios(f"{model}, {run}", times, PAIRS)
            print(within_goal(times))


if __name__ == "__main__":
    main()
