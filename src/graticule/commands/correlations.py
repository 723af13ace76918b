"""`graticule correlations`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from graticule.commands.options import parse, parse_checkpoint, parse_sizes, print_table


@dataclass
class Correlations:
    """Draw the position correlations of every layer (LaPE, Eq. 12), with numbers beside the pictures."""

    run: tyro.conf.Positional[Path]
    """run folder"""
    img_size: str | None = None
    """side in pixels, or HEIGHTxWIDTH (default: the training size)"""
    checkpoint: str = "best"
    """best or last"""
    output: Path | None = None
    """folder for the picture and the arrays (default: the run's)"""


def run(arguments: list[str]) -> int:
    """Draw what every layer of a run knows of position."""
    options = parse(Correlations, "correlations", arguments)
    from graticule.analysis import correlation_sheet, position_correlations, save_figure
    from graticule.tasks import Run

    run = Run.open(options.run)
    recipe = run.recipe()
    model = run.model(checkpoint=parse_checkpoint(options.checkpoint))
    size = parse_sizes([options.img_size], "img_size")[0] if options.img_size else None
    title = f"{recipe.model}, {recipe.encoding or 'its own encoding'}, joining {recipe.joining}"
    folder = options.output or run.folder
    stages = len(getattr(model, "depths", (1,)))
    every = [position_correlations(model, size, stage) for stage in range(stages)]  # before anything is written
    written: list[Path] = []
    for stage, found in enumerate(every):
        name = "correlations" if stages == 1 else f"correlations-stage{stage + 1}"
        if stages > 1:
            print(f"stage {stage + 1}, {found.grid.height} x {found.grid.width} tokens")
        columns, *rows = found.summary()
        print_table([str(c) for c in columns], [[str(cell) for cell in row] for row in rows])
        print(f"rank correlation of locality with depth: {found.hierarchy:+.2f}")
        of = "" if stages == 1 else f", stage {stage + 1}"
        written.append(save_figure(correlation_sheet(found, title + of), folder / f"{name}.png"))
        written.append(found.save(folder / f"{name}.npz"))
    print(f"wrote {' and '.join(map(str, written))}")
    return 0
