"""Models of other libraries: what they receive, their structure, and an attached position.

A file is one way to look into a model that this library did not build, or to change it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
