"""Changes to a model that is there: folding, loading, starting from the checkpoint of another."""

from graticule.surgery.fold import fold, unfold
from graticule.surgery.load import load_checkpoint, load_position, read_checkpoint
from graticule.surgery.transfer import transfer
from graticule.surgery.transferred import Transfer, Transferred

__all__ = [
    "Transfer",
    "Transferred",
    "fold",
    "load_checkpoint",
    "load_position",
    "read_checkpoint",
    "transfer",
    "unfold",
]
