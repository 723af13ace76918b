"""Encodings, one file per method: each maps a grid to one `LayerPosition` per layer.

Every file of this folder is imported and its public classes are re-exported, so a new method needs only its file.
"""

from importlib import import_module
from pkgutil import iter_modules

from graticule.encodings.forms.absolute import AbsoluteEncoding, ComputedEncoding, FixedEncoding, JoinedPosition
from graticule.encodings.forms.bias import BiasEncoding, BiasPosition, LayerBias, PatchBias, SharedBiasPosition
from graticule.encodings.forms.mixing import MixingEncoding, MixingPosition, TokenMixing
from graticule.encodings.forms.pyramid import PyramidPosition
from graticule.encodings.forms.rotary import RotaryEncoding, RotaryPosition
from graticule.position.folded import Folded, FoldedPosition, FoldedSizes
from graticule.position.position import (
    ENCODINGS,
    CombinedPosition,
    Encoding,
    NoEncoding,
    NoPosition,
    Position,
    PositionBuilder,
    StageSpec,
    check_fields,
    register_encoding,
)

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
    "Position",
    "PositionBuilder",
    "PyramidPosition",
    "RotaryEncoding",
    "RotaryPosition",
    "SharedBiasPosition",
    "StageSpec",
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
