"""The sheet of attention biases: one row per layer, one column per head."""

from __future__ import annotations

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from graticule.analysis.bias import BiasMaps
from graticule.lab.figures.plots import SIMILARITY, axes_at


def bias_map_sheet(maps: BiasMaps, title: str, limits: tuple[float, float] | None = None) -> Figure:
    """Draw the bias of all pairs of positions, one row per layer and one column per head, and the center token's map.

    Every row has one color scale, from its smallest bias to its largest, so that the heads of a layer can be compared.
    Keys that a query does not see are left white. Below each pair of panels is the mean attention distance if the bias
    alone decided.

    Reference: LaPE's released code draws all pairs in this way, one picture per layer and head.

    Args:
        maps: of one model, or of one stage.
        title: above the sheet.
        limits: the ends of one color scale for all rows, to compare several sheets.
    """
    height, width = maps.grid.shape
    side, gap, left, right, top, bottom = 1.5, 0.15, 0.75, 0.8, 0.75, 0.4
    planar = height > 1
    across = side * min(1.0, width / height)
    down = across * height / width if planar else 0.0
    band = side + (down + 0.08) * planar + 0.4
    heads = maps.bias.shape[1]
    needed = left + heads * (side + gap) + right
    inches = np.array([max(needed, 5.5), top + len(maps.layers) * band + bottom])
    left += (inches[0] - needed) / 2
    figure = Figure(figsize=(inches[0], inches[1]))
    for row, one in enumerate(maps.bias):
        low, high = float(np.nanmin(one)), float(np.nanmax(one))
        norm = Normalize(*(limits or (low, high if high > low else low + 1.0)))
        y = top + row * band
        for head, image in enumerate(one):
            x = left + head * (side + gap)
            pairs = axes_at(figure, x, y, side, side)
            pairs.imshow(image, cmap=SIMILARITY, norm=norm, interpolation="nearest", aspect="auto")
            last = pairs
            if planar:
                last = axes_at(figure, x + (side - across) / 2, y + side + 0.08, across, down)
                center = image[maps.grid.center].reshape(height, width)
                last.imshow(center, cmap=SIMILARITY, norm=norm, interpolation="nearest", aspect="auto")
                last.set(xticks=[], yticks=[])
                for color, edge in (("white", 2.6), ("black", 1.2)):  # seen on dark and on light
                    spot = divmod(maps.grid.center, width)[::-1]
                    last.plot(*spot, "o", markersize=4, mfc="none", mec=color, mew=edge)
            pairs.set(xticks=[], yticks=[])
            last.set_xlabel(f"locality {maps.locality[row, head]:.2f}", fontsize=8, labelpad=3)
            if row == 0:
                pairs.set_title(f"head {head + 1}", fontsize=9, pad=4)
            if head == 0:
                pairs.set_ylabel(f"{maps.name(row)}\n{height * width} queries", fontsize=9)
                if planar:
                    last.set_ylabel(f"center\n{height} × {width}", fontsize=8)
        bar = axes_at(figure, left + heads * (side + gap), y, 0.12, side)
        figure.colorbar(ScalarMappable(norm, SIMILARITY), cax=bar)
        bar.tick_params(labelsize=7)
        if row == 0:
            bar.set_title("bias", fontsize=8, pad=4)
    figure.text(0.5, 1 - 0.25 / inches[1], title, ha="center", va="center", fontsize=12)
    note = f"locality: mean distance in {maps.unit} that the bias alone attends over"
    note += f"; {maps.uniform_distance:.2f} without a bias"
    figure.text(0.5, 0.18 / inches[1], note, ha="center", va="center", fontsize=8)
    return figure
