"""Convert a converted model back to timm or transformers, with its weights."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import torch
from timm.layers import RelPosMlp
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.checkpoints.obstacles import check_intact
from graticule.checkpoints.skeleton import check_as_built
from graticule.external.convert.conversion import (
    LINEAR,
    ConvertedFrom,
    arguments_of,
    computed_names,
    convert,
    join,
    parts_of,
)
from graticule.external.convert.sizes import build_empty, channels_of, set_sizes, sizes_of
from graticule.external.images import image_size
from graticule.external.resize import resize_in_place
from graticule.external.resize_timm import resize_tables
from graticule.hub.kinds import skeleton_of
from graticule.position.grid import Grid
from graticule.position.places import by
from graticule.registry.checks import checked


@checked
def to_timm(model: nn.Module, like: nn.Module | None = None) -> nn.Module:
    """Return a model of `convert` as timm's, with its present weights; `model` is not changed.

    The round trip is bit-equal. A changed image size, number of classes or pooling is also set in timm's model.

    Args:
        model: a backbone that was converted from timm.
        like: for a backbone that was saved and opened again: a model of timm that is built as the converted one was,
            up to its sizes; its values are not used.

    Raises:
        ValueError: if it was not, or if timm's model cannot represent its position.
    """
    source, backbone = source_of(model, "timm", like), cast("Backbone", model)
    weight = next(model.parameters())
    there = source.empty(weight.device)
    for bias in there.modules():
        if isinstance(bias, RelPosMlp) and not any(bias.pretrained_window_size):
            bias.pretrained_window_size = bias.window_size  # ours keeps the size that its bias is relative to
    _resize(there, backbone)
    return fill(there, source, backbone).to(weight.device, weight.dtype)


def _resize(there: Any, model: Backbone) -> None:
    """Set the image size, the windows and the classifier of timm's model to ours.

    Its own `set_input_size` accepts the windows of every stage from timm 1.0.31 on, and then scales these with the
    image when it is called with only a size. Earlier versions accept one window for all stages.
    """
    windows: Any = getattr(model, "windows", None)
    other_windows = windows is not None and windows != tuple(stage.blocks[0].window_size for stage in there.layers)
    is_other = other_windows or image_size(there) != model.img_size
    if is_other and windows is None:
        resize_tables(there, model.img_size)
    elif is_other and hasattr(there, "_ref_window_sizes"):
        there.set_input_size(img_size=model.img_size, window_size=windows)
    elif is_other:
        there.patch_embed.set_input_size(img_size=model.img_size)
        grids = Grid(*there.patch_embed.grid_size).pyramid(len(windows), pad=True)
        for stage, grid, window in zip(there.layers, [grids[0], *grids[:-1]], windows, strict=True):
            stage.set_input_size(grid.shape, window)  # the grid before its patch merging
    if there.num_classes != model.num_classes or there.global_pool != model.global_pool:
        try:
            there.reset_classifier(model.num_classes, model.global_pool)
        except Exception as error:  # any error of another library
            raise ValueError(
                f"`model` must have a pooling of {type(there).__name__}, which {model.global_pool!r}, its "
                "`global_pool`, is not."
            ) from error


@checked
def to_transformers(model: nn.Module, like: nn.Module | None = None) -> nn.Module:
    """Return a model of `convert` as transformers', with its present weights; `model` is not changed.

    The round trip is bit-equal. A changed size of images or patches, number of channels or of classes is also set in
    the configuration, so that `save_pretrained` writes a folder that other tools open. Another pooling or head is
    refused, as the class fixes both.

    Args:
        model: a backbone that was converted from transformers.
        like: for a backbone that was saved and opened again: a model of transformers of the configuration that the
            converted one had; of its values only a mask token, which has no counterpart here, is used.

    Raises:
        ValueError: if it was not, or if transformers' model cannot represent its position or its sizes.
    """
    source, backbone = source_of(model, "transformers", like), cast("Backbone", model)
    device = next(model.parameters()).device
    there = fill(_sized(source, backbone, device), source, backbone).to(device)
    return resize_in_place(there) if backbone.img_size[-1] != backbone.img_size[-2] else there


def _sized(source: ConvertedFrom, model: Backbone, device: torch.device) -> nn.Module:
    """Return the model of transformers, without the weights, in the sizes of ours."""
    skeleton: Any = source.skeleton
    kind, config = type(skeleton).__name__, deepcopy(skeleton.config)
    image, patch = sizes_of(config)
    if len(image) > 2 and patch != model.patch_size:
        raise ValueError(f"`model` must have patches of {by(patch)} to be a {kind}, got {by(model.patch_size)}.")
    labels = model.num_classes if hasattr(skeleton, "classifier") else getattr(config, "num_labels", 0)
    sizes = (model.img_size, model.patch_size, model.in_chans, labels)
    if sizes == (image, patch, getattr(config, channels_of(config)), getattr(config, "num_labels", 0)):
        return source.empty(device)
    try:
        if image != model.img_size or patch != model.patch_size:
            set_sizes(config, model.img_size, model.patch_size)
        setattr(config, channels_of(config), model.in_chans)
        if hasattr(skeleton, "classifier"):
            config.num_labels = labels
        return build_empty(skeleton, config)
    except Exception as error:  # any error of another library
        raise ValueError(
            f"`model` must have images and patches that transformers' {kind} can be built for, got "
            f"{by(model.img_size)} with patches of {by(model.patch_size)}."
        ) from error


def source_of(model: nn.Module, library: str, like: nn.Module | None = None) -> ConvertedFrom:
    """Return the model of a library that a backbone was converted from; if it was opened, from one that is `like` it.

    `like` is built as that model was, up to the sizes of images, patches and classes.
    """
    kind = type(model).__name__
    check_intact(model, "wrapped", "quantized", "pruned", "parametrized", values=False)
    if not isinstance(model, Backbone):
        has = "; without what is around it, model.backbone is one" if hasattr(model, "backbone") else ""
        raise ValueError(f"`model` must be a backbone that `convert` made, got {kind}{has}.")
    converted = model if like is None else convert(like, verify=False)
    source: ConvertedFrom | None = converted.converted_from
    if like is not None and source is not None and source.library != library:
        raise ValueError(f"`like` must be a model of {library}, got {type(like).__name__} of {source.library}.")
    if source is None or source.library != library:
        raise ValueError(
            f"`model` must come from `convert` of a model of {library} and have the position that it had there, got "
            f"{kind}; of a model that was saved and opened, `like` gives the model of {library}."
        )
    if model.created is not None:
        built = skeleton_of(model, model.hub_config({}))
        check_as_built(model, built, "the arguments that are recorded", "undo this change first")
    expected, arguments = source.arguments, arguments_of(model)
    names = {*expected, *arguments} - {"img_size", "num_classes"}
    names -= {"global_pool"} if library == "timm" else {"patch_size", "in_chans"}
    differing = sorted(name for name in names if expected.get(name) != arguments.get(name))
    if differing or (like is not None and model.created is None):
        others = [f"another {name} ({arguments.get(name)!r}, not {expected.get(name)!r})" for name in differing]
        raise ValueError(
            f"`{'model' if like is None else 'like'}` must be built as the {type(source.skeleton).__name__} that "
            f"`model` was converted from, but the model has {', '.join(others) or 'no known arguments'}."
        )
    return source


def fill(there: nn.Module, source: ConvertedFrom, model: Backbone) -> nn.Module:
    """Copy the weights of a converted model to the model `there` of its library, and return that."""
    state, present = model.state_dict(), there.state_dict()
    # a classifier may have been added or removed
    names = {**source.names, **{new: (model.own_name(new),) for new in present.keys() - source.names.keys()}}
    names = {name: targets for name, targets in names.items() if name in present and state.keys() >= set(targets)}
    lost = state.keys() - {target for targets in names.values() for target in targets} - computed_names(model)
    lost |= {name for name, _ in there.named_parameters()} - names.keys()
    if lost:
        raise ValueError(
            f"`model` must have the tensors that {source.library}'s has, and no others, got "
            f"{', '.join(sorted(lost)[:4])} in one of them."
        )
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parts in parts_of(names, state).items():
        if parts:
            value = join(parts)
            if present[name].ndim == 2 and value.ndim == 4:
                value = value.permute(LINEAR)
            _put(there, name, value, trained.get(names[name][0], False))
        else:
            parameter = source.skeleton.get_parameter(name)
            _put(there, name, parameter, parameter.requires_grad)
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
