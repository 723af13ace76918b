"""Position encodings for vision backbones: encodings, joinings, backbones, and analyses of position in every layer.

A name is imported when it is first used, so that `import graticule` costs milliseconds. `import graticule.backbones`
registers the models with timm, as `graticule_...`.
"""

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
