"""Changes to a model that is there: folding, loading."""

from graticule.surgery.fold import fold, unfold
from graticule.surgery.load import load_checkpoint, load_position, read_checkpoint

__all__ = ["fold", "load_checkpoint", "load_position", "read_checkpoint", "unfold"]
