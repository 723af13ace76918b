"""`graticule correlations`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.figures import ScaledFigures, limits_of
from graticule.lab.commands.opening import NamedModels, open_models
from graticule.lab.commands.options import Output, output_folder, parse, parse_size
from graticule.registry.checks import printable


@dataclass
class Correlations(ScaledFigures, NamedModels):
    """Draw the position correlations of every layer (LaPE, Eq. 12), rotations, and the bias of every head.

    graticule correlations RUN
    graticule correlations deit_tiny_patch16_224 --weights random
    """

    model: Positional[str]
    """run or published folder, file of weights, name of a model, timm:NAME or hf:NAME"""
    img_size: str | None = None
    """side in pixels, or HEIGHTxWIDTH (default: the training size)"""
    untrained: Rare[int] = 39
    """number of untrained models of the same shape against which the range over layers is tested; 0 for none"""
    output: Path | None = None
    """folder for the figures and the arrays (default: the run's)"""
    json: bool = False
    """print the tables as JSON, and nothing else, on stdout"""


def run(arguments: list[str]) -> int:
    """Draw the position maps of a model: correlations of every layer, rotations, and the bias of every head."""
    options = parse(Correlations, "correlations", arguments)
    output = Output(options.json)
    (opened,) = open_models([options.model], options, "correlations", images=False)
    from graticule.analysis.position_maps import position_maps
    from graticule.lab.figures.bias_map_sheet import bias_map_sheet
    from graticule.lab.figures.plots import correlation_sheet
    from graticule.lab.figures.save import save_figure

    limits = limits_of(options.scale)
    size = parse_size(options.img_size)
    folder = output_folder(options.output, opened.folder)
    # everything is computed before a file is written
    stages = position_maps(opened.model, size, options.untrained)
    title = opened.title if opened.run is not None else printable(opened.target)
    written: list[Path] = []

    def draw(figure: Figure, name: str) -> Path:
        """Write a figure; returns its path."""
        return save_figure(figure, folder / f"{name}.{options.format}")

    tables: list[dict[str, Any]] = []
    for number, maps in enumerate(stages, start=1):
        table: dict[str, Any] = {"stage": number}
        tables.append(table)
        suffix, of = ("", "") if len(stages) == 1 else (f"-stage{number}", f", stage {number}")
        if (found := maps.correlations) is not None:
            if of:
                output.say(f"stage {number}, {found.grid.height} x {found.grid.width} tokens")
            table |= {"correlations": _shown(output, found.summary()), "verdict": found.verdict}
            output.say(found.verdict)
            written.append(
                draw(correlation_sheet(found, f"Position correlations, {title}{of}"), f"correlations{suffix}")
            )
            written.append(found.save(folder / f"correlations{suffix}.npz"))
        if (rotary := maps.rotary) is not None:
            output.say(f"similarity under rotation alone{of}, mean over heads")
            table["rotary"] = _shown(output, rotary.summary())
            written.append(
                draw(correlation_sheet(rotary, f"Similarity under rotation, {title}{of}"), f"rotary{suffix}")
            )
            written.append(rotary.save(folder / f"rotary{suffix}.npz"))
        if (biases := maps.biases) is not None:
            output.say(f"bias{of} on {biases.grid.height} x {biases.grid.width} {biases.unit}, from head to head")
            table["bias"] = _shown(output, biases.summary())
            written.append(draw(bias_map_sheet(biases, f"Bias of attention, {title}{of}", limits), f"bias{suffix}"))
            written.append(biases.save(folder / f"bias{suffix}.npz"))
    output.give(tables)
    output.wrote(*written)
    return 0


def _shown(output: Output, summary: list[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Print a table whose first row is its header; returns its rows as records."""
    columns, *rows = summary
    return output.table(columns, rows)
