"""Weights in files: reading and writing them, their published names, loading and transfer."""

from graticule.checkpoints import released_posmlp
from graticule.checkpoints.load import load_checkpoint, load_position, read_checkpoint, save_weights
from graticule.checkpoints.names import own_state, published_state_dict, register_names, unwrap_checkpoint
from graticule.checkpoints.transfer import transfer
from graticule.checkpoints.transferred import Transfer, Transferred

__all__ = [
    "Transfer",
    "Transferred",
    "load_checkpoint",
    "load_position",
    "own_state",
    "published_state_dict",
    "read_checkpoint",
    "register_names",
    "released_posmlp",
    "save_weights",
    "transfer",
    "unwrap_checkpoint",
]
