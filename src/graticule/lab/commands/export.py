"""`graticule export`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graticule import surgery
from graticule.lab.arguments import Positional
from graticule.lab.commands.opening import open_models
from graticule.lab.commands.options import JsonOutput, NamedModels, OfSize, square
from graticule.registry.checks import known_name


@dataclass
class ExportOptions(OfSize, NamedModels, JsonOutput):
    """Export a model as a program for ONNX Runtime or torch.export, run it, and compare it with PyTorch.

        graticule export RUN --dynamic batch
        graticule export RUN --output model.pt2 --dynamic batch sides
        graticule export timm:deit_tiny_patch16_224 --weights FILE --joining lape

    With a fixed height and width, position is folded into constants. Nothing is written if the outputs differ by more
    than 1e-4 of the largest one (in float32).
    """

    model: Positional[str]
    """folder of a run or of a published model, name of a model, timm:NAME or hf:NAME, converted if it can be"""
    output: Path | None = None
    """folder for model.onnx, or file NAME.onnx or NAME.pt2 of torch.export (default: the run's folder, or runs/NAME)"""
    dynamic: list[str] = field(default_factory=list)
    """free (dynamic) axes of the program: batch, and sides, all of an image; separated by spaces or commas"""
    features: list[int] = field(default_factory=list)
    """blocks (or stages, if there are several), counted from 0, whose maps are further outputs"""
    maps: bool = False
    """for a detector or segmentation model, export only the backbone with its pyramid, whose maps are outputs"""
    int8: bool = False
    """quantize the weights of linear layers to 8 bits"""


def run(options: ExportOptions) -> int:
    """Export a model, run it and compare it."""
    from graticule.position.places import by

    free = [name for text in options.dynamic for name in text.split(",") if name]
    for name in free:
        known_name("dynamic", name, ("batch", "sides"))
    (source,) = open_models([options.model], options, "export", "images*", converted=True)
    model: Any = source.model
    output = options.output or source.folder
    output = output / "model.onnx" if output.is_dir() or not output.suffix else output
    if options.maps:
        if getattr(model, "features", None) is None:
            raise ValueError(
                f"`maps` must be left out with {type(model).__name__}, which is not a detector or segmentation model; "
                "--features writes maps of a backbone."
            )
        model = model.features  # the backbone with its pyramid

    size = square(options.img_size, len(surgery.Exportable.of(model).size))
    what: Any = {"dynamic": free, "features": options.features, "int8": options.int8}
    exported = surgery.export(model, output, img_size=size, **what)
    options.say(f"takes      {exported.takes}", f"size       {exported.size / 1e6:.2f} MB")
    for call in exported.compared:
        error = f"differs from PyTorch by {call.error:.1e} of the largest"
        options.say(f"compared   batch {call.batch}, {by(call.size)}: {error}")
    return options.finish(exported, output)
