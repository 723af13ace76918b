"""Backbones, which map tokens to tokens; one file per family, which registers its models.

Importing this room imports all families, so that timm knows their models.
"""

import lazy_loader

from graticule.backbones.registry import MODELS

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
MODELS.discover()
