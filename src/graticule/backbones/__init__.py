"""Tokens in, tokens out: one file a family."""

from graticule.backbones import (
    ceit_sizes,
    compact_sizes,
    cpvt_sizes,
    gmlp_sizes,
    posmlp_sizes,
    pvt_sizes,
    swin_sizes,
    t2t_sizes,
    vit_sizes,
)
from graticule.backbones.ceit import CeitTransformer
from graticule.backbones.compact import CompactTransformer
from graticule.backbones.distilled import DistilledVisionTransformer
from graticule.backbones.generation import generate
from graticule.backbones.gmlp import GMlp
from graticule.backbones.language import LanguageModel, TextCache
from graticule.backbones.language_sizes import (
    create_language_model,
    list_language_arguments,
    list_language_models,
)
from graticule.backbones.posmlp import PosMlp
from graticule.backbones.pvt import PyramidVisionTransformer
from graticule.backbones.registry import create_model, list_arguments, list_models, register_backbone
from graticule.backbones.swin import SwinTransformer
from graticule.backbones.t2t import T2tVisionTransformer
from graticule.backbones.vision_transformer import VisionTransformer

__all__ = [
    "CeitTransformer",
    "CompactTransformer",
    "DistilledVisionTransformer",
    "GMlp",
    "LanguageModel",
    "PosMlp",
    "PyramidVisionTransformer",
    "SwinTransformer",
    "T2tVisionTransformer",
    "TextCache",
    "VisionTransformer",
    "ceit_sizes",
    "compact_sizes",
    "cpvt_sizes",
    "create_language_model",
    "create_model",
    "generate",
    "gmlp_sizes",
    "list_arguments",
    "list_language_arguments",
    "list_language_models",
    "list_models",
    "posmlp_sizes",
    "pvt_sizes",
    "register_backbone",
    "swin_sizes",
    "t2t_sizes",
    "vit_sizes",
]
