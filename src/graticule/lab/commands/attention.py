"""`graticule attention`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graticule.lab.arguments import Positional
from graticule.lab.commands.figures import ScaledFigures, limits_of
from graticule.lab.commands.opening import NamedData, labels_of, open_models, size_of, test_data
from graticule.lab.commands.options import Output, output_folder, parse, parse_query, parse_size

if TYPE_CHECKING:
    from graticule.external.attention_map import AttentionMap


@dataclass
class Attention(ScaledFigures, NamedData):
    """Draw the attention of chosen layers and heads on one test image: score matrices, and a query's map on the image.

    graticule attention RUN --layers 2 --without-position
    graticule attention RUN RUN --layers 1 6 --heads 1 2 --image 5
    """

    models: Positional[list[str]]
    """runs, published folders, files of weights, names of models, timm:NAME or hf:NAME"""
    layers: list[int] = dataclasses.field(default_factory=lambda: [2])
    """layers, counted from 1"""
    heads: list[int] = dataclasses.field(default_factory=list)
    """heads, counted from 1 (default: evenly spaced ones, six columns in all)"""
    query: str | None = None
    """ROWxCOLUMN of the patch whose attention is drawn on the image, from 0x0 (default: center), or cls"""
    image: int = 0
    """index of the test image, counted from 0"""
    without_position: bool = False
    """also draw each model with its position information removed"""
    img_size: str | None = None
    """side in pixels, or HEIGHTxWIDTH (default: that of the model)"""
    output: Path | None = None
    """folder for the figures and the arrays (default: the first run's, or this one)"""
    json: bool = False
    """print the mean distances as JSON, and nothing else, on stdout"""


def run(arguments: list[str]) -> int:
    """Draw the attention maps of models."""
    options = parse(Attention, "attention", arguments)
    output = Output(options.json)
    limits = limits_of(options.scale)
    of_class = options.query == "cls"
    query = parse_query(options.query) if options.query and not of_class else None
    if not options.layers or min(options.layers) < 1 or min(options.heads, default=1) < 1:
        raise ValueError(f"`layers` and `heads` must count from 1, got {options.layers} and {options.heads}.")
    opened = open_models(options.models, options, "attention")
    from graticule.analysis.attention import attention_maps
    from graticule.external.attention_map import save_attention
    from graticule.external.open_view import view_of
    from graticule.lab.figures.attention_sheet import attention_on_image, attention_sheet, sheet_heads
    from graticule.lab.figures.save import save_figure
    from graticule.lab.pages.explorer import pixels_of

    layers = [layer - 1 for layer in options.layers]
    heads = [head - 1 for head in options.heads] or None
    maps: dict[str, list[AttentionMap]] = {}
    folder = output_folder(options.output, opened[0].folder)
    for one, label in zip(opened, labels_of(opened), strict=True):
        data = test_data(one, options)
        size = parse_size(options.img_size) or size_of(one)
        view = view_of(one.model).sized(size)
        grids = view.grids(size)
        depth = len(grids)
        if max(options.layers) > depth:
            raise ValueError(f"`layers` must be from 1 to {depth}, got {max(options.layers)}.")
        at = query or divmod(grids[0].center, grids[0].width)
        if not all(0 <= place < side for place, side in zip(at, grids[0].shape, strict=True)):
            raise ValueError(
                f"`query` must be inside the {grids[0].height} x {grids[0].width} patches of {one.target}, got "
                f"{options.query}."
            )
        images = data.test_images(size, [options.image])[0]
        if not maps:  # draw the image of the first model
            picture = pixels_of(images[0], data.info.mean, data.info.std)
            share = (at[0] + 0.5) / grids[0].height, (at[1] + 0.5) / grids[0].width
        maps[label] = attention_maps(view.model, images, layers)
        if options.without_position:
            maps[f"{label}\nwithout position"] = attention_maps(view.model, images, layers, without_position=True)
    title = f"Attention weights, test image {options.image}"
    # all figures are drawn before a file is written
    figures = {
        "attention": attention_sheet(maps, heads, title=title, limits=limits),
        "attention-image": attention_on_image(
            maps, picture, None if of_class else share, heads, title=title, limits=limits
        ),
    }
    shown = sheet_heads(maps, heads)
    written: list[Path] = []
    distances = {}
    for number, (label, found) in enumerate(maps.items(), start=1):
        rows = [(str(one.layer + 1), *[f"{one.distance(head):.2f}" for head in shown]) for one in found]
        name = label.replace("\n", ", ")
        output.say(name)
        distances[name] = output.table(("layer", *[f"head {head + 1}" for head in shown]), rows)
        written.append(
            save_attention(found, folder / (f"attention-{number}.npz" if len(maps) > 1 else "attention.npz"))
        )
    output.say("mean attention distance, in patches")
    output.give(distances)
    written += [save_figure(figure, folder / f"{name}.{options.format}") for name, figure in figures.items()]
    output.wrote(*written)
    return 0
