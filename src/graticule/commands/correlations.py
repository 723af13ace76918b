"""`graticule correlations`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from graticule.commands.options import (
    open_runs,
    output_folder,
    parse,
    parse_checkpoint,
    parse_sizes,
    print_table,
    print_written,
)


@dataclass
class Correlations:
    """Draw the position correlations of every layer (LaPE, Eq. 12) and the bias of every head, with numbers."""

    run: tyro.conf.Positional[Path]
    """run folder"""
    img_size: str | None = None
    """side in pixels, or HEIGHTxWIDTH (default: the training size)"""
    checkpoint: str = "best"
    """best or last"""
    untrained: int = 39
    """number of untrained models of the same shape that the range over layers is tested against; 0 for none"""
    output: Path | None = None
    """folder for the figures and the arrays (default: the run's)"""


def run(arguments: list[str]) -> int:
    """Draw the position correlations of every layer of a run, the bias of every head, or both."""
    options = parse(Correlations, "correlations", arguments)
    (run,) = open_runs([options.run], "correlations")
    from graticule.analysis import bias_map_sheet, bias_maps, correlation_sheet, position_correlations, save_figure
    from graticule.encodings import AbsoluteEncoding

    recipe = run.recipe()
    model = run.model(checkpoint=parse_checkpoint(options.checkpoint))
    size = parse_sizes([options.img_size], "img_size")[0] if options.img_size else None
    title = f"{recipe.model}, {recipe.encoding or 'its own encoding'}, joining {recipe.joining}"
    folder = output_folder(options.output, run.folder)
    stages = range(len(getattr(model, "depths", (1,))))
    # everything is computed before anything is written
    biases = {stage: maps for stage in stages if (maps := bias_maps(model, size, stage)) is not None}
    tables = any(isinstance(module, AbsoluteEncoding) for module in model.modules())
    drawn = stages if tables or not biases else ()
    correlations = {stage: position_correlations(model, size, stage, options.untrained) for stage in drawn}
    written: list[Path] = []
    for stage in stages:
        suffix, of = ("", "") if len(stages) == 1 else (f"-stage{stage + 1}", f", stage {stage + 1}")
        if stage in correlations:
            found = correlations[stage]
            if of:
                print(f"stage {stage + 1}, {found.grid.height} x {found.grid.width} tokens")
            _print(found.summary())
            print(found.verdict)
            written.append(save_figure(correlation_sheet(found, title + of), folder / f"correlations{suffix}.png"))
            written.append(found.save(folder / f"correlations{suffix}.npz"))
        if stage in biases:
            maps = biases[stage]
            print(f"bias{of} on {maps.grid.height} x {maps.grid.width} {maps.unit}, from head to head")
            _print(maps.summary())
            written.append(save_figure(bias_map_sheet(maps, title + of), folder / f"bias{suffix}.png"))
            written.append(maps.save(folder / f"bias{suffix}.npz"))
    print_written(*written)
    return 0


def _print(summary: list[tuple[str, ...]]) -> None:
    columns, *rows = summary
    print_table(columns, rows)
