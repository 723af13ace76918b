"""Time of whole models: LaPE over the default joining, ours over timm's, and other pairs, interleaved in one process.

    python benchmarks/overhead.py                                            # DeiT-Ti, CPU, float32, batch 16
    python benchmarks/overhead.py --cases peg --batch 16 --rounds 60 --phases inference
    python benchmarks/overhead.py --cases swin --batch 1 --rounds 20

- deit: LaPE and folded LaPE over the default joining of DeiT-Ti, and DeiT-Ti over timm's. Goals: LaPE / default at most
  1.01 in training (LaPE, 2023, Table 6: 412 s / 410 s = 1.005), folded / default at most 1.005, ours / timm at most
  1.00.
- peg: DeiT-Ti over CPVT-Ti, which is CPVT-Ti over DeiT-Ti in throughput. "five" has a PEG after each of the first five
  blocks, "GAP" no class token. Goal: at least 0.985 (CPVT, 2023, Table 4, a V100: 0.986 with five, 0.994 with five and
  GAP).
- swin: as deit, for Swin-T over timm's.
- gmlp: gMLP-S with GGQPE and with its own unit over timm's. Goal: at most 1.05.

Every round runs each model once, in an order that rotates. Printed are the median and the quartiles of the ratios of
the two times of a round, so a machine that gets slower or faster during the run does not affect them. "again" is the
same model a second time: the noise. `benchmarks/gpu.py` measures on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
import torch
from torch import nn
from turns import in_turns, inference_step, print_ratios, training_step

import graticule

FIVE = "peg(places=[0, 1, 2, 3, 4])"
JOININGS = (("lape", "default"), ("folded", "default"), ("again", "default"))


@dataclass(frozen=True)
class Case:
    """Models to compare.

    Args:
        models: name -> function that builds it; those whose names contain 'folded' are for inference only.
        pairs: names of the models of each ratio.
    """

    models: dict[str, Callable[..., nn.Module]]
    pairs: tuple[tuple[str, str], ...]


def create(name: str, **arguments: Any) -> nn.Module:
    """Build a model of the library with 1,000 classes."""
    return graticule.create_model(name, num_classes=1000, **arguments)


def folded(name: str, **arguments: Any) -> nn.Module:
    """Build a folded model."""
    return graticule.fold(create(name, **arguments).eval())


def joinings(name: str, other: dict[str, Callable[..., nn.Module]], **rest: Any) -> Case:
    """Return the case of a family: default, LaPE, folded LaPE, and models of other code."""
    arguments = {"encoding": rest.pop("encoding")} if "encoding" in rest else {}
    models: dict[str, Callable[..., nn.Module]] = {
        "default": partial(create, name, **arguments),
        "again": partial(create, name, **arguments),
        "lape": partial(create, name, joining="lape", **arguments),
        "folded": partial(folded, name, joining="lape", **arguments),
    }
    ours = "ours" if "ours" in other else "default"
    other_key = next(key for key in other if key != "ours")
    return Case(models | other, ((ours, other_key), *JOININGS), **rest)


DEIT, SWIN, GMLP = "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "gmlp_s16_224"
CPVT, GAP = "cpvt_tiny_patch16_224", "cpvt_tiny_gap_patch16_224"
PEGS: dict[str, Callable[..., nn.Module]] = {
    "deit": partial(create, DEIT),
    "deit again": partial(create, DEIT),
    "cpvt": partial(create, CPVT),
    "cpvt five": partial(create, CPVT, encoding=FIVE),
    "cpvt GAP five": partial(create, GAP, encoding=FIVE),
}
GATED: dict[str, Callable[..., nn.Module]] = {
    "ggqpe": partial(create, GMLP, encoding="ggqpe"),
    "sgu": partial(create, GMLP),
    "timm": partial(timm.create_model, GMLP),
    "ggqpe folded": partial(folded, GMLP, encoding="ggqpe"),
}
CASES = {
    "deit": joinings(DEIT, {"timm": partial(timm.create_model, DEIT)}),
    "peg": Case(
        PEGS,
        tuple(("deit", name) for name in PEGS if name != "deit"),
    ),
    "swin": joinings(
        SWIN,
        {"ours": partial(create, SWIN), "timm": partial(timm.create_model, SWIN)},
        encoding="learnable+relative_bias",
    ),
    "gmlp": Case(GATED, tuple((name, "timm") for name in GATED if name != "timm")),
}


def measure(name: str, phase: str, options: argparse.Namespace) -> None:
    """Time the models of a case, interleaved, and print the ratios."""
    case = CASES[name]
    batch = 1 if options.quick else options.batch
    build = training_step if phase == "training" else inference_step
    torch.manual_seed(0)
    images = torch.randn(batch, 3, 224, 224)
    models = {key: make for key, make in case.models.items() if phase == "inference" or "folded" not in key}
    steps = {key: build(make(), images, bf16=False, compile=False) for key, make in models.items()}
    times = in_turns(steps, rounds=options.rounds, warmup=options.warmup, device="cpu")
    print_ratios(f"{name}, {phase}, batch {batch}", times, case.pairs)


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["deit"], choices=list(CASES))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--phases", nargs="+", default=["inference", "training"], choices=["training", "inference"])
    parser.add_argument("--quick", action="store_true", help="all cases with one image and two rounds, as a test")
    options = parser.parse_args()
    if options.quick:
        options.cases, options.rounds, options.warmup = list(CASES), 2, 0
    threads = torch.get_num_threads()
    print(f"float32, eager, CPU, {threads} threads, torch {torch.__version__}, timm {timm.__version__}")
    for name in options.cases:
        for phase in options.phases:
            if phase == "inference" or not options.quick or name == "deit":  # training takes the same code in all cases
                measure(name, phase, options)


if __name__ == "__main__":
    main()
