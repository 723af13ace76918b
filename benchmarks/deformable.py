"""Cost of deformable attention and of position in dense models, interleaved in one process.

    python benchmarks/deformable.py                              # sampling, attention and detectors; CPU, float32
    python benchmarks/deformable.py --phases sampling --clock cpu --threads 1
    python benchmarks/deformable.py --phases detectors --device cuda --bf16 --size 800 1344

"sampling" compares `deformable_sample` with `grid_sample` called per level; "attention" compares a layer of deformable
attention, including projections, with plain attention among the tokens of the ViT; both for ViT-Adapter-Ti, with the
queries of an injector (the ViT's tokens, three levels) and of an extractor (the cells of three levels, one level), for
images of 512 x 512 and 800 x 1344 (800 x 1333 padded), forward and backward. "detectors" compares training steps of a
whole Mask R-CNN with ViT-Adapter-Ti and of a RetinaNet with PVT-tiny, with LaPE or PEG and with the default position.

Peak memory is that of one forward and backward pass in a separate process: allocated memory on CUDA, the growth of
the resident memory on the CPU (read from /proc, so on Linux only).

Goals: no slower than `grid_sample`; LaPE and PEG over default at most 1.01.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from turns import Step, in_turns, print_ratios

import graticule
from graticule.dense.deformable import DeformableAttention, cell_centers, deformable_sample
from graticule.layers.attention import Attention

DIM, HEADS, POINTS = 192, 6, 4
SIZES = {"512x512": (512, 512), "800x1344": (800, 1344)}
#: Backbone and further arguments of each detector.
DETECTORS = {
    "ViT-Adapter-Ti, Mask R-CNN": ("deit_tiny_patch16_224", {"head": "mask_rcnn", "neck": "adapter + fpn"}),
    "PVT-tiny, RetinaNet": ("pvt_tiny", {"head": "retinanet"}),
}
POSITIONS = {
    "default": {},
    "default again": {},
    "lape": {"joining": "lape"},
    "peg": {"encoding": "peg"},
}


def by_grid_sample(value: Tensor, shapes: list[tuple[int, int]], locations: Tensor, weights: Tensor) -> Tensor:
    """Compute the same as `deformable_sample`, by `grid_sample` on each level."""
    batch, _, heads, dim = value.shape
    mixed = value.new_zeros(batch * heads, dim, locations.shape[1])
    for level, part in enumerate(value.split([height * width for height, width in shapes], 1)):
        maps = part.permute(0, 2, 3, 1).reshape(batch * heads, dim, *shapes[level])
        at = 2 * locations[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
        sampled = F.grid_sample(maps, at, align_corners=False)
        mixed = mixed + (sampled * weights[:, :, :, level].transpose(1, 2).flatten(0, 1)[:, None]).sum(-1)
    return mixed.unflatten(0, (batch, heads)).permute(0, 3, 1, 2).flatten(2)


def levels(size: tuple[int, int], kind: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the sizes of the maps of the queries, and of the maps that they read."""
    spatial = [(size[0] // stride, size[1] // stride) for stride in (8, 16, 32)]
    tokens = [(size[0] // 16, size[1] // 16)]
    return (tokens, spatial) if kind == "injector" else (spatial, tokens)


def repeated(call: Callable[[], Tensor], backward: bool) -> Step:
    """Build a step: a forward pass, and a backward pass if `backward`."""

    def step() -> None:
        if backward:
            call().sum().backward()
        else:
            with torch.no_grad():
                call()

    return step


def sampling(size: tuple[int, int], kind: str, device: str, backward: bool) -> dict[str, Step]:
    """Build the steps of both implementations of sampling."""
    queries, read = levels(size, kind)
    at = cell_centers(queries, torch.zeros(1, device=device))
    cells = sum(height * width for height, width in read)
    value = torch.randn(1, cells, HEADS, DIM // HEADS, device=device, requires_grad=True)
    each = (1, at.shape[1], HEADS, len(read), POINTS)
    sides = torch.tensor([(width, height) for height, width in read], device=device)[:, None]
    locations = (at[:, :, None, :, None] + 2 * torch.randn(*each, 2, device=device) / sides).requires_grad_()
    weights = torch.rand(*each, device=device, requires_grad=True)
    ways = {"ours": deformable_sample, "grid_sample": by_grid_sample}
    return {name: repeated(partial(way, value, read, locations, weights), backward) for name, way in ways.items()}


def attention(size: tuple[int, int], kind: str, device: str, backward: bool) -> dict[str, Step]:
    """Build the steps of a layer of deformable attention and of one of plain attention."""
    queries, read = levels(size, kind)
    at = cell_centers(queries, torch.zeros(1, device=device))
    deformable = DeformableAttention(DIM, len(read), HEADS, POINTS).to(device)
    plain = Attention(DIM, 3).to(device)
    query = torch.randn(1, at.shape[1], DIM, device=device, requires_grad=True)
    value = torch.randn(1, sum(height * width for height, width in read), DIM, device=device, requires_grad=True)
    tokens = torch.randn(1, size[0] // 16 * (size[1] // 16), DIM, device=device, requires_grad=True)
    return {
        "deformable": repeated(partial(deformable, query, at, value, read), backward),
        "plain": repeated(partial(plain, tokens), backward),
    }


def detector(name: str, position: str, size: tuple[int, int], device: str, bf16: bool) -> Step:
    """Build a training step of a detector, including the optimizer step."""
    torch.manual_seed(0)
    backbone, parts = DETECTORS[name]
    model = graticule.create_detector(backbone, 80, img_size=size, **parts, **POSITIONS[position]).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    image = torch.rand(3, *size, device=device)
    box = torch.tensor([[0.1, 0.2, 0.5, 0.6], [0.4, 0.3, 0.9, 0.9]]) * torch.tensor([size[1], size[0]] * 2)
    target = {"boxes": box.to(device), "labels": torch.tensor([1, 2], device=device)}
    target["masks"] = torch.ones(2, *size, dtype=torch.uint8, device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            losses = model([image], [target])
        torch.stack(list(losses.values())).sum().backward()
        optimizer.step()

    return step


PHASES = {"sampling": sampling, "attention": attention}


def growth(phase: str, size: str, kind: str, which: str, device: str) -> float:
    """Return the peak memory of one forward and backward pass, in MB."""
    step = PHASES[phase](SIZES[size], kind, device, True)[which]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
        step()
        return torch.cuda.max_memory_allocated() / 2**20 - before
    small = PHASES[phase]((64, 64), kind, device, True)[which]
    small()  # allocates what only a first call allocates
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, which the imports have raised
    before = resident("VmRSS")
    step()
    return max(0.0, resident("VmHWM") - before)


def resident(which: str) -> float:
    """Return the resident memory of this process, in MB: 'VmRSS' is the current value, 'VmHWM' the peak."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.partition(f"{which}:")[2].split()[0]) / 1024


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"], help="cpu on a machine with other work")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument(
        "--sizes", nargs="+", default=list(SIZES), choices=list(SIZES), help="sizes for sampling, attention"
    )
    parser.add_argument("--size", type=int, nargs=2, default=(512, 512), help="image size of detectors")
    parser.add_argument("--detectors", nargs="+", default=list(DETECTORS), choices=list(DETECTORS))
    parser.add_argument("--phases", nargs="+", default=[*PHASES, "detectors"], choices=[*PHASES, "detectors"])
    parser.add_argument("--memory-of", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.memory_of:
        print(growth(*options.memory_of, options.device))
        return
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    turns = partial(in_turns, rounds=options.rounds, warmup=options.warmup, device=options.device, clock=clock)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}, {options.clock} time")
    for phase in (phase for phase in options.phases if phase in PHASES):
        for size in options.sizes:
            for kind in ("injector", "extractor"):
                for backward in (False, True):
                    steps = PHASES[phase](SIZES[size], kind, options.device, backward)
                    what = "forward and backward" if backward else "forward"
                    print_ratios(f"{phase}, {kind}, {size}, {what}", turns(steps), [tuple(steps)])
                print_memory(phase, size, kind, list(steps), options.device)
    for name in options.detectors if "detectors" in options.phases else []:
        steps = {
            position: detector(name, position, tuple(options.size), options.device, options.bf16)
            for position in POSITIONS
        }
        pairs = [(position, "default") for position in POSITIONS if position != "default"]
        print_ratios(f"{name}, {options.size[0]} x {options.size[1]}, training step", turns(steps), pairs)


def print_memory(phase: str, size: str, kind: str, names: list[str], device: str) -> None:
    """Print the peak memory of a forward and backward pass of each, measured in a separate process."""
    peaks = []
    for name in names:
        call = [sys.executable, __file__, "--device", device, "--memory-of", phase, size, kind, name]
        done = subprocess.run(call, capture_output=True, text=True, check=True)
        peaks.append(f"{name} {float(done.stdout.split()[-1]):.0f}")
    print("  peak MB " + ", ".join(peaks), flush=True)


if __name__ == "__main__":
    main()
