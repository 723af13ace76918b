"""Sizes of models of transformers: in their configurations, and what their constructors make of these."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.layers.helpers import to_2tuple
from torch import nn

from graticule.checkpoints.skeleton import build_skeleton
from graticule.position.places import Shape, by

#: Names of the side of images, or of the number of their patches, in configurations.
SIZES = ("image_size", "crop_size", "num_patches", "num_position_embeddings")


def configs_of(configs: Iterable[Any]) -> list[Any]:
    """Return configurations and those within them, each object once, the inner ones first."""
    known: dict[int, Any] = {}

    def add(config: Any) -> None:
        if hasattr(config, "model_type"):
            for value in vars(config).values():
                add(value)
            known[id(config)] = config

    for config in configs:
        add(config)
    return list(known.values())


def encoders_of(configs: Iterable[Any]) -> list[Any]:
    """Return those configurations, and those within them, that have an image size, each object once."""
    known = [config for config in configs_of(configs) if _has_size(config)]
    return [config for config in known if not _has_size(getattr(config, "backbone_config", None))]  # whose size it is


def _has_size(config: Any) -> bool:
    """Return whether a configuration has an image size of its own, which is not read from another one."""
    stored = [name for name in SIZES if not isinstance(getattr(type(config), name, None), property)]
    return any(getattr(config, name, None) is not None for name in stored)


def channels_of(config: Any) -> str:
    """Return the name under which a configuration has the number of channels of the images."""
    return next(name for name in ("num_channels", "in_channels", "in_chans") if hasattr(config, name))


#: Side, in patches, of the grid that the encoders of Qwen-VL without a table get here, which take any size.
_SIDE = 16


def sizes_of(config: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the size of the images and of their patches, (height, width), or (frames, height, width) of videos."""
    tubelet = getattr(config, "tubelet_size", None)
    step = getattr(config, "patch_stride", getattr(config, "patch_size", 1))  # Hiera's patches overlap
    patch = to_2tuple(step if tubelet is None or isinstance(tubelet, int) else tubelet[1:])
    side = getattr(config, "image_size", getattr(config, "crop_size", None))
    if side is None:  # a square table, or none
        count = getattr(config, "num_patches", getattr(config, "num_position_embeddings", _SIDE**2))
        side = [math.isqrt(count) * step for step in patch]
    if tubelet is None:
        return to_2tuple(side), patch
    frames = config.num_frames if hasattr(config, "num_frames") else config.frames_per_clip
    return (frames, *to_2tuple(side)), (tubelet if isinstance(tubelet, int) else tubelet[0], *patch)


