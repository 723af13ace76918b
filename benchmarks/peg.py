"""Cost of a PEG: the time of CPVT-Ti over DeiT-Ti, with our PEG and with the paper's, interleaved in one process.

    python benchmarks/peg.py                                        # CPU, float32, batch 16
    python benchmarks/peg.py --device cuda --batch 256 --bf16       # eager
    python benchmarks/peg.py --device cuda --batch 256 --bf16 --compile

"five" has a PEG after each of the first five blocks, "GAP" no class token. "naive" is the paper's Algorithm 1, which
moves the tokens into a contiguous map (B, D, H, W) for every convolution.

Goal: DeiT-Ti / CPVT-Ti in time, which is CPVT-Ti over DeiT-Ti in throughput, at least 0.985. The paper (CPVT, 2023,
Table 4, a V100) reports 0.986 with five PEGs and 0.994 with five and GAP, relative to a DeiT with class token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor, nn
from turns import in_turns, inference_step, print_ratios, training_step

import graticule

FIVE = "peg(places=[0, 1, 2, 3, 4])"


class NaivePeg(nn.Module):
    """Algorithm 1 of the paper, with the contiguous map that its `view` requires if there is a class token."""

    def __init__(self, proj: nn.Module) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, x: Tensor, grid: Any) -> Tensor:
        """Apply the PEG to x: (B, N, D)."""
        prefix, tokens = x[:, : grid.prefix], x[:, grid.prefix :]
        features = tokens.transpose(1, 2).contiguous().view(len(x), -1, *grid.shape)
        features = self.proj(features) + features
        return torch.cat([prefix, features.flatten(2).transpose(1, 2)], dim=1)


def naive(name: str, **kwargs: Any) -> nn.Module:
    """Build a CPVT with the paper's PEGs."""
    model = graticule.create_model(name, **kwargs)
    for key, peg in model.position.pegs.items():
        model.position.pegs[key] = NaivePeg(peg.proj)
    return model


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "deit": lambda: graticule.create_model("deit_tiny_patch16_224"),
    "deit again": lambda: graticule.create_model("deit_tiny_patch16_224"),
    "cpvt": lambda: graticule.create_model("cpvt_tiny_patch16_224"),
    "cpvt five": lambda: graticule.create_model("cpvt_tiny_patch16_224", encoding=FIVE),
    "naive five": lambda: naive("cpvt_tiny_patch16_224", encoding=FIVE),
    "cpvt GAP five": lambda: graticule.create_model("cpvt_tiny_gap_patch16_224", encoding=FIVE),
    "naive GAP five": lambda: naive("cpvt_tiny_gap_patch16_224", encoding=FIVE),
}
PAIRS = [("deit", name) for name in BUILDERS if name != "deit"] + [
    ("naive five", "cpvt five"),
    ("naive GAP five", "cpvt GAP five"),
]


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--phases", nargs="+", default=["inference", "training"], choices=["training", "inference"])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"batch {options.batch}, {'bfloat16' if options.bf16 else 'float32'}, ", end="")
    print(f"{'compiled' if options.compile else 'eager'}, {where}, torch {torch.__version__}, timm {timm.__version__}")
    for phase in options.phases:
        build = training_step if phase == "training" else inference_step
        torch.manual_seed(0)
        images = torch.randn(options.batch, 3, 224, 224, device=options.device)
        steps = {
            name: build(make().to(options.device), images, bf16=options.bf16, compile=options.compile)
            for name, make in BUILDERS.items()
        }
        times = in_turns(steps, rounds=options.rounds, warmup=options.warmup, device=options.device)
        print_ratios(phase, times, PAIRS)


if __name__ == "__main__":
    main()
