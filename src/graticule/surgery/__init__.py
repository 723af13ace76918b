"""Operations on a model: fold, resize, change the position, export.

A file is one operation; `fits` keeps the outputs of a model when its position changes.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
