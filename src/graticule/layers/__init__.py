"""Layers that blocks share; they use `LayerPosition` and know no encoding or joining."""

from graticule.layers.attention import Attention
from graticule.layers.block import Block
from graticule.layers.cache import KeyValueCache
from graticule.layers.causal_attention import CausalAttention
from graticule.layers.gating import GatedBlock, GatingUnit, mix_tokens
from graticule.layers.tokenizers import (
    Patches,
    Tokenizer,
    patch_grid,
)

__all__ = [
    "Attention",
    "Block",
    "CausalAttention",
    "GatedBlock",
    "GatingUnit",
    "KeyValueCache",
    "Patches",
    "Tokenizer",
    "mix_tokens",
    "patch_grid",
]
