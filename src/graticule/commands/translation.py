"""`graticule translation`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import tyro

from graticule.checks import printable
from graticule.commands.kinds import check_on_images
from graticule.commands.options import (
    choose_device,
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
class Translation:
    """Measure how far each layer is from translation equivariance, and the logits from invariance.

    Test images are shifted by whole patches. There is one table per run, and one figure of all runs.
    """

    runs: tyro.conf.Positional[list[Path]]
    """run folders"""
    images: int | None = None
    """number of test images, evenly spaced through all (default: 128, or all if there are fewer)"""
    shifts: list[str] = dataclasses.field(default_factory=lambda: ["1x0", "0x1", "1x1"])
    """DOWNxRIGHT, in patches of the coarsest grid"""
    border: int = 1
    """tokens closer to an edge than this many patches are reported separately"""
    img_size: str | None = None
    """side in pixels, or HEIGHTxWIDTH, multiples of the coarsest patch (default: the training size)"""
    checkpoint: str = "best"
    """best or last"""
    device: str = "auto"
    """cpu, cuda, ...; auto is a GPU if there is one"""
    output: Path | None = None
    """folder for the numbers and the figure (default: the first run's)"""


def run(arguments: list[str]) -> int:
    """Measure how far every layer of runs is from translation equivariance."""
    options = parse(Translation, "translation", arguments)
    runs = open_runs(options.runs, "translation")
    from graticule.analysis import save_figure, translation_error, translation_plot, whole_patches
    from graticule.tasks import check_sizes

    check_on_images(runs, "translation")
    shifts = [_shift(text) for text in options.shifts]
    if options.images is not None and options.images < 2:
        raise ValueError(f"`images` must be at least 2, got {options.images}.")
    models = []
    for run in runs:
        data = run.data()
        size = parse_sizes([options.img_size], "img_size")[0] if options.img_size else run.recipe().img_size
        model = run.model(data, parse_checkpoint(options.checkpoint))
        check_sizes(model, [size])
        whole_patches(model, size)
        models.append((run, data, model, size))
    device = choose_device(options.device)
    found = {}
    folder = output_folder(options.output, runs[0].folder)
    written: list[Path] = []
    for label, (run, data, model, size) in zip(run_labels(runs), models, strict=True):
        images = data.spread_test_images(size, options.images or min(128, data.num_test))[0].to(device)
        one = translation_error(model.to(device), images, shifts, options.border)
        found[label] = one
        columns, *rows = one.summary()
        shown = printable(str(run.folder))
        print(f"{shown}: {one.images} images of {size[0]}x{size[1]}, shifts {', '.join(options.shifts)}")
        print_table(columns, rows)
        print(f"{one.verdict()}\n")
        name = "translation.npz" if len(runs) == 1 else f"translation-{len(written) + 1}.npz"
        written.append(one.save(folder / name))
    print("0: the layer is equivariant; 1: the shift changes as much as another image does; - : no such token")
    figure = translation_plot(found, "Distance from translation equivariance")
    print_written(*written, save_figure(figure, folder / "translation.png"))
    return 0


def _shift(text: str) -> tuple[int, int]:
    try:
        down, right = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise ValueError(f"`shifts` must be DOWNxRIGHT in patches, as 1x0 or -1x2, got {text!r}.") from None
    return down, right
