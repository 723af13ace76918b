"""Cost of mixing by position: the GGQPE unit over SGU's dense token layer, and gMLP-S over timm's, interleaved.

    python benchmarks/mixing.py                                     # CPU, float32, batch 8 and 32
    python benchmarks/mixing.py --device cuda --bf16                # eager
    python benchmarks/mixing.py --device cuda --bf16 --compile

A unit maps (B * windows, N, 2C) to (B * windows, N, C), forward and backward: its weights are computed once from the
parameters, the tokens of one half of the channels are mixed, and the other half is multiplied by them. The shapes are
those of the stages of PosMLP-T and of gMLP-S. "dense" is timm's SGU without its norm, so a linear layer over the
tokens; "timm" has the norm; "ours dense" is our SGU without a norm. "groups 1" is GQPE: one matrix for all channels.

Goals: ggqpe / dense at most 1.15 at N = 196; gMLP-S with GGQPE over timm's gmlp_s16_224 at most 1.05.
"""

from __future__ import annotations

import argparse

import timm
import torch
from timm.models.mlp_mixer import SpatialGatingUnit
from torch import nn
from turns import Step, in_turns, inference_step, print_ratios, training_step

import graticule
from graticule.encodings.forms.mixing import MixingPosition
from graticule.encodings.gqpe import QuadraticMixing
from graticule.encodings.sgu import DenseMixing
from graticule.layers.gating import GatingUnit
from graticule.position.grid import Grid

#: Side of a window, mixed channels, groups, windows per image.
SHAPES = {
    "PosMLP-T stage 1": (14, 192, 8, 16),
    "PosMLP-T stage 2": (14, 384, 16, 4),
    "PosMLP-T stage 3": (14, 768, 32, 1),
    "PosMLP-T stage 4": (7, 768, 64, 1),
    "gMLP-S": (14, 768, 8, 1),
}


class Unit(nn.Module):
    """Gating unit with its position."""

    def __init__(self, position: MixingPosition, dim: int) -> None:
        super().__init__()
        self.position = position
        self.gate = GatingUnit(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x: (B, N, 2C) to (B, N, C)."""
        return self.gate(x, self.position(self.position.grid)[0])


def units(side: int, channels: int, groups: int) -> dict[str, nn.Module]:
    """Build the units of a shape."""
    grid = Grid(side, side)
    dense = SpatialGatingUnit(2 * channels, grid.patches)
    dense.norm = nn.Identity()
    return {
        "ggqpe": Unit(MixingPosition([QuadraticMixing(grid, groups)]), 2 * channels),
        "groups 1": Unit(MixingPosition([QuadraticMixing(grid)]), 2 * channels),
        "ours dense": Unit(MixingPosition([DenseMixing(grid)]), 2 * channels),
        "dense": dense,
        "timm": SpatialGatingUnit(2 * channels, grid.patches),
    }


def unit_step(unit: nn.Module, x: torch.Tensor, grad: torch.Tensor, *, bf16: bool, compile: bool) -> Step:
    """Build a forward and backward pass."""
    call = torch.compile(unit, fullgraph=True) if compile else unit

    def step() -> None:
        x.grad = None
        unit.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            y = call(x)
        y.backward(grad.to(y.dtype))

    return step


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--what", nargs="+", default=["units", "model"], choices=["units", "model"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{'bfloat16' if options.bf16 else 'float32'}, {'compiled' if options.compile else 'eager'}, {where}, ", end=""
    )
    print(f"torch {torch.__version__}, timm {timm.__version__}")
    turns = {"rounds": options.rounds, "warmup": options.warmup, "device": options.device}
    how = {"bf16": options.bf16, "compile": options.compile}
    if "units" in options.what:
        for name, (side, channels, groups, windows) in SHAPES.items():
            for batch in options.batches:
                torch.manual_seed(0)
                shape = (batch * windows, side * side, 2 * channels)
                x = torch.randn(shape, device=options.device, requires_grad=True)
                grad = torch.randn(*shape[:2], channels, device=options.device)
                made = units(side, channels, groups)
                steps = {key: unit_step(unit.to(options.device), x, grad, **how) for key, unit in made.items()}
                title = f"{name}, batch {batch}: {shape[0]} x {shape[1]} tokens, {channels} channels, {groups} groups"
                pairs = [(key, "dense") for key in steps if key != "dense"] + [("ggqpe", "ours dense")]
                print_ratios(title, in_turns(steps, **turns), pairs)
    if "model" in options.what:
        for phase, build in (("training step", training_step), ("inference", inference_step)):
            for batch in options.batches:
                torch.manual_seed(0)
                images = torch.randn(batch, 3, 224, 224, device=options.device)
                models = {
                    "ggqpe": graticule.create_model("gmlp_s16_224", encoding="ggqpe"),
                    "sgu": graticule.create_model("gmlp_s16_224"),
                    "timm": timm.create_model("gmlp_s16_224"),
                }
                if phase == "inference":
                    models["ggqpe folded"] = graticule.fold(graticule.create_model("gmlp_s16_224", encoding="ggqpe"))
                steps = {name: build(model.to(options.device), images, **how) for name, model in models.items()}
                times = in_turns(steps, **{**turns, "rounds": max(options.rounds // 3, 4)})
                print_ratios(f"gMLP-S {phase}, batch {batch}", times, [(key, "timm") for key in steps if key != "timm"])


if __name__ == "__main__":
    main()
