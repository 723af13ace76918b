"""Several runs held side by side."""

from graticule.studies.compare import Comparison, compare
from graticule.studies.resolution import Resolutions, resolutions

__all__ = ["Comparison", "Resolutions", "compare", "resolutions"]
