"""Several runs compared. Names are imported when they are first used, for listing runs needs no PyTorch."""

from typing import TYPE_CHECKING

from graticule.lazy import lazy_names

if TYPE_CHECKING:
    from graticule.studies.compare import Comparison, compare
    from graticule.studies.lengths import Lengths, lengths
    from graticule.studies.resolution import Resolutions, resolutions

__all__ = ["Comparison", "Lengths", "Resolutions", "compare", "lengths", "resolutions"]

_HOMES = {
    "Comparison": "compare",
    "Lengths": "lengths",
    "Resolutions": "resolution",
    "compare": "compare",
    "lengths": "lengths",
    "resolutions": "resolution",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
