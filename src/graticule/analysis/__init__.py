"""Analyses of the position information in a model: correlations, attention, equivariance, and their figures."""

from graticule.analysis.any_view import view_of
from graticule.analysis.attention import attention_maps
from graticule.analysis.attention_map import AttentionMap, save_attention
from graticule.analysis.attention_sheet import attention_on_image, attention_sheet, sheet_heads
from graticule.analysis.audit import Audit, audit
from graticule.analysis.audit_json import audit_json
from graticule.analysis.audit_page import audit_page
from graticule.analysis.backbone_view import BackboneView
from graticule.analysis.bias import BiasMaps, bias_maps
from graticule.analysis.bias_map_sheet import bias_map_sheet
from graticule.analysis.coefficients import Coefficients, norm_coefficients
from graticule.analysis.convergence import convergence_plot
from graticule.analysis.correlation import position_correlations
from graticule.analysis.correlations import Correlations
from graticule.analysis.effect import Effect
from graticule.analysis.equivariance import Translation, translation_error, whole_patches
from graticule.analysis.explorer import explored
from graticule.analysis.explorer_data import Explored
from graticule.analysis.explorer_page import write_explorer
from graticule.analysis.figure_files import save_figure, save_figures
from graticule.analysis.larger_image import PASSES, check_larger, logits_of_passes
from graticule.analysis.length_plots import length_plot
from graticule.analysis.mixing import MixingMap, MixingParts, mixing_maps, mixing_parts, save_mixing
from graticule.analysis.mixing_sheet import bias_sheet, mixing_sheet, non_locality_plot, parts_sheet, sheet_layers
from graticule.analysis.pixels import pixels_of
from graticule.analysis.plots import (
    correlation_sheet,
    curves,
    locality_plot,
    translation_plot,
)
from graticule.analysis.probe import Eraser, PositionSums, Probe
from graticule.analysis.report import Report
from graticule.analysis.resolution_plot import resolution_plot
from graticule.analysis.rotary_similarity import rotary_similarity
from graticule.analysis.score_plot import score_plot
from graticule.analysis.similarity import cosine_similarity, locality, two_dimensionality
from graticule.analysis.timm_view import TimmView
from graticule.analysis.view import ModelView, Unavailable

__all__ = [
    "PASSES",
    "AttentionMap",
    "Audit",
    "BackboneView",
    "BiasMaps",
    "Coefficients",
    "Correlations",
    "Effect",
    "Eraser",
    "Explored",
    "MixingMap",
    "MixingParts",
    "ModelView",
    "PositionSums",
    "Probe",
    "Report",
    "TimmView",
    "Translation",
    "Unavailable",
    "attention_maps",
    "attention_on_image",
    "attention_sheet",
    "audit",
    "audit_json",
    "audit_page",
    "bias_map_sheet",
    "bias_maps",
    "bias_sheet",
    "check_larger",
    "convergence_plot",
    "correlation_sheet",
    "cosine_similarity",
    "curves",
    "explored",
    "length_plot",
    "locality",
    "locality_plot",
    "logits_of_passes",
    "mixing_maps",
    "mixing_parts",
    "mixing_sheet",
    "non_locality_plot",
    "norm_coefficients",
    "parts_sheet",
    "pixels_of",
    "position_correlations",
    "resolution_plot",
    "rotary_similarity",
    "save_attention",
    "save_figure",
    "save_figures",
    "save_mixing",
    "score_plot",
    "sheet_heads",
    "sheet_layers",
    "translation_error",
    "translation_plot",
    "two_dimensionality",
    "view_of",
    "whole_patches",
    "write_explorer",
]
