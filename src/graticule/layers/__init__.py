"""Layers that several families of backbones share: attention, blocks, gating units, tokenizers.

A layer that one family uses is in the file of that family.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
