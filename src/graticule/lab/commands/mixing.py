"""`graticule mixing`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from graticule.lab.arguments import Positional, Rare
from graticule.lab.commands.figures import ScaledFigures, limits_of
from graticule.lab.commands.opening import check_on_images
from graticule.lab.commands.options import (
    Output,
    open_runs,
    output_folder,
    parse,
    parse_query,
    parse_size,
    run_labels,
)


@dataclass
class Mixing(ScaledFigures):
    """Draw the token mixing of gated MLPs: the weights around a token, the bias maps, and their non-locality.

        graticule mixing RUN
        graticule mixing RUN --layers 1 4 --query 0x3

    If the weights are a dense matrix plus a table of displacements (encoding lrpe_m), both are drawn as well.
    """

    runs: Positional[list[Path]]
    """run folders"""
    layers: list[int] = dataclasses.field(default_factory=list)
    """layers, counted from 1 (default: all, six of them drawn)"""
    groups: list[int] = dataclasses.field(default_factory=list)
    """groups of channels, counted from 1 (default: eight, evenly spaced)"""
    query: str | None = None
    """ROWxCOLUMN of the token within its grid or window, starting at 0x0 (default: the center)"""
    values: Literal["weights", "logits"] = "weights"
    """weights, or the logits before their softmax"""
    img_size: str | None = None
    """side in pixels, or HEIGHTxWIDTH (default: the training size)"""
    checkpoint: Rare[Literal["best", "last"]] = "best"
    """checkpoint of the run"""
    output: Path | None = None
    """folder for the figures and the arrays (default: the first run's)"""
    json: bool = False
    """print the tables as JSON, and nothing else, on stdout"""


def run(arguments: list[str]) -> int:
    """Draw the token mixing of gated MLPs."""
    options = parse(Mixing, "mixing", arguments)
    limits = limits_of(options.scale)
    output = Output(options.json)
    runs = open_runs(options.runs)
    from graticule.analysis.mixing import mixing_maps, mixing_parts, save_mixing
    from graticule.lab.figures.mixing_sheet import (
        bias_sheet,
        mixing_sheet,
        non_locality_plot,
        parts_sheet,
        sheet_layers,
    )
    from graticule.lab.figures.save import save_figure
    from graticule.lab.tasks.parts.image_scores import check_sizes

    check_on_images(runs, "mixing")
    if min([*options.layers, *options.groups], default=1) < 1:
        raise ValueError(f"`layers` and `groups` must count from 1, got {options.layers} and {options.groups}.")
    layers, groups = ([index - 1 for index in given] or None for given in (options.layers, options.groups))
    query = parse_query(options.query) if options.query else None
    size = parse_size(options.img_size)
    maps = {}
    parts = {}
    figures: dict[str, Any] = {}
    for number, (run, label) in enumerate(zip(runs, run_labels(runs), strict=True), start=1):
        model: Any = run.model(checkpoint=options.checkpoint)
        if size:
            check_sizes(model, [size])
        depth = sum(model.depths) if hasattr(model, "depths") else 0
        if depth and max(options.layers, default=1) > depth:
            raise ValueError(f"`layers` must be from 1 to {depth} in {run.folder}, got {max(options.layers)}.")
        found = maps[label] = mixing_maps(model, size, query, layers)
        most = max(one.groups for one in found)
        if max(options.groups, default=1) > most:
            raise ValueError(f"`groups` must be from 1 to {most} in {run.folder}, got {max(options.groups)}.")
        drawn = found if layers else [found[index] for index in sheet_layers(len(found))]
        mark = f"-{number}" if len(runs) > 1 else ""
        recipe = run.recipe()
        title = f"{recipe.model}, {recipe.encoding or 'its own encoding'}"
        sheet = mixing_sheet(drawn, groups, options.values, f"Mixing {options.values}, {title}", limits)
        figures[f"mixing{mark}"] = sheet
        if any(one.bias is not None for one in maps[label]):
            figures[f"mixing-bias{mark}"] = bias_sheet(maps[label], f"Bias, {title}")
        parts[label] = mixing_parts(model, size, query, [one.layer for one in drawn])
        if parts[label]:
            group = groups[0] if groups else 0
            figures[f"mixing-parts{mark}"] = parts_sheet(parts[label], group, f"Parts of the weights, {title}")
    figures["mixing-locality"] = non_locality_plot(maps)
    folder = output_folder(options.output, runs[0].folder)
    written: list[Path] = []
    tables = {}
    for number, (label, found) in enumerate(maps.items(), start=1):
        output.say(label)
        rows = []
        for one in found:
            g, kept = one.non_locality()
            shown = "-" if not kept else f"{g:.3f}"
            counted = "-" if one.matrices is None else f"{kept} of {one.groups}"
            grid = f"{one.grid.height}x{one.grid.width}"
            rows.append((str(one.layer + 1), grid, str(one.groups), f"{one.distance():.2f}", shown, counted))
        tables[label] = output.table(("layer", "tokens", "groups", "distance", "g", "groups in g"), rows)
        name = f"mixing-{number}.npz" if len(maps) > 1 else "mixing.npz"
        written.append(save_mixing(found, folder / name, parts[label]))
    token = "the center token" if query is None else f"token {options.query}"
    output.say(
        f"distance: of the weights of {token}, in patches; g: non-locality (PosMLP, Eq. 16), smaller is less local"
    )
    written += [save_figure(figure, folder / f"{name}.{options.format}") for name, figure in figures.items()]
    output.give(tables)
    output.wrote(*written)
    return 0
