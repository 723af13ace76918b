"""Measures of the position information in a model: correlations, attention, equivariance, probes, effects.

A file is one measure, which returns numbers; figures and pages are in `graticule.lab`.
"""

from graticule.analysis.attention import attention_maps
from graticule.analysis.audit import Audit, audit, audit_json
from graticule.analysis.certificate import DebiasCertificate, ResizeCertificate, certify, certify_resize
from graticule.analysis.correlation import position_correlations
from graticule.analysis.debias import debias
from graticule.analysis.effect import Effect
from graticule.analysis.equivariance import Translation, translation_error, whole_patches
from graticule.analysis.mixing import MixingMap, MixingParts, mixing_maps, mixing_parts, save_mixing
from graticule.analysis.position_maps import BiasMaps, bias_maps, rotary_similarity
from graticule.analysis.probe import PositionSums, Probe, pooled_features, probe_classes
from graticule.analysis.share import PositionShare, position_share
from graticule.analysis.similarity import Correlations, cosine_similarity, reach, two_dimensionality

__all__ = [
    "Audit",
    "BiasMaps",
    "Correlations",
    "DebiasCertificate",
    "Effect",
    "MixingMap",
    "MixingParts",
    "PositionShare",
    "PositionSums",
    "Probe",
    "ResizeCertificate",
    "Translation",
    "attention_maps",
    "audit",
    "audit_json",
    "bias_maps",
    "certify",
    "certify_resize",
    "cosine_similarity",
    "debias",
    "mixing_maps",
    "mixing_parts",
    "pooled_features",
    "position_correlations",
    "position_share",
    "probe_classes",
    "reach",
    "rotary_similarity",
    "save_mixing",
    "translation_error",
    "two_dimensionality",
    "whole_patches",
]
