"""The tasks, one file each with its scores beside it: classification, language modeling, detection, segmentation.

Names are imported when they are first used: the recipes and options of a task need no PyTorch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
