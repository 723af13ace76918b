"""Read a checkpoint that may be anybody's, and load it or say why not."""

from __future__ import annotations

import argparse
import pickle
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from graticule.backbones.published import rename_published, unwrap_checkpoint
from graticule.position import Position

#: What the readers raise for a file that is damaged or of another kind.
_UNREADABLE = (
    *(RuntimeError, EOFError, SafetensorError, OSError, ValueError, KeyError, IndexError, AttributeError),
    *(struct.error, TypeError, AssertionError),
)


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
            return load_file(path)
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
    return dict(found)


def _unsafe_names(path: Path) -> list[str]:
    """Name what a checkpoint would import beside plain data, as far as it can be read without importing it."""
    try:
        return sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - {"argparse.Namespace"})
    except (*_UNREADABLE, pickle.UnpicklingError):
        return []


def load_checkpoint(model: nn.Module, path: str | Path, *, resize: bool = False) -> nn.Module:
    """Load the weights at `path` into `model`, whole or not at all; returns the model.

    Ours, DeiT's, timm's and those of LaPE's code are taken, published learnable tables of another (square) grid
    resampled.

    Args:
        model: one of our backbones.
        path: a checkpoint.
        resize: resample our own tables of another grid or window too, where their encoding can be. A table says
            how many places it has and not how they lie: what can be a square is taken for one.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file cannot be read, or does not fit: names missing, names left over, other shapes
            (a class count that does not match is named as such). The model is then as it was.
    """
    state = _state_for(model, path)
    resized = _resized(model, state)
    complaints = _misfits(model, {**state, **resized} if resize else state)
    if complaints:
        offer = ""
        if resized and not _misfits(model, {**state, **resized}):
            offer = " It is of another grid or window: load_checkpoint(..., resize=True) resamples what depends on it."
        raise ValueError(f"{path} does not fit {type(model).__name__}: " + "; ".join(complaints) + "." + offer)
    model.load_state_dict({**state, **resized})
    return model


def load_position(model: nn.Module, path: str | Path) -> nn.Module:
    """Load the position parameters of the checkpoint at `path` into `model` and nothing else; returns the model.

    As for a PEG that was learned in one training and stands in another from its start (CPVT, 2023, section 5.1).

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


def _state_for(model: nn.Module, path: str | Path) -> dict[str, Tensor]:
    """Read the checkpoint at `path` as a state dict under the names of `model`."""
    if not isinstance(getattr(model, "position", None), Position):
        raise ValueError(f"`model` must be a backbone with a `position`, got {type(model).__name__}.")
    checkpoint = read_checkpoint(path)
    try:
        state = unwrap_checkpoint(checkpoint)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    rename_published(model, state, "")
    return state


def _resized(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the position parameters of `state` that have another shape than the model's, resampled if they can be."""
    own = model.state_dict()
    found = {}
    for name, value in state.items():
        if name.startswith("position.") and name in own and value.shape != own[name].shape:
            fitted = model.position.fit(name.removeprefix("position."), value)
            if fitted is not None and fitted.shape == own[name].shape:
                found[name] = fitted
    return found


def _misfits(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    own = model.state_dict()
    complaints = []
    for name, value in state.items():
        if name in own and value.shape != own[name].shape:
            if name.startswith("head") and value.shape[1:] == own[name].shape[1:] and value.ndim:
                complaints.append(
                    f"it has {value.shape[0]} classes where the model has {own[name].shape[0]} ({name}); create the "
                    f"model with num_classes={value.shape[0]} and use reset_classifier afterwards"
                )
                break
            complaints.append(f"{name} is {tuple(value.shape)} where the model has {tuple(own[name].shape)}")
    for what, names in (
        ("lacks", own.keys() - state.keys()),
        ("has, beyond the model's,", state.keys() - own.keys()),
    ):
        if names:
            shown = sorted(names)
            more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
            complaints.append(f"it {what} {', '.join(shown[:4])}{more}")
    return complaints[:4]
