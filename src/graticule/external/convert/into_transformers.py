"""Convert a converted model back to transformers, with its weights and an adapted configuration."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from graticule.backbones.base import Backbone
from graticule.external.convert.conversion import convert
from graticule.external.convert.source import Source, fill, source_of
from graticule.registry.checks import checked
from graticule.surgery.resize import LIBRARIES, resize


@checked
def to_transformers(model: Backbone) -> nn.Module:
    """Return a model of `convert` as transformers', with its present weights; `model` is not changed.

    The round trip is bit-equal. A changed size of images or patches, number of channels or of classes is also set in
    the configuration, so that `save_pretrained` writes a folder that other tools open.

    Args:
        model: a backbone that was converted from transformers.

    Raises:
        ValueError: if it was not, or if transformers' model cannot represent its position or its sizes.
    """
    source = source_of(model, "transformers")
    device = next(model.parameters()).device
    return fill(_sized(source, model, device), source, model).to(device)


@LIBRARIES.register("transformers")
def resize_in_place(model: nn.Module, **sizes: Any) -> None:
    """Resize a model of transformers as its conversion is, and adapt its configuration."""
    there = to_transformers(resize(convert(model), **sizes))
    vars(model).clear()
    vars(model).update(vars(there))


def _sized(source: Source, model: Backbone, device: torch.device) -> nn.Module:
    """Return the model of transformers, without the weights, in the sizes of ours."""
    theirs: Any = source.skeleton
    config = deepcopy(theirs.config)
    changed = {}
    if hasattr(config, "image_size") and pair(config.image_size) != model.img_size:
        changed["image_size"] = _plain(model.img_size)
    if pair(config.patch_size) != model.patch_size:
        changed["patch_size"] = _plain(model.patch_size)
    patches = math.prod(size // patch for size, patch in zip(model.img_size, model.patch_size, strict=True))
    if getattr(config, "num_patches", patches) != patches:
        changed["num_patches"] = patches
    if config.num_channels != model.in_chans:
        changed["num_channels"] = model.in_chans
    if hasattr(theirs, "classifier") and config.num_labels != model.num_classes:
        changed["num_labels"] = model.num_classes
    if not changed:
        return source.empty(device)
    square = len(set(model.img_size)) == 1 or model.img_size == pair(getattr(config, "image_size", 0))
    if not square and any(name.endswith("pos_embed") for name in model.state_dict()):
        raise ValueError(
            f"`model` must have square images to be a {type(theirs).__name__}, which resamples tables of others "
            f"wrongly, got {model.img_size[0]} x {model.img_size[1]}."
        )
    for name, value in changed.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        there: nn.Module = rebuild(theirs, config)
    return there


def rebuild(model: Any, config: Any) -> Any:
    """Return a model of the same class with another configuration, and the same optional parts."""
    embeddings = getattr(model, "embeddings", None)
    parts = {"add_pooling_layer": "pooler" in dir(model) and model.pooler is not None}
    parts["use_mask_token"] = getattr(embeddings, "mask_token", None) is not None
    known = type(model).__init__.__code__.co_varnames
    return type(model)(config, **{name: value for name, value in parts.items() if name in known})


def pair(size: Any) -> tuple[int, int]:
    """Return (height, width) of one side or of both."""
    sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
    return sides[0], sides[-1]


def _plain(size: tuple[int, int]) -> int | list[int]:
    """Return a size as configurations state it."""
    return size[0] if size[0] == size[1] else list(size)
