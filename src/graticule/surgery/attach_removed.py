"""Remove a module's own position embedding, so that another position replaces it, and restore it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Removed:
    """A parameter or buffer that zeros replace, with the information for restoring it.

    name: its name in the module.
    value: the parameter or buffer.
    order: the names of the parameters, or buffers, of its owner, in order.
    persistent: whether a buffer was in the state dict; None for a parameter.
    """

    name: str
    value: Tensor
    order: tuple[str, ...]
    persistent: bool | None


def take_out(module: nn.Module, name: str) -> Removed:
    """Replace a parameter or buffer by zeros that are not in the state dict."""
    owner, leaf = _owner(module, name)
    parameter = leaf in owner._parameters
    holder: Any = owner._parameters if parameter else owner._buffers
    persistent = None if parameter else leaf not in owner._non_persistent_buffers_set
    removed = Removed(name, holder[leaf], tuple(holder), persistent)
    if parameter:
        del owner._parameters[leaf]
    owner.register_buffer(leaf, torch.zeros_like(removed.value, requires_grad=False), persistent=False)
    return removed


def put_back(module: nn.Module, removed: Removed) -> None:
    """Restore a parameter or buffer, on the device and with the dtype of the zeros."""
    owner, leaf = _owner(module, removed.name)
    zeros = owner.get_buffer(leaf)
    del owner._buffers[leaf]
    owner._non_persistent_buffers_set.discard(leaf)
    removed.value.data = removed.value.data.to(zeros.device, zeros.dtype)
    holder: Any = owner._parameters if removed.persistent is None else owner._buffers
    values = {**holder, leaf: removed.value}
    order = [name for name in removed.order if name in values]
    order += [name for name in values if name not in order]
    holder.clear()
    holder.update((name, values[name]) for name in order)
    if removed.persistent is False:
        owner._non_persistent_buffers_set.add(leaf)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
