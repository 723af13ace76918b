"""The model of another library that a backbone was converted from, and the way of its tensors there and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graticule.backbones.base import Backbone


@dataclass(frozen=True)
class Source:
    """The model that a backbone was converted from, without the values of its weights.

    skeleton: the model with its parameters on the meta device, but for those without a counterpart here.
    names: name of each tensor there -> its names in the backbone: several if its rows are split, none if it is kept as
        it is. Rows of several tensors with the same name here follow each other in this order.
    reshaped: as in `Conversion`.
    """

    skeleton: nn.Module
    names: Mapping[str, tuple[str, ...]]
    reshaped: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, model: nn.Module, names: Mapping[str, tuple[str, ...]], reshaped: Mapping[str, tuple[int, ...]]) -> Any:
        """Store the structure of a model; buffers that are not weights are kept unchanged."""
        empty = {
            id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            for name, parameter in model.named_parameters()
            if names[name]
        }
        return cls(deepcopy(model, dict[int, Any](empty)), dict(names), dict(reshaped))

    @property
    def library(self) -> str:
        """The name of the library of the model."""
        return type(self.skeleton).__module__.partition(".")[0]

    def empty(self, device: torch.device) -> nn.Module:
        """Return a copy of the model on a device, with zeros instead of its weights."""
        zeros = {
            id(parameter): nn.Parameter(torch.zeros_like(parameter, device=device), parameter.requires_grad)
            for parameter in self.skeleton.parameters()
            if parameter.is_meta
        }
        return deepcopy(self.skeleton, dict[int, Any](zeros))


def source_of(model: Backbone, library: str) -> Source:
    """Return the model of a library that a backbone was converted from.

    Raises:
        ValueError: if there is none.
    """
    source: Source | None = model.converted_from
    if source is None or source.library != library:
        raise ValueError(
            f"`model` must come from `convert` of a model of {library} and have the position that it had there, got "
            f"{type(model).__name__}."
        )
    return source


def computed_names(model: Backbone) -> set[str]:
    """Return the names of buffers of the position that are saved with the weights; other libraries compute them."""
    return {f"position.{name}" for name, _ in model.position.named_buffers()} & model.state_dict().keys()


def in_our_shape(value: Tensor, shape: torch.Size, order: tuple[int, ...]) -> Tensor:
    """Return a tensor with another shape in our model, whose axes are stored in this order there."""
    if value.numel() != shape.numel():
        return value
    if not order:
        return value.reshape(shape)
    return value.reshape([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(order))])


def fill(there: nn.Module, source: Source, model: Backbone) -> nn.Module:
    """Copy the weights of a converted model to the model `there` of its library, and return that.

    Raises:
        ValueError: if one has a tensor that the other lacks, or in another size.
    """
    state, present = model.state_dict(), there.state_dict()
    # a classifier may have been added or removed
    names = {**source.names, **{new: (model.own_name(new),) for new in present.keys() - source.names.keys()}}
    names = {theirs: split for theirs, split in names.items() if theirs in present and state.keys() >= set(split)}
    lost = state.keys() - {own for split in names.values() for own in split} - computed_names(model)
    lost |= {theirs for theirs, _ in there.named_parameters()} - names.keys()
    if lost:
        found = ", ".join(sorted(lost)[:4])
        raise ValueError(
            f"`model` must have the tensors that {source.library}'s has, and no others, got {found} in one of them."
        )
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    joined = Counter(names.values())
    rows = dict.fromkeys(joined, 0)
    for theirs, split in names.items():
        if not split:
            value: Tensor = source.skeleton.get_parameter(theirs)
        elif len(split) > 1:
            value = torch.cat([state[own] for own in split])
        elif joined[split] > 1:
            start, rows[split] = rows[split], rows[split] + len(present[theirs])
            value = state[split[0]][start : rows[split]]
        else:
            value = state[split[0]]
            value = value.permute(source.reshaped.get(theirs) or tuple(range(value.ndim)))
        _put(there, theirs, value, trained.get(split[0], False) if split else value.requires_grad)
    return there.train(model.training)


def _put(model: nn.Module, name: str, value: Tensor, trained: bool) -> None:
    """Replace a parameter or buffer by a copy of a tensor."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    old = getattr(module, leaf)
    if value.numel() != old.numel():
        raise ValueError(
            f"`model` must have sizes that {type(model).__name__} can have, whose {name} is {tuple(old.shape)}, got "
            f"{tuple(value.shape)}."
        )
    value = value.detach().clone().reshape(old.shape)
    setattr(module, leaf, nn.Parameter(value, trained) if isinstance(old, nn.Parameter) else value)
