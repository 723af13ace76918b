"""State dicts under published names: DeiT's, timm's and LaPE's go in, and ours can come out under them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from graticule.position import Position

#: Buffers of references that are computed here.
_COMPUTED = ("relative_position_index",)


def rename_published(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename published names to ours, in place, before a state dict is loaded; a `load_state_dict` pre-hook.

    Tables of another grid are resampled on the way, where their encoding can be; tables of a formula are
    left to the formula.
    """
    rename: Any = getattr(module, "own_name", None)
    if rename is not None:
        for name in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[prefix + rename(name.removeprefix(prefix))] = state_dict.pop(name)
    position: Any = module.position
    for published, own in position.published_names().items():
        if prefix + published not in state_dict:
            continue
        value = position.fit(own, state_dict.pop(prefix + published))
        key = f"{prefix}position.{own}"
        state_dict[key] = module.get_parameter(f"position.{own}").detach() if value is None else value
    for name in [key for key in state_dict if key.startswith(prefix) and key.endswith(_COMPUTED)]:
        del state_dict[name]


def published_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of `model` under the names of its family's public code: timm, DeiT, LaPE, PVT, Twins.

    A model with a learnable encoding and the default joining can so be loaded by timm.

    Raises:
        ValueError: if the model is no backbone.
    """
    position: Any = getattr(model, "position", None)
    if not isinstance(position, Position):
        raise ValueError(f"`model` must be a backbone with a `position`, got {type(model).__name__}.")
    names = {f"position.{own}": theirs for theirs, own in position.published_names().items()}
    rename: Any = getattr(model, "published_name", lambda name: name)
    return {rename(names.get(name, name)): value for name, value in model.state_dict().items()}


def unwrap_checkpoint(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Take the state dict out of a checkpoint: `model`, `state_dict` or the mapping itself; no `module.` before names.

    Raises:
        ValueError: if nothing in it maps names to tensors.
    """
    state: Any = checkpoint
    for key in ("model", "state_dict", "model_state_dict"):
        if isinstance(state.get(key), Mapping):
            state = state[key]
            break
    tensors = {name: value for name, value in state.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(
            f"the checkpoint must map names to tensors, directly or under 'model' or 'state_dict', got the keys "
            f"{', '.join(map(repr, list(state)[:5])) or '(none)'}."
        )
    wrappers = ("module.", "_orig_mod.", "model.")
    while wrapper := next((w for w in wrappers if all(name.startswith(w) for name in tensors)), None):
        tensors = {name.removeprefix(wrapper): value for name, value in tensors.items()}
    return tensors
