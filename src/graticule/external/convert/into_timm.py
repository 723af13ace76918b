"""Convert a converted model back to timm, with its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import RelPosMlp
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.position.grid import Grid
from graticule.registry.checks import checked


@dataclass(frozen=True)
class Source:
    """The model of timm that a backbone was converted from, without the values of its weights.

    skeleton: the model with its parameters on the meta device.
    names: name of each tensor in timm -> its names in the backbone; several if its rows are split.
    """

    skeleton: nn.Module
    names: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, model: nn.Module, names: Mapping[str, tuple[str, ...]]) -> Source:
        """Store the structure of a model; buffers that are not weights are kept unchanged."""
        empty = {
            id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            for parameter in model.parameters()
        }
        return cls(deepcopy(model, dict[int, Any](empty)), dict(names))


def computed_names(model: Backbone) -> set[str]:
    """Return the names of buffers of the position that are saved with the weights; timm computes them."""
    return {f"position.{name}" for name, _ in model.position.named_buffers()} & model.state_dict().keys()


@checked
def to_timm(model: Backbone) -> nn.Module:
    """Return a model of `convert` as timm's, with its present weights; `model` is not changed.

    The round trip is bit-equal. A changed image size or number of classes is also set in timm's model.

    Args:
        model: a backbone that was converted from timm.

    Raises:
        ValueError: if it was not, or if timm's model cannot represent its position.
    """
    source: Source | None = model.timm_source
    if source is None:
        raise ValueError(
            f"`model` must come from `convert` and have the position that it had in timm, got {type(model).__name__}."
        )
    state = model.state_dict()
    weight = next(model.parameters())
    there = _filled(source.skeleton, weight.device)
    for bias in there.modules():
        if isinstance(bias, RelPosMlp) and not any(bias.pretrained_window_size):
            bias.pretrained_window_size = bias.window_size  # ours keeps the size that its bias is relative to
    _resize(there, model)
    # a classifier may have been added or removed
    names = {theirs: source.names.get(theirs, (model.own_name(theirs),)) for theirs in there.state_dict()}
    names = {theirs: split for theirs, split in names.items() if state.keys() >= set(split)}
    lost = state.keys() - {own for split in names.values() for own in split} - computed_names(model)
    lost |= {theirs for theirs, _ in there.named_parameters()} - names.keys()
    if lost:
        found = ", ".join(sorted(lost)[:4])
        raise ValueError(f"`model` must have the tensors that timm's has, and no others, got {found} in one of them.")
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for theirs, split in names.items():
        value = state[split[0]] if len(split) == 1 else torch.cat([state[own] for own in split])
        _put(there, theirs, value, trained.get(split[0], False))
    return there.to(weight.device, weight.dtype).train(model.training)


def _filled(skeleton: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a skeleton on a device, with all parameters zero."""
    zeros = {
        id(parameter): nn.Parameter(torch.zeros_like(parameter, device=device), parameter.requires_grad)
        for parameter in skeleton.parameters()
    }
    return deepcopy(skeleton, dict[int, Any](zeros))


def _resize(there: Any, model: Backbone) -> None:
    """Set the image size and the classifier of timm's model to those of ours."""
    size = getattr(there.patch_embed, "img_size", None) if hasattr(there, "patch_embed") else None
    windows = getattr(model, "windows", None)
    other_windows = windows is not None and windows != tuple(stage.blocks[0].window_size for stage in there.layers)
    if size is not None and (tuple(size) != model.img_size or other_windows):
        if not hasattr(there, "set_input_size"):
            raise ValueError(
                f"`model` must have the image size of timm's, {size[0]} x {size[1]}, which {type(there).__name__} "
                f"cannot change, got {model.img_size[0]} x {model.img_size[1]}."
            )
        if windows is None:
            there.set_input_size(img_size=model.img_size)
        else:
            _resize_windows(there, model, windows)
    if there.num_classes != model.num_classes or there.global_pool != model.global_pool:
        there.reset_classifier(model.num_classes, model.global_pool)


def _resize_windows(there: Any, model: Backbone, windows: Sequence[tuple[int, int]]) -> None:
    """Set the image size and the windows of timm's Swin to those of ours.

    Its own `set_input_size` accepts the windows of every stage from timm 1.0.31 on, and then scales these with the
    image when it is called with only a size. Earlier versions accept one window for all stages.
    """
    if hasattr(there, "_ref_window_sizes"):
        there.set_input_size(img_size=model.img_size, window_size=windows)
        return
    there.patch_embed.set_input_size(img_size=model.img_size)
    grids = Grid(*there.patch_embed.grid_size).pyramid(len(windows), pad=True)
    for stage, grid, window in zip(there.layers, [grids[0], *grids[:-1]], windows, strict=True):
        stage.set_input_size(grid.shape, window)  # the grid before its patch merging


def _put(model: nn.Module, name: str, value: Tensor, trained: bool) -> None:
    """Replace a parameter or buffer by a copy of a tensor."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    old = getattr(module, leaf)
    value = value.detach().clone().reshape(old.shape)
    setattr(module, leaf, nn.Parameter(value, trained) if isinstance(old, nn.Parameter) else value)
