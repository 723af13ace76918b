"""`graticule export`."""

from __future__ import annotations

import dataclasses
from typing import Any

from graticule.lab.commands.declared import Export
from graticule.lab.commands.opening import open_source
from graticule.lab.commands.options import parse_size
from graticule.position.places import by
from graticule.registry.checks import known_name
from graticule.surgery.export import Exported, export
from graticule.surgery.export_program import Exportable

#: The suffix of a file in each format.
SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2"}


def run(options: Export) -> int:
    """Export a model, run it and compare it."""
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
        if getattr(model, "features", None) is None:
            raise ValueError(
                f"`maps` must be left out with {type(model).__name__}, which is not a detector or segmentation model; "
                "--features writes maps of a backbone."
            )
        model = model.features  # the backbone with its pyramid

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