def set_sizes(config: Any, image: Shape, patch: Shape | None = None, channels: int | None = None) -> None:
    """Set the sizes of images, or videos, and of patches in a configuration, and their channels; None leaves them.

    The side of a square is a number if it was one before, or is by default.
    """
    step = sizes_of(config)[1] if patch is None else patch
    counts = dict.fromkeys(SIZES[2:], math.prod(side // length for side, length in zip(image, step, strict=True)))
    sides = dict.fromkeys(SIZES[:2], image[-2:])
    frames = dict.fromkeys(("num_frames", "frames_per_clip"), image[0]) if len(image) > 2 else {}
    others: dict[str, Any] = {"image_embedding_size": image[0] // step[0], "patch_size": patch and patch[-2:]}
    if channels is not None:
        others[channels_of(config)] = channels
    values: dict[str, Any] = {**counts, **sides, **frames, **others}
    for name, value in values.items():
        if (old := getattr(config, name, None)) is not None and value is not None:
            if isinstance(value, tuple):
                is_number = any(isinstance(side, int) for side in (old, getattr(type(config), name, None)))
                value = value[0] if is_number and len(set(value)) == 1 else list(value)
            setattr(config, name, value)


#: Names of the sizes of maps of features, pairs or lists of pairs, which the model's own images have.
_MAPS = re.compile(r"feat(ure)?_sizes$")
#: Names of the number of tokens that an image has in a text.
_COUNTS = ("image_seq_length", "image_seq_len", "num_image_tokens")


def resize_configs(
    configs: Iterable[Any], image: Shape, patch: Shape | None = None, channels: int | None = None
) -> None:
    """Set the sizes of all encoders in configurations, and the numbers of heads and necks that follow from them."""
    known = configs_of(configs)
    encoders = encoders_of(known)
    old, old_patch = sizes_of(encoders[0])
    for config in encoders:
        set_sizes(config, image, patch, channels)
    for config in known:
        others = [] if config in encoders else [("image_size", old, image), ("patch_size", old_patch, patch)]
        for name, size, new in others:
            value = vars(config).get(name)
            if new is not None and value is not None and to_2tuple(value) == size[-2:]:
                is_number = isinstance(value, int) and len(set(new[-2:])) == 1
                setattr(config, name, new[-1] if is_number else list(new[-2:]))
        for name, value in vars(config).items():
            if _MAPS.search(name) and isinstance(value, tuple | list):
                setattr(config, name, _scale_maps(value, old[-2:], image[-2:], f"{type(config).__name__}.{name}"))


def _scale_maps(value: Any, old: Shape, new: Shape, name: str) -> Any:
    """Return the sizes of maps, pairs at any depth, for images of another size."""
    if not all(isinstance(side, int) for side in value):
        return [_scale_maps(inner, old, new, name) for inner in value]
    if len(value) != 2 or any(side * length % before for side, length, before in zip(value, new, old, strict=True)):
        raise ValueError(
            f"`img_size` must give maps of whole sizes, as `{name}` {list(value)} of {by(old)} pixels, got {by(new)}."
        )
    return [side * length // before for side, length, before in zip(value, new, old, strict=True)]


def set_counts(configs: Iterable[Any], counts: Mapping[int, int], complete: bool) -> None:
    """Set the numbers of tokens of an image in a text, by the numbers for the old size, which may not be all."""
    for config in configs_of(configs):
        for name in _COUNTS:
            value = vars(config).get(name)
            if value is None or (value not in counts and not complete):
                continue
            if value not in counts:
                raise ValueError(
                    f"`{name}` of {type(config).__name__} must be {' or '.join(map(str, counts))}, the number of "
                    f"tokens of an image, to follow another `img_size`, got {value}; set it first."
                )
            setattr(config, name, counts[value])


def build_empty(model: nn.Module, config: Any) -> nn.Module:
    """Build a model of the class of `model`, with the same optional parts, whose parameters have no values."""
    has_mask_token = getattr(getattr(model, "embeddings", None), "mask_token", None) is not None
    parts = {"add_pooling_layer": getattr(model, "pooler", None) is not None, "use_mask_token": has_mask_token}
    known = type(model).__init__.__code__.co_varnames
    build = partial(type(model), **{name: value for name, value in parts.items() if name in known})
    try:
        return build_skeleton(partial(build, config))
    except Exception as error:  # it divides a list
        if (divisible := _with_sides(config)) is None:
            if type(model).__module__.startswith("transformers."):
                raise
            raise ValueError(
                f"`model` must be of a class that its configuration alone builds, got {type(model).__name__}, which "
                f"raises {type(error).__name__}: {error}."
            ) from error
    try:
        return without_sides(build_skeleton(partial(build, divisible)))
    except Exception as error:
        kind, size = type(model).__name__, sizes_of(encoders_of([config])[0])[0]
        raise ValueError(f"`img_size` must be square for the constructor of {kind}, got {by(size)}.") from error


def config_for(kind: Any, config: Any) -> Any:
    """Return a configuration that `kind` can be built for, whose sides it may have to divide; see `without_sides`."""
    if (divisible := _with_sides(config)) is None:
        return config
    try:
        with torch.device("meta"):
            kind(config)
    except Exception:  # it divides a list
        return divisible
    return config


def read_config(kind: Any, folder: Path) -> Any:
    """Return the configuration of a folder for a class, also if that divides the side of a square."""
    try:
        return kind.config_class.from_pretrained(folder)
    except TypeError:
        entries, _ = kind.config_class.get_config_dict(folder)
        left = [entries]
        while left:
            part = left.pop()
            left += [value for value in part.values() if isinstance(value, dict)]
            part.update({name: _Side(part[name]) for name in SIZES[:2] if isinstance(part.get(name), list)})
        config = kind.config_class.from_dict(entries)
    _set_types([(part, list) for part in configs_of([config])])
    return config


class _Side(tuple[int, ...]):
    """Height and width of images, for constructors that only know squares, and count (side // patch) ** 2 patches."""

    def __floordiv__(self, patch: int) -> Any:
        return type(self)(side // patch for side in self)

    def __pow__(self, power: int) -> int:
        return math.prod(self)


class _SideInTurns(_Side):
    """The same for those that divide the side once for the rows of each table, and then once for its columns."""

    turns = 0

    def __floordiv__(self, patch: int) -> Any:
        self.turns += 1
        return self[(self.turns - 1) % 2] // patch


#: Types of configurations -> the sides for their classes.
_SIDES = dict.fromkeys(("sam_vision_model", "sam_hq_vision_model"), _SideInTurns)


def _with_sides(config: Any) -> Any:
    """Return a copy of a configuration whose sides can be divided; None if all of them are numbers."""
    config = deepcopy(config)
    sides = [
        (encoder, name)
        for encoder in encoders_of([config])
        for name in SIZES[:2]
        if isinstance(getattr(encoder, name, None), tuple | list)
    ]
    for encoder, name in sides:
        vars(encoder)[name] = _SIDES.get(encoder.model_type, _Side)(getattr(encoder, name))
    return config if sides else None


def without_sides(model: nn.Module) -> nn.Module:
    """Replace divisible sides in a model that was built with them, and in its configurations, by tuples and lists."""
    for part in model.modules():
        _set_types([(part, tuple), *((config, list) for config in encoders_of([getattr(part, "config", None)]))])
    return model


def _set_types(holders: Iterable[tuple[Any, type]]) -> None:
    """Replace the divisible sides that holders have by values of a type."""
    for holder, kind in holders:
        vars(holder).update({key: kind(value) for key, value in vars(holder).items() if isinstance(value, _Side)})
