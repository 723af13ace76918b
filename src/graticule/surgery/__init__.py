"""Operations on an existing model: folding, another position, conversion from timm and back (`surgery.convert`)."""

from graticule.surgery.fold import fold, unfold
from graticule.surgery.position import change_position

__all__ = ["change_position", "fold", "unfold"]
