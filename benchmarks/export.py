"""Exported programs of every family, with a fixed size and with free sides: numerical difference, file size and time.

    python benchmarks/export.py                             # all families, ONNX
    python benchmarks/export.py --encodings --output table.md  # a ViT with every encoding, sides free

Small models with random weights, one thread. `graticule.export` compares each file with PyTorch, at three sizes if
sides are free. Each row is written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

import graticule
from graticule.backbones.registry import FAMILIES
from graticule.encodings.forms.mixing import TokenMixing
from graticule.lab.studies.matrix import build
from graticule.position.position import ENCODINGS

#: Families whose windows make tracing with free sides take minutes.
WINDOWED = ("Swin",)
FREE = ("batch", "height", "width")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="onnx", choices=["onnx", "torch-export"])
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--encodings", nargs="*", help="encodings of a ViT, with free sides, instead; default: all")
    parser.add_argument("--windowed", action="store_true", help="also export families with windows with free sides")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.encodings is None:
        cases = [
            (family, build(family), free)
            for family in options.families
            for free in (("batch",), FREE)
            if free == ("batch",) or family not in WINDOWED or options.windowed
        ]
    else:
        known = [name for name, kind in ENCODINGS.items() if not issubclass(kind, TokenMixing)]
        cases = [(name, build("ViT, DeiT", name), FREE) for name in options.encodings or known]
    rows = ["| model | free | sizes | largest difference | operators | MB | ms | ms, not folded | s |", "| --- |" * 9]
    rows[1] = "|" + " --- |" * 9
    print("\n".join(rows), flush=True)
    for name, model, free in cases:
        rows.append(row(name, model, free, options.format))
        print(rows[-1], flush=True)
        if options.output is not None:
            options.output.write_text("\n".join(rows) + "\n", encoding="utf-8")


@torch.no_grad()
def row(name: str, model: nn.Module, free: tuple[str, ...], format: str) -> str:
    """Export a model with random weights; return a line of the table."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    start = time.perf_counter()
    with TemporaryDirectory() as folder:
        try:
            found = graticule.export(model.eval(), Path(folder) / "model", format, dynamic=free, timed=True)
        except ValueError as error:
            return f"| {name} | {', '.join(free)} | refused: {str(error)[:120]} | | | | | | |"
    sizes = ", ".join(f"{one.batch} x {one.size[0]} x {one.size[1]}" for one in found.compared)
    times = [found.milliseconds, found.unfolded_milliseconds]
    return (
        f"| {name} | {', '.join(free)} | {sizes} | {found.error:.1e} | {sum(found.operators.values())} | "
        f"{found.size / 1e6:.2f} | {' | '.join('-' if each is None else f'{each:.2f}' for each in times)} | "
        f"{time.perf_counter() - start:.0f} |"
    )


if __name__ == "__main__":
    main()
