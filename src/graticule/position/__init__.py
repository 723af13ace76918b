"""Encodings and joinings put together: a grid in, one `LayerPosition` a layer out."""

from graticule.position.base import CombinedPosition, NoPosition, Position, PositionBuilder, check_fields
from graticule.position.bias import BiasPosition, SharedBiasPosition
from graticule.position.conditional import BeforeProjections, BetweenBlocks
from graticule.position.folded import FoldedPosition
from graticule.position.joined import JoinedPosition
from graticule.position.mixing import MixingPosition
from graticule.position.pyramid import PyramidPosition
from graticule.position.rotary import RotaryPosition

__all__ = [
    "BeforeProjections",
    "BetweenBlocks",
    "BiasPosition",
    "CombinedPosition",
    "FoldedPosition",
    "JoinedPosition",
    "MixingPosition",
    "NoPosition",
    "Position",
    "PositionBuilder",
    "PyramidPosition",
    "RotaryPosition",
    "SharedBiasPosition",
    "check_fields",
]
