"""Analyses of the position information in a model: correlations, attention, equivariance, and their figures."""

from graticule.analysis.attention import AttentionMap, attention_maps, save_attention
from graticule.analysis.attention_sheet import attention_sheet
from graticule.analysis.bias import BiasMaps, bias_maps
from graticule.analysis.bias_map_sheet import bias_map_sheet
from graticule.analysis.convergence import convergence_plot
from graticule.analysis.correlation import (
    Correlations,
    cosine_similarity,
    locality,
    position_correlations,
    two_dimensionality,
)
from graticule.analysis.equivariance import Translation, translation_error, whole_patches
from graticule.analysis.length_plots import length_plot
from graticule.analysis.mixing import MixingMap, MixingParts, mixing_maps, mixing_parts, save_mixing
from graticule.analysis.mixing_sheet import bias_sheet, mixing_sheet, non_locality_plot, parts_sheet, sheet_layers
from graticule.analysis.plots import (
    correlation_sheet,
    curves,
    locality_plot,
    resolution_plot,
    save_figure,
    translation_plot,
)
from graticule.analysis.report import Report
from graticule.analysis.score_plot import score_plot

__all__ = [
    "AttentionMap",
    "BiasMaps",
    "Correlations",
    "MixingMap",
    "MixingParts",
    "Report",
    "Translation",
    "attention_maps",
    "attention_sheet",
    "bias_map_sheet",
    "bias_maps",
    "bias_sheet",
    "convergence_plot",
    "correlation_sheet",
    "cosine_similarity",
    "curves",
    "length_plot",
    "locality",
    "locality_plot",
    "mixing_maps",
    "mixing_parts",
    "mixing_sheet",
    "non_locality_plot",
    "parts_sheet",
    "position_correlations",
    "resolution_plot",
    "save_attention",
    "save_figure",
    "save_mixing",
    "score_plot",
    "sheet_layers",
    "translation_error",
    "translation_plot",
    "two_dimensionality",
    "whole_patches",
]
