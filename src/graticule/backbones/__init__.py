"""Backbones, which map tokens to tokens; one file per family."""

from graticule.backbones.base import Backbone
from graticule.backbones.cait import Cait
from graticule.backbones.ceit import CeitTransformer
from graticule.backbones.compact import CompactTransformer
from graticule.backbones.convit import ConVit
from graticule.backbones.cpvt import ConditionalVisionTransformer
from graticule.backbones.deit import DistilledVisionTransformer
from graticule.backbones.generation import generate
from graticule.backbones.gfnet import GfNet
from graticule.backbones.gmlp import GMlp
from graticule.backbones.language import (
    LanguageModel,
    TextCache,
    create_language_model,
    list_language_arguments,
    list_language_models,
)
from graticule.backbones.mixer import Mixer, ResMlp
from graticule.backbones.mvit import MultiscaleVisionTransformer
from graticule.backbones.posmlp import PosMlp
from graticule.backbones.pvt import PyramidVisionTransformer
from graticule.backbones.registry import MODELS, create_model, list_arguments, list_models, register_backbone
from graticule.backbones.sam import SamVisionTransformer
from graticule.backbones.swin import SwinTransformer
from graticule.backbones.swin_mlp import SwinMlp
from graticule.backbones.swin_v2 import SwinTransformerV2
from graticule.backbones.t2t import T2tVisionTransformer
from graticule.backbones.token_model import TokenModel
from graticule.backbones.twins import TwinsSvt
from graticule.backbones.vision_transformer import VisionTransformer
from graticule.hub.card import Card
from graticule.hub.kinds import HubModel, register_kind

__all__ = [
    "MODELS",
    "Backbone",
    "Cait",
    "Card",
    "CeitTransformer",
    "CompactTransformer",
    "ConVit",
    "ConditionalVisionTransformer",
    "DistilledVisionTransformer",
    "GMlp",
    "GfNet",
    "HubModel",
    "LanguageModel",
    "Mixer",
    "MultiscaleVisionTransformer",
    "PosMlp",
    "PyramidVisionTransformer",
    "ResMlp",
    "SamVisionTransformer",
    "SwinMlp",
    "SwinTransformer",
    "SwinTransformerV2",
    "T2tVisionTransformer",
    "TextCache",
    "TokenModel",
    "TwinsSvt",
    "VisionTransformer",
    "create_language_model",
    "create_model",
    "generate",
    "list_arguments",
    "list_language_arguments",
    "list_language_models",
    "list_models",
    "register_backbone",
    "register_kind",
]
