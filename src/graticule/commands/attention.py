"""`graticule attention`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import tyro

from graticule.commands.kinds import check_on_images
from graticule.commands.options import (
    open_runs,
    output_folder,
    parse,
    parse_checkpoint,
    parse_sizes,
    print_table,
    print_written,
    run_labels,
)


@dataclass
class Attention:
    """Draw the attention maps of chosen layers and heads on one test image, one column per run."""

    runs: tyro.conf.Positional[list[Path]]
    """run folders, whose models have the layers"""
    layers: list[int] = dataclasses.field(default_factory=lambda: [2])
    """layers, the first being 1"""
    heads: list[int] = dataclasses.field(default_factory=list)
    """heads, the first being 1 (default: all)"""
    image: int = 0
    """index of the test image, the first being 0"""
    without_position: bool = False
    """also draw each run with its position information removed"""
    img_size: str | None = None
    """side in pixels, or HEIGHTxWIDTH (default: the training size)"""
    checkpoint: str = "best"
    """best or last"""
    output: Path | None = None
    """folder for the figure and the arrays (default: the first run's)"""


def run(arguments: list[str]) -> int:
    """Draw the attention maps of runs."""
    options = parse(Attention, "attention", arguments)
    runs = open_runs(options.runs, "attention")
    from graticule.analysis import attention_maps, attention_sheet, save_attention, save_figure
    from graticule.tasks import check_sizes

    check_on_images(runs, "attention")
    if not options.layers or min(options.layers) < 1 or min(options.heads, default=1) < 1:
        raise ValueError(f"`layers` and `heads` must count from 1, got {options.layers} and {options.heads}.")
    layers = [layer - 1 for layer in options.layers]
    heads = [head - 1 for head in options.heads] or None
    maps = {}
    folder = output_folder(options.output, runs[0].folder)
    for run, label in zip(runs, run_labels(runs), strict=True):
        data = run.data()
        size = parse_sizes([options.img_size], "img_size")[0] if options.img_size else run.recipe().img_size
        model = run.model(data, parse_checkpoint(options.checkpoint))
        check_sizes(model, [size])
        depth = len(model.position(model.grid))
        if max(options.layers) > depth:
            raise ValueError(f"`layers` must be from 1 to {depth}, got {max(options.layers)}.")
        images = data.test_images(size, [options.image])[0]
        maps[label] = attention_maps(model, images, layers)
        if options.without_position:
            maps[f"{label}\nwithout position"] = attention_maps(model, images, layers, without_position=True)
    title = f"Attention weights, test image {options.image}"
    figure = attention_sheet(maps, heads, title=title)  # before anything is written
    written: list[Path] = []
    for number, (label, found) in enumerate(maps.items(), start=1):
        rows = [
            (str(one.layer + 1), *[f"{one.distance(head):.2f}" for head in heads or range(one.num_heads)])
            for one in found
        ]
        print(label.replace("\n", ", "))
        print_table(("layer", *[f"head {head + 1}" for head in heads or range(found[0].num_heads)]), rows)
        written.append(
            save_attention(found, folder / (f"attention-{number}.npz" if len(maps) > 1 else "attention.npz"))
        )
    print("mean attention distance, in patches")
    print_written(*written, save_figure(figure, folder / "attention.png"))
    return 0
