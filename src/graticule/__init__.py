"""Position for vision backbones: an encoding, a joining, a backbone, and what every layer knows about position.

A name is imported when it is first used, so that `import graticule` costs milliseconds. `import graticule.backbones`
registers the models with timm, as `graticule_...`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

#: Where each public name is.
_HOME = {
    "Grid": "grid",
    "LayerPosition": "joining",
    "Transfer": "surgery",
    "build_position": "factory",
    "create_language_model": "backbones",
    "create_model": "backbones",
    "fold": "surgery",
    "generate": "backbones",
    "list_decompositions": "factory",
    "list_encodings": "factory",
    "list_joinings": "factory",
    "list_language_models": "backbones",
    "list_models": "backbones",
    "load_checkpoint": "surgery",
    "published_state_dict": "backbones",
    "transfer": "surgery",
    "unfold": "surgery",
}

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


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module 'graticule' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"graticule.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
