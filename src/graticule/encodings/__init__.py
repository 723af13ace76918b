"""Encodings, one file per method: each maps a grid to one `LayerPosition` per layer.

Every file of this folder is imported and its public classes are re-exported, so a new method needs only its file.
"""

from importlib import import_module
from pkgutil import iter_modules

from graticule.encodings.absolute import AbsoluteEncoding, FixedEncoding, JoinedPosition
from graticule.encodings.base import (
    ENCODINGS,
    CombinedPosition,
    Encoding,
    NoEncoding,
    NoPosition,
    Position,
    PositionBuilder,
    Site,
    check_fields,
    register_encoding,
)
from graticule.encodings.between import BeforeProjections, BetweenBlocks
from graticule.encodings.bias import BiasEncoding, PatchBias
from graticule.encodings.computed import ComputedEncoding
from graticule.encodings.folded import Folded, FoldedPosition
from graticule.encodings.folded_sizes import FoldedSizes
from graticule.encodings.layer_bias import BiasPosition, LayerBias, SharedBiasPosition
from graticule.encodings.mixing import MixingEncoding
from graticule.encodings.mixing_position import MixingPosition
from graticule.encodings.pooled import PooledPosition, PooledPyramid, Pooling
from graticule.encodings.pyramid import PyramidPosition
from graticule.encodings.rotary import RotaryEncoding, RotaryPosition
from graticule.encodings.token_mixing import TokenMixing

#: Names that all methods share, also for type checkers; they find the names of a method in its file.
__all__ = [
    "ENCODINGS",
    "AbsoluteEncoding",
    "BeforeProjections",
    "BetweenBlocks",
    "BiasEncoding",
    "BiasPosition",
    "CombinedPosition",
    "ComputedEncoding",
    "Encoding",
    "FixedEncoding",
    "Folded",
    "FoldedPosition",
    "FoldedSizes",
    "JoinedPosition",
    "LayerBias",
    "MixingEncoding",
    "MixingPosition",
    "NoEncoding",
    "NoPosition",
    "PatchBias",
    "PooledPosition",
    "PooledPyramid",
    "Pooling",
    "Position",
    "PositionBuilder",
    "PyramidPosition",
    "RotaryEncoding",
    "RotaryPosition",
    "SharedBiasPosition",
    "Site",
    "TokenMixing",
    "check_fields",
    "register_encoding",
]

for _file in iter_modules(__path__):
    _module = import_module(f"{__name__}.{_file.name}")
    for _name, _value in list(vars(_module).items()):
        if isinstance(_value, type) and _value.__module__ == _module.__name__ and not _name.startswith("_"):
            globals()[_name] = _value
            __all__ += [_name] * (_name not in __all__)
