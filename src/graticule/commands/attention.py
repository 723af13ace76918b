"""`graticule attention`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import tyro

from graticule.commands.opening import NamedData, check_inputs, check_targets, labels_of, open_model, size_of, test_data
from graticule.commands.options import (
    Output,
    output_folder,
    parse,
    parse_checkpoint,
    parse_sizes,
)


@dataclass
class Attention(NamedData):
    """Draw the attention maps of chosen layers and heads on one test image, one column per model.

    graticule attention RUN --layers 2 --without-position
    graticule attention RUN RUN --layers 1 6 --heads 1 2 --image 5
    """

    models: tyro.conf.Positional[list[str]]
    """runs, files of weights, names of models or timm:NAME, which have the layers"""
    layers: list[int] = dataclasses.field(default_factory=lambda: [2])
    """layers, the first being 1"""
    heads: list[int] = dataclasses.field(default_factory=list)
    """heads, the first being 1 (default: all)"""
    image: int = 0
    """index of the test image, the first being 0"""
    without_position: bool = False
    """also draw each model with its position information removed"""
    img_size: str | None = None
    """side in pixels, or HEIGHTxWIDTH (default: that of the model)"""
    checkpoint: str = "best"
    """best or last"""
    output: Path | None = None
    """folder for the figure and the arrays (default: the first run's, or this one)"""
    json: bool = False
    """print the mean distances as JSON, and nothing else, on stdout"""


def run(arguments: list[str]) -> int:
    """Draw the attention maps of models."""
    options = parse(Attention, "attention", arguments)
    output = Output(options.json)
    check_targets(options.models, options, "attention")
    from graticule.analysis import attention_maps, attention_sheet, save_attention, save_figure, view_of

    checkpoint = parse_checkpoint(options.checkpoint)
    check_inputs(options.models, "attention")
    opened = [open_model(target, options, checkpoint) for target in options.models]
    if not options.layers or min(options.layers) < 1 or min(options.heads, default=1) < 1:
        raise ValueError(f"`layers` and `heads` must count from 1, got {options.layers} and {options.heads}.")
    layers = [layer - 1 for layer in options.layers]
    heads = [head - 1 for head in options.heads] or None
    maps = {}
    folder = output_folder(options.output, opened[0].folder)
    for one, label in zip(opened, labels_of(opened), strict=True):
        data = test_data(one, options)
        size = parse_sizes([options.img_size], "img_size")[0] if options.img_size else size_of(one)
        view = view_of(one.model).sized(size)
        depth = len(view.grids(size))
        if max(options.layers) > depth:
            raise ValueError(f"`layers` must be from 1 to {depth}, got {max(options.layers)}.")
        images = data.test_images(size, [options.image])[0]
        maps[label] = attention_maps(view.model, images, layers)
        if options.without_position:
            maps[f"{label}\nwithout position"] = attention_maps(view.model, images, layers, without_position=True)
    title = f"Attention weights, test image {options.image}"
    figure = attention_sheet(maps, heads, title=title)  # before anything is written
    written: list[Path] = []
    distances = {}
    for number, (label, found) in enumerate(maps.items(), start=1):
        rows = [
            (str(one.layer + 1), *[f"{one.distance(head):.2f}" for head in heads or range(one.num_heads)])
            for one in found
        ]
        name = label.replace("\n", ", ")
        output.say(name)
        distances[name] = output.table(
            ("layer", *[f"head {head + 1}" for head in heads or range(found[0].num_heads)]), rows
        )
        written.append(
            save_attention(found, folder / (f"attention-{number}.npz" if len(maps) > 1 else "attention.npz"))
        )
    output.say("mean attention distance, in patches")
    output.give(distances)
    output.wrote(*written, save_figure(figure, folder / "attention.png"))
    return 0
