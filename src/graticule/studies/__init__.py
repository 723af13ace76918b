"""Several runs held side by side."""

from graticule.studies.compare import Comparison, compare

__all__ = ["Comparison", "compare"]
