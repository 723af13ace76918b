"""The parts that blocks share; they know `LayerPosition` and no method."""

from graticule.layers.attention import Attention
from graticule.layers.block import Block

__all__ = ["Attention", "Block"]
