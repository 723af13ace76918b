"""Runs: recipes, training, results.

Names are imported when they are first used: recipes and tasks can be declared without loading PyTorch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
