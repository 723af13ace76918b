"""The parts that blocks share; they know `LayerPosition` and no method."""

from graticule.layers.attention import Attention
from graticule.layers.block import Block
from graticule.layers.spatial_reduction import SpatialReductionAttention

__all__ = ["Attention", "Block", "SpatialReductionAttention"]
