"""Operations on an existing model: folding, loading, starting from the checkpoint of another."""

from graticule.backbones.load import load_checkpoint, load_position, read_checkpoint, save_weights
from graticule.surgery.fold import fold, unfold
from graticule.surgery.transfer import transfer
from graticule.surgery.transferred import Transfer, Transferred

__all__ = [
    "Transfer",
    "Transferred",
    "fold",
    "load_checkpoint",
    "load_position",
    "read_checkpoint",
    "save_weights",
    "transfer",
    "unfold",
]
