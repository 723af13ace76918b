"""Tokens in, tokens out: one file a family."""

from graticule.backbones import vit_sizes
from graticule.backbones.distilled import DistilledVisionTransformer
from graticule.backbones.published import published_state_dict
from graticule.backbones.registry import create_model, list_models
from graticule.backbones.vision_transformer import VisionTransformer

__all__ = [
    "DistilledVisionTransformer",
    "VisionTransformer",
    "create_model",
    "list_models",
    "published_state_dict",
    "vit_sizes",
]
