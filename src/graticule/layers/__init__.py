"""The parts that blocks share; they know `LayerPosition` and no method."""

from graticule.layers.attention import Attention
from graticule.layers.block import Block
from graticule.layers.cache import KeyValueCache
from graticule.layers.causal_attention import CausalAttention
from graticule.layers.compact_block import CompactBlock
from graticule.layers.gating import GatedBlock, GatingUnit, mix_tokens
from graticule.layers.leff import LeffBlock
from graticule.layers.spatial_reduction import SpatialReductionAttention
from graticule.layers.tokenizers import (
    ConvolutionalTokenizer,
    ImageToTokens,
    Patches,
    Tokenizer,
    TokensToToken,
    patch_grid,
)
from graticule.layers.window_attention import WindowAttention

__all__ = [
    "Attention",
    "Block",
    "CausalAttention",
    "CompactBlock",
    "ConvolutionalTokenizer",
    "GatedBlock",
    "GatingUnit",
    "ImageToTokens",
    "KeyValueCache",
    "LeffBlock",
    "Patches",
    "SpatialReductionAttention",
    "Tokenizer",
    "TokensToToken",
    "WindowAttention",
    "mix_tokens",
    "patch_grid",
]
