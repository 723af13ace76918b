"""Changes to a model that is there: folding, loading."""

from graticule.surgery.fold import fold, unfold
from graticule.surgery.load import load_checkpoint, read_checkpoint

__all__ = ["fold", "load_checkpoint", "read_checkpoint", "unfold"]
