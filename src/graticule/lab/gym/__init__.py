"""The position gym: tasks that each need one kind of knowledge of position, and profiles of models on them.

Names are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
