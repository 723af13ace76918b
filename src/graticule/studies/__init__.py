"""Several runs held side by side."""

from graticule.studies.compare import Comparison, compare
from graticule.studies.lengths import Lengths, lengths
from graticule.studies.resolution import Resolutions, resolutions

__all__ = ["Comparison", "Lengths", "Resolutions", "compare", "lengths", "resolutions"]
