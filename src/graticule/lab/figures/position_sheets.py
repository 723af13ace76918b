"""Sheets of the maps of position of a model: correlations, similarity under rotation, and biases of attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from graticule.analysis.position_maps import BiasMaps, StageMaps
from graticule.analysis.similarity import Array, Correlations, reach
from graticule.lab.figures.style import PALETTE, SIMILARITY, add_notes, add_title, axes_at, mark, wrap_notes
from graticule.registry.checks import printable

COLUMNS = 4  # of a sheet of correlations: its text is as large as a page's


class Sheet(NamedTuple):
    """One figure of the maps of a stage.

    kind: `correlations`, `rotary` or `bias`.
    stage: its number.
    of: the stage in words, ", stage 0"; empty if there is one alone.
    name: a name for files, such as correlations-stage0.
    """

    kind: str
    stage: int
    of: str
    name: str
    maps: Correlations | BiasMaps
    figure: Figure


def position_sheets(stages: Sequence[StageMaps], title: str) -> Iterator[Sheet]:
    """Draw all maps of a model, one sheet for each kind and stage.

    Args:
        stages: the maps of each stage, as `position_maps` returns them.
        title: subject of the sheets, such as the name of the model.
    """
    for number, stage in enumerate(stages):
        of, suffix = (f", stage {number}", f"-stage{number}") if len(stages) > 1 else ("", "")
        kinds: tuple[tuple[str, Any, Any, str], ...] = (
            ("correlations", stage.correlations, correlation_sheet, "Position correlations"),
            ("rotary", stage.rotary, correlation_sheet, "Similarity under rotation"),
            ("bias", stage.biases, bias_map_sheet, "Bias of attention"),
        )
        for kind, maps, draw, about in kinds:
            if maps is not None:
                yield Sheet(kind, number, of, f"{kind}{suffix}", maps, draw(maps, f"{about}, {title}{of}"))


def correlation_sheet(correlations: Correlations, title: str) -> Figure:
    """Draw, for the table w and for every layer, all pairs of tokens and beneath them the center token's map.

    Of a text, which is drawn as one row, the center token's row is drawn as a line.

    All sheets have one color scale, from -1 to 1, so that any two can be compared. The center token is marked. A layer
    that receives no position is an empty panel that says so.

    Reference: LaPE (Yu et al., 2023), Figures 3 and 4.

    Args:
        correlations: of one model.
        title: above the sheet.
    """
    panels: list[tuple[str, Array | None]] = [("table w", correlations.initial)] * (correlations.initial is not None)
    layers = enumerate(zip(correlations.similarity, correlations.sources, strict=True))
    panels += [(f"layer {layer}", None if source is None else image) for layer, (image, source) in layers]
    bands = max(1, math.ceil(len(panels) / COLUMNS))
    columns = math.ceil(len(panels) / bands)
    shape, (height, width) = correlations.grid.shape, in_slices(correlations.grid.shape)
    # every length is in inches and every panel is placed by hand: no layout engine makes them all alike
    side, gap, left, right, top = 1.4, 0.12, 0.6, 1.0, 0.45
    across = side * min(1.0, 1.6 * width / height)  # of a map, narrower than its column on a tall grid
    down = across * height / width if height > 1 else 0.7
    band_height = 0.3 + side + 0.1 + down + 0.35  # name, pairs, gap, map, number
    needed = left + columns * (side + gap) + right
    wide = max(needed, 6.8)
    note = f"reach: mean distance in {correlations.unit} under the map"
    notes = wrap_notes([f"{note}; {correlations.uniform_distance:.2f} for a uniform map", correlations.verdict], wide)
    inches = np.array([wide, top + bands * band_height + 0.15 + 0.2 * len(notes)])
    left += (inches[0] - needed) / 2
    figure = Figure(figsize=(inches[0], inches[1]))

    scale: dict[str, Any] = {"cmap": SIMILARITY, "norm": Normalize(-1, 1)}
    for index, (name, image) in enumerate(panels):
        band, column = divmod(index, columns)
        x, y = left + column * (side + gap), top + band * band_height + 0.3
        pairs = axes_at(figure, x, y, side, side)
        center = axes_at(figure, x + (side - across) / 2, y + side + 0.1, across, down)
        pairs.set_title(name, fontsize=10, pad=4)
        for ax in (pairs, center):
            ax.set(xticks=[], yticks=[])
        if column == 0:
            tokens = correlations.grid.patches
            pairs.set_ylabel(f"all pairs\n{tokens} × {tokens}", fontsize=9)
            center.set_ylabel(
                f"center token\n{' × '.join(map(str, shape))}" if height > 1 else "center\ntoken", fontsize=9
            )
        if image is None:
            _draw_nothing(pairs)
            _draw_nothing(center)
            continue
        pairs.imshow(image, **scale)
        row = image[correlations.grid.center]
        if height > 1:
            center.imshow(side_by_side(row.reshape(shape)), interpolation="nearest", **scale)
            spot: tuple[float, float] = _center_of(shape)
        else:
            center.plot(row, color=PALETTE[0], linewidth=1)
            center.set(xlim=(-0.5, width - 0.5), ylim=(-1.1, 1.1))
            spot = correlations.grid.center, row[correlations.grid.center]
        mark(center, *spot)
        center.set_xlabel(f"reach {reach(image, correlations.grid):.2f}", fontsize=9)
    long = min(band_height - 0.65, 4.0)
    bar = axes_at(figure, left + columns * (side + gap) + 0.1, top + 0.3, 0.16, long)
    figure.colorbar(ScalarMappable(**scale), cax=bar)
    bar.set_ylabel("cosine similarity", fontsize=9)
    bar.tick_params(labelsize=8)
    middle = (left + columns * (side + gap) / 2) / inches[0]
    add_title(figure, title, middle)
    add_notes(figure, notes)
    return figure


def center_sheet(models: Mapping[str, Correlations], title: str = "") -> Figure:
    """Draw the center token's map in every layer, one row per model, to compare models of one shape.

    Below each map is its reach, the mean distance over which positions are similar.

    Args:
        models: name -> correlations; all of images, with the same grid and number of layers.
        title: above the sheet.

    Raises:
        ValueError: if there are none, or their shapes differ.
    """
    shapes = {correlations.center_maps.shape for correlations in models.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 3 or 1 in next(iter(shapes))[1:]:
        raise ValueError(f"`models` must be models with one shape (layers, height, width), got {sorted(shapes)}.")
    ((layers, height, width),) = shapes
    side = min(1.3, 8.4 / layers)
    figure = Figure(figsize=(1.1 + layers * side + 0.9, 0.6 + len(models) * (side * height / width + 0.3)))
    figure.set_layout_engine("constrained", w_pad=0.02, h_pad=0.03)
    panels = figure.subplots(len(models), layers, squeeze=False)
    scale: dict[str, Any] = {"cmap": SIMILARITY, "norm": Normalize(-1, 1)}
    for row, (name, correlations) in zip(panels, models.items(), strict=True):
        row[0].set_ylabel(printable(name), fontsize=10)
        for layer, ax in enumerate(row):
            ax.set(xticks=[], yticks=[])
            if ax in panels[0]:
                ax.set_title(f"layer {layer}", fontsize=10)
            if correlations.sources[layer] is None:
                _draw_nothing(ax)
                continue
            ax.imshow(correlations.center_maps[layer], interpolation="nearest", **scale)
            y, x = divmod(correlations.grid.center, width)
            mark(ax, x, y, size=4)
            ax.set_xlabel(f"reach {correlations.reach[layer]:.2f}", fontsize=9, labelpad=2)
    figure.colorbar(ScalarMappable(**scale), ax=panels, label="cosine similarity", shrink=0.8, pad=0.02)
    figure.suptitle(title, fontsize=11)
    return figure


def in_slices(shape: Sequence[int]) -> tuple[int, int]:
    """Return height and width of the image of a grid, with the slices of a video or volume side by side."""
    *slices, height, width = shape
    return height, width if not slices else slices[0] * (width + 1) - 1


def side_by_side(values: Array) -> Array:
    """Return a map (H, W), or the slices of a video or volume (T, H, W) with gaps between them, as one image."""
    if values.ndim == 2:
        return values
    gapped: Array = np.pad(values, ((0, 0), (0, 0), (0, 1)), constant_values=np.nan).transpose(1, 0, 2)
    return gapped.reshape(len(gapped), -1)[:, :-1]


def _center_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return the column and the row of the center token in that image."""
    *slices, y, x = (side // 2 for side in shape)
    return x + sum(slices) * (shape[-1] + 1), y


def _draw_nothing(ax: Axes) -> None:
    ax.set_facecolor("#f2f2f2")
    ax.text(0.5, 0.5, "no position", ha="center", va="center", fontsize=9, color="#666666", transform=ax.transAxes)


def bias_map_sheet(maps: BiasMaps, title: str) -> Figure:
    """Draw the bias of all pairs of positions, one row per layer and one column per head, and the center token's map.

    Every row has one color scale, from its smallest bias to its largest, so that the heads of a layer can be compared.
    Keys that a query does not see are left white. Below each pair of panels is the mean attention distance if the bias
    alone decided.

    Reference: LaPE's released code draws all pairs in this way, one figure per layer and head.

    Args:
        maps: of one model, or of one stage.
        title: above the sheet.
    """
    shape, (height, width) = maps.grid.shape, in_slices(maps.grid.shape)
    side, gap, left, right, top = 1.5, 0.15, 0.75, 0.8, 0.75
    planar = height > 1
    across = side * min(1.0, width / height)
    down = across * height / width if planar else 0.0
    band = side + (down + 0.08) * planar + 0.4
    heads = maps.bias.shape[1]
    needed = left + heads * (side + gap) + right
    wide = max(needed, 5.5)
    note = f"reach: mean distance in {maps.unit} that the bias alone attends over"
    notes = wrap_notes([f"{note}; {maps.uniform_distance:.2f} without a bias"], wide)
    inches = np.array([wide, top + len(maps.layers) * band + 0.2 + 0.2 * len(notes)])
    left += (inches[0] - needed) / 2
    small = 8.5 * max(1.0, min(inches[0] / 9.2, 1.8))  # a wide sheet is shown smaller
    figure = Figure(figsize=(inches[0], inches[1]))
    for row, biases in enumerate(maps.bias):
        low, high = float(np.nanmin(biases)), float(np.nanmax(biases))
        norm = Normalize(low, high if high > low else low + 1.0)
        y = top + row * band
        for head, image in enumerate(biases):
            x = left + head * (side + gap)
            pairs = axes_at(figure, x, y, side, side)
            pairs.imshow(image, cmap=SIMILARITY, norm=norm, interpolation="nearest", aspect="auto")
            last = pairs
            if planar:
                last = axes_at(figure, x + (side - across) / 2, y + side + 0.08, across, down)
                center = image[maps.grid.center].reshape(shape)
                last.imshow(side_by_side(center), cmap=SIMILARITY, norm=norm, interpolation="nearest", aspect="auto")
                last.set(xticks=[], yticks=[])
                mark(last, *_center_of(shape), size=4)
            pairs.set(xticks=[], yticks=[])
            last.set_xlabel(f"reach {maps.reach[row, head]:.2f}", fontsize=small, labelpad=3)
            if row == 0:
                pairs.set_title(f"head {head}", fontsize=small, pad=4)
            if head == 0:
                pairs.set_ylabel(f"{maps.name(row)}\n{maps.grid.patches} queries", fontsize=small)
                if planar:
                    last.set_ylabel(f"center\n{' × '.join(map(str, shape))}", fontsize=small)
        bar = axes_at(figure, left + heads * (side + gap), y, 0.12, side)
        figure.colorbar(ScalarMappable(norm, SIMILARITY), cax=bar)
        bar.tick_params(labelsize=8)
        if row == 0:
            bar.set_title("bias", fontsize=small, pad=4)
    add_title(figure, title)
    add_notes(figure, notes)
    return figure
