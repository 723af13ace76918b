"""Operations on an existing model: folding."""

from graticule.surgery.fold import fold, unfold

__all__ = ["fold", "unfold"]
