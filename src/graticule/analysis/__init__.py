"""Measures of the position information in a model: correlations, attention, equivariance, probes, effects.

A file is one measure, which returns numbers; figures and pages are in `graticule.lab`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
