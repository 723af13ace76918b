"""What a model made of position: correlations, pictures of them, and a page to show them on."""

from graticule.analysis.correlation import (
    Correlations,
    cosine_similarity,
    locality,
    position_correlations,
    two_dimensionality,
)
from graticule.analysis.plots import correlation_sheet, curves, locality_plot, resolution_plot, save_figure
from graticule.analysis.report import Report

__all__ = [
    "Correlations",
    "Report",
    "correlation_sheet",
    "cosine_similarity",
    "curves",
    "locality",
    "locality_plot",
    "position_correlations",
    "resolution_plot",
    "save_figure",
    "two_dimensionality",
]
