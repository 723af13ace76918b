"""Comparisons of several runs: plans, tables, statistics.

Names are imported when they are first used, since listing runs needs no PyTorch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
