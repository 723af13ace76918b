"""Position for vision backbones: an encoding, a joining, a backbone, and a look at what came of it."""

from graticule.backbones import (
    create_language_model,
    create_model,
    generate,
    list_language_models,
    list_models,
    published_state_dict,
)
from graticule.factory import build_position, list_decompositions, list_encodings, list_joinings
from graticule.grid import Grid
from graticule.joining import LayerPosition
from graticule.surgery import Transfer, fold, load_checkpoint, transfer, unfold

__version__ = "0.1.0"

__all__ = [
    "Grid",
    "LayerPosition",
    "Transfer",
    "build_position",
    "create_language_model",
    "create_model",
    "fold",
    "generate",
    "list_decompositions",
    "list_encodings",
    "list_joinings",
    "list_language_models",
    "list_models",
    "load_checkpoint",
    "published_state_dict",
    "transfer",
    "unfold",
]
