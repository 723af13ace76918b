"""Figures: one file per kind, which draws the numbers of an analysis or of runs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
