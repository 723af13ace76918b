"""State dicts under published names: DeiT's, timm's and LaPE's can be loaded, and ours can be given under them."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graticule.checkpoints.read import GRIDS, read_grids, valid_grids
from graticule.position.position import Position

#: Buffers of published code that are computed here.
_COMPUTED = ("relative_position_index", "rel_indices")


def position_of(model: nn.Module) -> Position:
    """Return the position of a backbone.

    Raises:
        ValueError: if `model` is not a backbone.
    """
    position = getattr(model, "position", None)
    if not isinstance(position, Position):
        raise ValueError(f"`model` must be a backbone with a `position`, got {type(model).__name__}.")
    return position


def register_names(model: nn.Module) -> None:
    """Let `load_state_dict` of `model` accept published names and other grids, and `state_dict` record the grids."""
    model.register_load_state_dict_pre_hook(rename_published)
    model.register_state_dict_post_hook(_keep_grids)


def rename_published(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any] | None = None,
    *_: Any,
) -> None:
    """Rename published names to ours and resample tables, in place; a `load_state_dict` pre-hook.

    Tables of another grid or window are resampled if their encoding can be, whatever their names; tables of a formula
    are replaced by the formula's. `local_metadata` records the grid of each table, if the state dict was made by
    this library. A published table without it is assumed to be square if it can be; a table under our names
    that has the shape of the model's is loaded unchanged. A family whose public code also has another layout of weights
    defines `own_layout`.
    """
    grids = valid_grids(local_metadata)
    if convert := getattr(module, "own_layout", None):
        given = {name.removeprefix(prefix): name for name in state_dict if name.startswith(prefix)}
        for name, value in convert({name: state_dict.pop(key) for name, key in given.items()}).items():
            state_dict[prefix + name] = value
    rename: Any = getattr(module, "own_name", None)
    if rename is not None:
        for name in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[prefix + rename(name.removeprefix(prefix))] = state_dict.pop(name)
        grids = {rename(name): shape for name, shape in grids.items()}
    position: Any = module.position
    # a parameter may have several published names, of which a checkpoint has one
    published = position.published_names().items()
    named = {f"position.{own}": theirs for theirs, own in published if prefix + theirs in state_dict}
    for own, theirs in named.items():
        state_dict[prefix + own] = state_dict.pop(prefix + theirs)
    held = position.table_shapes()
    for name, parameter in position.named_parameters():
        own = f"position.{name}"
        value, shape = state_dict.get(prefix + own), grids.get(named.get(own, own))
        alike = isinstance(value, Tensor) and value.shape == parameter.shape and shape in (None, held.get(name))
        if not isinstance(value, Tensor) or (alike and own not in named):
            continue
        fitted = position.fit(name, value, shape)
        if alike and fitted is not None and not torch.equal(fitted, value):
            warnings.warn(
                f"{named[own]} does not say what grid it is for: it is taken for a square and resampled to "
                f"{held[name][0]} x {held[name][1]}.",
                stacklevel=2,
            )
        state_dict[prefix + own] = parameter.detach() if fitted is None else fitted
    for name in [key for key in state_dict if key.startswith(prefix) and key.endswith(_COMPUTED)]:
        del state_dict[name]


def own_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and resample the state dict of a checkpoint for `model`."""
    rename_published(model, state, "", {GRIDS: read_grids(state)})
    return dict(state)  # without the grids that the tables had before


def published_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of `model` in the form of its family's public code: timm, DeiT, LaPE, PVT, Twins, PosMLP.

    So timm can load a model with a learnable encoding and the default joining.

    Raises:
        ValueError: if the model is not a backbone.
    """
    position_of(model)
    convert: Callable[[], dict[str, Tensor]] | None = getattr(model, "released_layout", None)
    return renamed_state_dict(model) if convert is None else convert()


def renamed_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of `model` under published names, in our layout."""
    position = position_of(model)
    names = {f"position.{own}": theirs for theirs, own in position.published_names().items()}
    rename: Callable[[str], str] = getattr(model, "published_name", str)
    state: Any = model.state_dict()
    published = OrderedDict((rename(names.get(name, name)), value) for name, value in state.items())
    grids = {rename(names.get(name, name)): shape for name, shape in read_grids(state).items()}
    published.__dict__["_metadata"] = {**state._metadata, "": {**state._metadata[""], GRIDS: grids}}
    return published


def _keep_grids(module: Any, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    """Record the grid of every table in the metadata of a state dict, where PyTorch records versions."""
    shapes = module.position.table_shapes()
    local_metadata[GRIDS] = {f"position.{name}": list(shape) for name, shape in shapes.items()}
