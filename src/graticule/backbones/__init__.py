"""Tokens in, tokens out: one file a family."""

from graticule.backbones import cpvt_sizes, gmlp_sizes, posmlp_sizes, pvt_sizes, swin_sizes, vit_sizes
from graticule.backbones.distilled import DistilledVisionTransformer
from graticule.backbones.gmlp import GMlp
from graticule.backbones.posmlp import PosMlp
from graticule.backbones.published import published_state_dict
from graticule.backbones.pvt import PyramidVisionTransformer
from graticule.backbones.registry import create_model, list_arguments, list_models
from graticule.backbones.swin import SwinTransformer
from graticule.backbones.vision_transformer import VisionTransformer

__all__ = [
    "DistilledVisionTransformer",
    "GMlp",
    "PosMlp",
    "PyramidVisionTransformer",
    "SwinTransformer",
    "VisionTransformer",
    "cpvt_sizes",
    "create_model",
    "gmlp_sizes",
    "list_arguments",
    "list_models",
    "posmlp_sizes",
    "published_state_dict",
    "pvt_sizes",
    "swin_sizes",
    "vit_sizes",
]
