"""`graticule resize`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import graticule
from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.opening import open_models
from graticule.lab.commands.options import JsonOutput, NamedModels, output_folder, square
from graticule.registry.fields import Side


@dataclass
class ResizeOptions(NamedModels, JsonOutput):
    """Change the image size that the position encoding of a model is stored for, and save the model.

        graticule resize RUN 56 --output FOLDER
        graticule resize timm:vit_small_patch16_224 224 320 --output FOLDER

    Tables of position embeddings are resampled once, so that the model can be trained at that size. timm:NAME and
    hf:NAME are converted. graticule.from_pretrained and all commands open the folder.
    """

    model: Positional[str]
    """run or published folder, file of weights, name, timm:NAME, hf:NAME, or FILE.py:NAME"""
    size: Positional[tuple[Annotated[Side, "PIXELS"], ...]]
    """one side, or height and width"""
    output: Path
    """folder to write to"""
    resampler: Rare[str | None] = None
    """resampler of tables, such as bilinear or bicubic (default: each encoding's own)"""


def run(options: ResizeOptions) -> int:
    """Resize a model, and save it."""
    output_folder(options.output)
    (source,) = open_models([options.model], options, "resize", "images*", converted=True)
    model: Any = graticule.resize(source.model, square(options.size, len(source.size), "size"), options.resampler)
    folder = graticule.save_pretrained(model, options.output, preprocessing=source.preprocessing)
    return options.finish({"size": list(model.img_size), "output": str(folder)}, folder)
