"""Sheets of all maps of position information of a model, in a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from graticule.analysis.bias_map_sheet import bias_map_sheet
from graticule.analysis.correlations import Correlations
from graticule.analysis.plots import correlation_sheet
from graticule.analysis.position_maps import StageMaps
from graticule.analysis.report import Report

#: Maximum number of layers in a sheet of biases.
_SHEET_LAYERS = 6


def position_sheets(report: Report, stages: Sequence[StageMaps], title: str) -> None:
    """Add the sheets of all maps of a model to a report.

    Args:
        report: the page.
        stages: the maps of each stage, as `position_maps` returns them.
        title: subject of the sheets, such as the name of the model.
    """
    for number, maps in enumerate(stages, start=1):
        of = f", stage {number}" if len(stages) > 1 else ""
        if maps.correlations is not None:
            said = f"Position correlations{of}: the cosine of two positions as each layer sees them (LaPE, Eq. 12)"
            report.figure(
                correlation_sheet(maps.correlations, f"Position correlations, {title}{of}"),
                said,
                f"Position correlations{of}",
            )
        if maps.rotary is not None:
            said = f"Similarity of two positions under the rotation of queries and keys alone, mean over heads{of}"
            rotary, same = _once(maps.rotary)
            said += "; the same in all layers that rotate" * same
            report.figure(
                correlation_sheet(rotary, f"Similarity under rotation, {title}{of}"),
                said,
                f"Similarity under rotation{of}",
            )
        if maps.biases is not None:
            biases, said = maps.biases, f"The bias that each head adds to its attention logits{of}"
            if len(biases.layers) > _SHEET_LAYERS:
                chosen = np.linspace(0, len(biases.layers) - 1, _SHEET_LAYERS).round().astype(int)
                kept = tuple(biases.layers[i] for i in chosen)
                said += f"; {_SHEET_LAYERS} of {len(biases.layers)} layers"
                biases = dataclasses.replace(biases, layers=kept, bias=biases.bias[chosen])
            report.figure(bias_map_sheet(biases, f"Bias of attention, {title}{of}"), said, f"Biases of the heads{of}")


def _once(rotary: Correlations) -> tuple[Correlations, bool]:
    """Return the maps of one layer if all layers that rotate have the same map, and whether they do."""
    rotating = [index for index, source in enumerate(rotary.sources) if source is not None]
    first = rotary.similarity[rotating[0]]
    if len(rotating) == 1 or any(not np.array_equal(rotary.similarity[index], first) for index in rotating):
        return rotary, False
    return dataclasses.replace(rotary, similarity=first[None], sources=(rotary.sources[rotating[0]],)), True
