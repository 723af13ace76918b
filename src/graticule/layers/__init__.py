"""The parts that blocks share; they know `LayerPosition` and no method."""

from graticule.layers.attention import Attention
from graticule.layers.block import Block
from graticule.layers.gating import GatedBlock, GatingUnit, mix_tokens
from graticule.layers.spatial_reduction import SpatialReductionAttention

__all__ = ["Attention", "Block", "GatedBlock", "GatingUnit", "SpatialReductionAttention", "mix_tokens"]
