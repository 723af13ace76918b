"""`graticule export`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graticule.lab.arguments import Positional
from graticule.lab.commands.opening import open_source
from graticule.lab.commands.options import JsonOutput, NamedModels, parse, parse_size
from graticule.position.places import by
from graticule.registry.checks import known_name
from graticule.surgery.export import Exported, export
from graticule.surgery.export_program import Exportable

#: The suffix of a file in each format.
SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2"}


@dataclass
class Export(NamedModels, JsonOutput):
    """Export a model as a program for ONNX Runtime or torch.export, run it, and compare it with PyTorch.

        graticule export RUN --dynamic batch
        graticule export RUN --output model.pt2 --dynamic batch sides
        graticule export timm:deit_tiny_patch16_224 --weights FILE --joining lape

    With a fixed height and width, position is folded into constants. Nothing is written if the outputs differ by more
    than 1e-4 of the largest one (in float32).
    """

    model: Positional[str]
    """folder of a run or of a published model, name of a model, timm:NAME or hf:NAME, which are converted"""
    format: str | None = None
    """onnx or torch-export (default: from the name of the output, or onnx)"""
    output: Path | None = None
    """folder for model.onnx or model.pt2, or file (default: the run's folder, or runs/NAME)"""
    dynamic: list[str] = dataclasses.field(default_factory=list)
    """free (dynamic) axes of the program: batch, and sides, all of an image; separated by spaces or commas"""
    img_size: str | None = None
    """side in pixels, HEIGHTxWIDTH, or DEPTHxHEIGHTxWIDTH of films, if fixed (default: that of the model)"""
    features: list[int] = dataclasses.field(default_factory=list)
    """blocks (or stages, if there are several), counted from 0, whose maps are further outputs"""
    maps: bool = False
    """for a detector or segmentation model, export only the backbone with its pyramid, whose maps are outputs"""
    int8: bool = False
    """quantize the weights of linear layers to 8 bits"""


def run(arguments: list[str]) -> int:
    """Export a model, run it and compare it."""
    options = parse(Export, "export", arguments)
    free = [name for text in options.dynamic for name in text.split(",") if name]
    for name in free:
        known_name("dynamic", name, ("batch", "sides"))
    named = options.output is not None and not options.output.is_dir()
    chosen = options.format or (None if named else "onnx")

    source = open_source(options.model, "export", options)
    model: Any = source.model
    output = options.output or source.folder
    output = output if named else output / f"model{SUFFIXES.get(chosen or '', '')}"
    if options.maps:
        model = _maps(model)

    size = parse_size(options.img_size, len(Exportable.of(model).size))
    exported = export(model, output, chosen, img_size=size, dynamic=free, features=options.features, int8=options.int8)
    options.say(*report(exported))
    return options.finish(dataclasses.asdict(exported), output)


def report(exported: Exported) -> list[str]:
    """Return the facts of an exported file, in lines."""
    return [
        f"takes      {exported.takes}",
        f"size       {exported.size / 1e6:.2f} MB",
        *(
            f"compared   batch {call.batch}, {by(call.size)}: differs from PyTorch by {call.error:.1e} of the largest"
            for call in exported.compared
        ),
    ]


def _maps(model: Any) -> Any:
    """Return the backbone of a dense model with its pyramid."""
    features = getattr(model, "features", None)
    if features is None:
        raise ValueError(
            f"`maps` must be left out with {type(model).__name__}, which is not a detector or segmentation model; "
            "--features writes maps of a backbone."
        )
    return features
