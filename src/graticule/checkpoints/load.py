"""Read a checkpoint that may be anybody's, and load it or say why not."""

from __future__ import annotations

import argparse
import json
import pickle
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from graticule.checkpoints.names import (
    GRIDS,
    own_state,
    read_grids,
    unwrap_checkpoint,
    valid_grids,
    with_grids,
)
from graticule.checks import checked, printable
from graticule.encodings import Position
from graticule.files import write_whole

#: What the readers raise for a file that is damaged or of another kind.
_UNREADABLE = (
    *(RuntimeError, EOFError, SafetensorError, OSError, ValueError, KeyError, IndexError, AttributeError),
    *(struct.error, TypeError, AssertionError),
)


@checked
def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a `.safetensors` file or one that `torch.save` wrote, without running any code that is in it.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is truncated, of another kind, or holds more than tensors and plain values.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"`path` must be a checkpoint file, got {str(path)!r}, which is not there.")
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        with warnings.catch_warnings():  # of the unpickler about what it is going to refuse
            warnings.simplefilter("ignore")
            # DeiT's and LaPE's code keep the options of the run in their checkpoints, an argparse.Namespace: plain data
            with torch.serialization.safe_globals([argparse.Namespace]):
                found = torch.load(path, map_location="cpu", weights_only=True)
    except (*_UNREADABLE, pickle.UnpicklingError):
        if unsafe := _unsafe_names(path):
            raise ValueError(
                f"{path} holds Python objects that could run code when read ({', '.join(unsafe[:3])}), so it was not "
                "read; ask for its weights alone, best as .safetensors."
            ) from None
        raise ValueError(f"{path} is not a checkpoint of PyTorch or safetensors, or it is truncated.") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} must hold a mapping of names to tensors, got {type(found).__name__}.")
    return found if isinstance(found, dict) else dict(found)


def save_weights(state: Mapping[str, Tensor], path: Path) -> Path:
    """Write a state dict as .safetensors, whole or not at all, with the grid of each table; returns `path`.

    Raises:
        OSError: if it cannot be written; what was at `path` is then as it was.
    """
    tensors = {name: value.contiguous() for name, value in state.items()}
    metadata = {"format": "pt", GRIDS: json.dumps(read_grids(state))}
    return write_whole(path, lambda temporary: save_file(tensors, temporary, metadata))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        metadata = file.metadata() or {}
    try:
        grids = valid_grids({GRIDS: json.loads(metadata.get(GRIDS, "{}"))})
    except (ValueError, RecursionError):  # written by somebody else, for something else
        grids = {}
    return with_grids(tensors, grids)


def _unsafe_names(path: Path) -> list[str]:
    """Name what a checkpoint would import beside plain data, as far as it can be read without importing it."""
    try:
        return sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - {"argparse.Namespace"})
    except (*_UNREADABLE, pickle.UnpicklingError):
        return []


@checked
def load_checkpoint(model: nn.Module, path: str | Path) -> nn.Module:
    """Load the weights at `path` into `model`, whole or not at all; returns the model.

    Ours, DeiT's, timm's and those of LaPE's code are taken. Position parameters of another grid or window are
    resampled where their encoding can be. State dicts of this library say what grid a table is for, in files of
    `torch.save` and in the weights of a run; other checkpoints do not, and what can be a square is taken for one
    (with a warning where the model's own grid has as many patches and is none). A table under our names that does not
    say it and has the shape of the model's is taken as it is.

    Args:
        model: one of our backbones.
        path: a checkpoint.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file cannot be read, or does not fit: names missing, names left over, other shapes
            (a class count that does not match is named as such), tensors that are sparse, quantized, without values
            or of another kind of number than the model's, values that are not finite. The model is then as it was.
    """
    state = _state_for(model, path)
    if complaints := _misfits(model, state):
        raise ValueError(f"{path} does not fit {type(model).__name__}: " + "; ".join(complaints) + ".")
    model.load_state_dict(state)
    return model


@checked
def load_position(model: nn.Module, path: str | Path) -> nn.Module:
    """Load the position parameters of the checkpoint at `path` into `model` and nothing else; returns the model.

    As for a PEG that was learned in one training and is part of another from its start (CPVT, 2023, section 5.1).

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file cannot be read, or its position parameters do not fit. The model is then as it was.
    """
    state = _state_for(model, path)
    position: Any = model.position
    found = {name.removeprefix("position."): value for name, value in state.items() if name.startswith("position.")}
    complaints = _misfits(position, found)
    if complaints or not found:
        what = "; ".join(complaints) or "neither has any"
        raise ValueError(f"the position parameters of {path} do not fit {type(model).__name__}: {what}.")
    position.load_state_dict(found)
    return model


def unusable(value: Tensor) -> str:
    """Say why a tensor of a checkpoint cannot be used, '' if it can: it has to be dense, with every value stored."""
    if value.is_quantized:
        return "quantized"
    if value.layout != torch.strided:
        return "sparse"
    if value.is_meta:
        return "without values"
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        return "a view that repeats its values"  # a few bytes may so be said to be any number of values
    return ""


def _state_for(model: nn.Module, path: str | Path) -> dict[str, Tensor]:
    """Read the checkpoint at `path` as a state dict under the names of `model`, position parameters resampled."""
    if not isinstance(getattr(model, "position", None), Position):
        raise ValueError(f"`model` must be a backbone with a `position`, got {type(model).__name__}.")
    checkpoint = read_checkpoint(path)
    try:
        state = unwrap_checkpoint(checkpoint)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for name, value in state.items():
        if why := unusable(value):
            raise ValueError(f"{path}: {_shown(name)} must be a plain tensor, got one that is {why}.")
    return own_state(model, state)


def _misfits(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Say what keeps `state` from being loaded into `model`, at most four things."""
    own = model.state_dict()
    complaints = []
    for name, value in state.items():
        if name not in own:
            continue
        if value.shape != own[name].shape:
            if name.startswith("head") and value.shape[1:] == own[name].shape[1:] and value.ndim:
                complaints.append(
                    f"it has {value.shape[0]} classes where the model has {own[name].shape[0]} ({name}); create the "
                    f"model with num_classes={value.shape[0]} and use reset_classifier afterwards"
                )
                break
            complaints.append(f"{name} is {tuple(value.shape)} where the model has {tuple(own[name].shape)}")
        elif kind(value) != kind(own[name]):
            complaints.append(f"{name} is {_dtype(value)} where the model has {_dtype(own[name])}")
        elif count := int((~value.to(own[name].dtype).isfinite()).sum()):
            complaints.append(f"{name} has {count:,} values that are not finite as {_dtype(own[name])}")
    for what, names in (
        ("lacks", own.keys() - state.keys()),
        ("has, beyond the model's,", state.keys() - own.keys()),
    ):
        if names:
            shown = [_shown(name) for name in sorted(names)[:4]]
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            complaints.append(f"it {what} {', '.join(shown)}{more}")
    return complaints[:4]


def kind(value: Tensor) -> str:
    """The kind of number that a tensor holds; within one, other dtypes are a matter of rounding."""
    if value.is_floating_point():
        return "floating point"
    return "complex" if value.is_complex() else "truth" if value.dtype == torch.bool else "integer"


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _shown(name: str) -> str:
    """A name as it can stand in a message of one line."""
    return printable(name if len(name) <= 100 else f"{name[:100]}...")
