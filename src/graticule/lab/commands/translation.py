"""`graticule translation`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.figures import Figures
from graticule.lab.commands.opening import NamedData, labels_of, open_models, size_of, test_data
from graticule.lab.commands.options import Output, choose_device, output_folder, parse, parse_size
from graticule.registry.checks import printable


@dataclass
class Translation(Figures, NamedData):
    """Measure the distance of each layer from translation equivariance, and of the logits from invariance.

        graticule translation RUN RUN
        graticule translation RUN --shifts 1x0 0x2 --images 64

    Test images are shifted by whole patches. The results are one table per model, and one figure.
    """

    models: Positional[list[str]]
    """runs, published folders, files of weights, names of models, timm:NAME or hf:NAME"""
    images: int | None = None
    """number of test images, evenly spaced (default: 128, or all if there are fewer)"""
    shifts: list[str] = dataclasses.field(default_factory=lambda: ["1x0", "0x1", "1x1"])
    """DOWNxRIGHT, in patches of the coarsest grid"""
    border: Rare[int] = 1
    """tokens closer to an edge than this many patches are reported separately"""
    img_size: str | None = None
    """side in pixels, or HEIGHTxWIDTH, multiples of the coarsest patch (default: that of the model)"""
    device: Rare[str] = "auto"
    """cpu, cuda, ...; auto is a GPU if there is one"""
    output: Path | None = None
    """folder for the numbers and the figure (default: the first run's, or this one)"""
    json: bool = False
    """print the tables as JSON, and nothing else, on stdout"""


def run(arguments: list[str]) -> int:
    """Measure the distance of every layer of models from translation equivariance."""
    options = parse(Translation, "translation", arguments)
    output = Output(options.json)
    shifts = [_shift(text) for text in options.shifts]
    if options.images is not None and options.images < 2:
        raise ValueError(f"`images` must be at least 2, got {options.images}.")
    opened = open_models(options.models, options, "translation")
    from graticule.analysis.equivariance import translation_error, whole_patches
    from graticule.external.open_view import view_of
    from graticule.lab.figures.plots import translation_plot
    from graticule.lab.figures.save import save_figure

    models = []
    for one in opened:
        data = test_data(one, options)
        size = parse_size(options.img_size) or size_of(one)
        model = view_of(one.model).sized(size).model
        whole_patches(model, size)
        models.append((one, data, model, size))
    device = choose_device(options.device)
    found = {}
    tables = {}
    folder = output_folder(options.output, opened[0].folder)
    written: list[Path] = []
    for label, (one, data, model, size) in zip(labels_of(opened), models, strict=True):
        images = data.spread_test_images(size, options.images or min(128, data.num_test))[0].to(device)
        measured = translation_error(model.to(device), images, shifts, options.border)
        found[label] = measured
        columns, *rows = measured.summary()
        shown = printable(one.target)
        output.say(f"{shown}: {measured.images} images of {size[0]}x{size[1]}, shifts {', '.join(options.shifts)}")
        tables[label] = output.table(columns, rows)
        output.say(f"{measured.verdict()}\n")
        name = "translation.npz" if len(opened) == 1 else f"translation-{len(written) + 1}.npz"
        written.append(measured.save(folder / name))
    output.say("0: the layer is equivariant; 1: the shift changes as much as another image does; - : no such token")
    figure = translation_plot(found, "Distance from translation equivariance")
    output.give(tables)
    output.wrote(*written, save_figure(figure, folder / f"translation.{options.format}"))
    return 0


def _shift(text: str) -> tuple[int, int]:
    try:
        down, right = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise ValueError(f"`shifts` must be DOWNxRIGHT in patches, such as 1x0 or -1x2, got {text!r}.") from None
    return down, right
