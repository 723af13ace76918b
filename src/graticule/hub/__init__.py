"""Published models: config.json, files and cards, and the kinds of models that can be opened again.

A kind is registered by the file that builds it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
