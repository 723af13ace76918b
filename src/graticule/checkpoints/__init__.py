"""Weights in files: reading, writing, published names, loading and transfer."""

from graticule.checkpoints import released_posmlp
from graticule.checkpoints.load import load_checkpoint, load_own, load_position
from graticule.checkpoints.names import own_state, published_state_dict, register_names, renamed_state_dict
from graticule.checkpoints.read import read_checkpoint, read_state, save_weights
from graticule.checkpoints.transfer import transfer
from graticule.checkpoints.transferred import Transfer, Transferred

__all__ = [
    "Transfer",
    "Transferred",
    "load_checkpoint",
    "load_own",
    "load_position",
    "own_state",
    "published_state_dict",
    "read_checkpoint",
    "read_state",
    "register_names",
    "released_posmlp",
    "renamed_state_dict",
    "save_weights",
    "transfer",
]
