"""Operations on an existing model: attaching or changing its position, folding, conversion (`surgery.convert`)."""

from graticule.surgery.attach import attach, detach
from graticule.surgery.fold import fold, unfold
from graticule.surgery.position import change_position

__all__ = ["attach", "change_position", "detach", "fold", "unfold"]
