"""Operations on a model: attach or change a position, resize, fold, convert (`surgery.convert`), export."""

from graticule.surgery.attach import attach, detach
from graticule.surgery.attach_hub import open_attached
from graticule.surgery.certificate import Certificate, Drift
from graticule.surgery.export import Exported, export
from graticule.surgery.fold import fold, unfold
from graticule.surgery.position import change_position
from graticule.surgery.resize import resize

__all__ = [
    "Certificate",
    "Drift",
    "Exported",
    "attach",
    "change_position",
    "detach",
    "export",
    "fold",
    "open_attached",
    "resize",
    "unfold",
]
