"""Data sets, texts and augmentation.

Names are imported when they are first used: a recipe needs no PyTorch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
