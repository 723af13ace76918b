"""Operations on a model: fold, resize, change the position, export.

A file is one operation; `fits` keeps the outputs of a model when its position changes.
"""

from graticule.surgery.change import Certificate, Drift, change_position
from graticule.surgery.export import Exported, export
from graticule.surgery.fold import fold, unfold
from graticule.surgery.resize import resize

__all__ = [
    "Certificate",
    "Drift",
    "Exported",
    "change_position",
    "export",
    "fold",
    "resize",
    "unfold",
]
