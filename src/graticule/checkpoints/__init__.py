"""Weights in files: reading, published names, loading, transfer to another model, released checkpoints.

A file is one step on the way from a file to a model.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
