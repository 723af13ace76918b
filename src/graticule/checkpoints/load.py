"""Load a checkpoint into a model, completely or not at all, with a reason if it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from graticule.checkpoints.names import own_state, position_of
from graticule.checkpoints.read import dtype_name, kind, read_state, unusable
from graticule.registry.checks import checked, printable


@checked
def load_checkpoint(model: nn.Module, path: str | Path) -> nn.Module:
    """Load the weights at `path` into `model`, completely or not at all, and return the model.

    Checkpoints of this library, DeiT, timm and LaPE's code are accepted. Position parameters of another grid or window
    are resampled if their encoding can be. State dicts of this library record the grid of each table, in files of
    `torch.save` and in the weights of a run; other checkpoints do not, and a table of them is assumed to be square if
    it can be (with a warning if the model's own grid has as many patches and is not square). A table under our names
    without a recorded grid, with the shape of the model's, is loaded unchanged.

    Args:
        model: one of our backbones.
        path: a checkpoint.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file cannot be read, or does not fit: names missing, names left over, other shapes
            (a class count that does not match is named as such), tensors that are sparse, quantized, without values
            or of another kind of number than the model's, values that are not finite. The model is then unchanged.
    """
    state = _state_for(model, path)
    if complaints := misfits(model, state):
        raise ValueError(f"{path} does not fit {type(model).__name__}: " + "; ".join(complaints) + ".")
    model.load_state_dict(state)
    return model


@checked
def load_own(model: nn.Module, path: str | Path) -> nn.Module:
    """Load weights under the names of the `state_dict` of `model`, which can be any module, and return the model.

    Args:
        model: a module, such as a detector, which contains a backbone.
        path: a checkpoint of a model that was built in the same way.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file cannot be read, or does not fit. The model is then unchanged.
    """
    state = _read_usable(path)
    if all(name.startswith("model.") for name in model.state_dict()):  # reading removed this as the prefix of a wrapper
        state = {f"model.{name}": value for name, value in state.items()}
    if complaints := misfits(model, state):
        raise ValueError(f"{path} does not fit {type(model).__name__}: " + "; ".join(complaints) + ".")
    model.load_state_dict(state)
    return model


@checked
def load_position(model: nn.Module, path: str | Path) -> nn.Module:
    """Load only the position parameters of the checkpoint at `path` into `model`, and return the model.

    For example, a PEG that was learned in one training can start another (CPVT, 2023, section 5.1).

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file cannot be read, or its position parameters do not fit. The model is then unchanged.
    """
    state = _state_for(model, path)
    position = position_of(model)
    found = {name.removeprefix("position."): value for name, value in state.items() if name.startswith("position.")}
    complaints = misfits(position, found)
    if complaints or not found:
        what = "; ".join(complaints) or "neither has any"
        raise ValueError(f"the position parameters of {path} do not fit {type(model).__name__}: {what}.")
    position.load_state_dict(found)
    return model


def _state_for(model: nn.Module, path: str | Path) -> dict[str, Tensor]:
    """Read the checkpoint at `path` as a state dict with the names of `model` and resampled position parameters."""
    position_of(model)
    return own_state(model, _read_usable(path))


def _read_usable(path: str | Path) -> dict[str, Tensor]:
    """Read the checkpoint at `path` as a state dict of plain tensors."""
    state = read_state(path)
    for name, value in state.items():
        if why := unusable(value):
            raise ValueError(f"{path}: {_shown(name)} must be a plain tensor, got one that is {why}.")
    return state


def misfits(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Describe, in at most four items, why `state` cannot be loaded into `model`."""
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
            complaints.append(f"{name} is {dtype_name(value)} where the model has {dtype_name(own[name])}")
        elif count := int((~value.to(own[name].dtype).isfinite()).sum()):
            complaints.append(f"{name} has {count:,} values that are not finite as {dtype_name(own[name])}")
    for what, names in (
        ("lacks", own.keys() - state.keys()),
        ("has, unlike the model,", state.keys() - own.keys()),
    ):
        if names:
            shown = [_shown(name) for name in sorted(names)[:4]]
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            complaints.append(f"it {what} {', '.join(shown)}{more}")
    return complaints[:4]


def _shown(name: str) -> str:
    """Return a name in a form that fits into a message of one line."""
    return printable(name if len(name) <= 100 else f"{name[:100]}...")
