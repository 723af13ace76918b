"""Sizes of models of transformers: in their configurations, and what their constructors make of these."""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from timm.layers.helpers import to_2tuple
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from graticule.position.places import Shape

#: Names of the side of images, or of the number of their patches, in configurations.
SIZES = ("image_size", "crop_size", "num_patches", "num_position_embeddings")


def encoders_of(configs: Iterable[Any]) -> list[Any]:
    """Return those configurations, and those within them, that have an image size, each object once."""
    known: dict[int, Any] = {}

    def add(config: Any) -> bool:
        if not hasattr(config, "model_type"):
            return False
        within = [name for name, value in vars(config).items() if add(value)]
        has_size = any(getattr(config, name, None) is not None for name in SIZES)
        if has_size and "backbone_config" not in within:  # whose size it is
            known[id(config)] = config
        return has_size

    for config in configs:
        add(config)
    return list(known.values())


def channels_of(config: Any) -> str:
    """Return the name under which a configuration has the number of channels of the images."""
    return next(name for name in ("num_channels", "in_channels", "in_chans") if hasattr(config, name))


#: Side, in patches, of the grid that the encoders of Qwen-VL without a table get here, which take any size.
_SIDE = 16


def sizes_of(config: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the size of the images and of their patches, (height, width), or (frames, height, width) of films."""
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


def set_sizes(
    config: Any, image: Shape, patch: Shape | None = None, channels: int | None = None, number: bool = False
) -> None:
    """Set the sizes of images, or films, and of patches in a configuration, and their channels; None leaves them.

    The side of a square is a number if it was one before, or with `number`, which some classes need.
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
                square = len(set(value)) == 1 and (number or isinstance(old, int))
                value = value[0] if square else list(value)
            setattr(config, name, value)


def rebuild(model: Any, config: Any) -> Any:
    """Return a model of the same class with another configuration, and the same optional parts."""
    embeddings = getattr(model, "embeddings", None)
    parts = {"add_pooling_layer": "pooler" in dir(model) and model.pooler is not None}
    parts["use_mask_token"] = getattr(embeddings, "mask_token", None) is not None
    known = type(model).__init__.__code__.co_varnames
    return type(model)(config, **{name: value for name, value in parts.items() if name in known})


def build_empty(model: nn.Module, config: Any, seed: int = 0) -> nn.Module:
    """Build a model of the class of `model`, with the same optional parts, whose parameters have no values.

    A class whose constructor only knows square images is built for the height and for the width of others, and its
    tables and numbers are composed of these.
    """
    try:
        return _build(partial(rebuild, model), config, seed)
    except Exception:  # it divides a list
        sizes = {sizes_of(encoder) for encoder in encoders_of([config])}
        if len(sizes) != 1 or len(set(size := next(iter(sizes))[0][-2:])) == 1:
            raise
    patch = next(iter(sizes))[1][-2:]
    squares = [_with_side(config, side) for side in size]
    built, other = (_build(partial(rebuild, model), square, seed) for square in squares)
    configs = dict(zip(map(id, _within(squares[0])), _within(config), strict=True))
    for (name, tall), wide in zip(built.named_modules(), other.modules(), strict=True):
        values = attributes(wide)
        for key, value in attributes(tall).items():
            if not same_value(value, values[key]):
                composed = _compose(f"{name}.{key}", value, values[key], size, patch)
                holders = [part for part in (tall._parameters, tall._buffers) if key in part]
                (holders or [vars(tall)])[0][key] = composed
        if id(getattr(tall, "config", None)) in configs:
            tall.config = configs[id(tall.config)]
    return built


def square_config(kind: Any, config: Any) -> tuple[Any, Shape | None]:
    """Return a configuration that `kind` can be built for, and the size of its images if only that is not square."""
    sizes = {sizes_of(encoder)[0] for encoder in encoders_of([config])}
    if len(sizes) != 1 or len(set((size := next(iter(sizes)))[-2:])) == 1:
        return config, None
    try:
        _build(kind, config, 0)
    except Exception:  # it divides a list
        return _with_side(config, max(size[-2:])), size
    return config, None


def _within(config: Any) -> list[Any]:
    """Return a configuration and those within it."""
    inner = [part for value in vars(config).values() if hasattr(value, "model_type") for part in _within(value)]
    return [config, *inner]


def _with_side(config: Any, side: int) -> Any:
    """Return a configuration of square images."""
    square = deepcopy(config)
    for encoder in encoders_of([square]):
        image, patch = sizes_of(encoder)
        set_sizes(encoder, (*image[:-2], side, side), patch, number=True)
    return square


def _compose(name: str, tall: Any, wide: Any, size: Shape, patch: Shape) -> Any:
    """Return what a constructor would make of images of `size`, from what it makes of both squares."""
    grid = tuple(side // step for side, step in zip(size, patch, strict=True))
    if isinstance(tall, int):
        if (tall, wide) in (size, grid):
            return tall, wide
        rest = tall - grid[0] ** 2
        if 0 <= rest == wide - grid[1] ** 2:
            return rest + math.prod(grid)
    if isinstance(tall, tuple | list) and len(tall) == 2:
        pair = tall[0], wide[1]
        return pair if isinstance(tall, tuple) else list(pair)
    if isinstance(tall, Tensor):
        axes = [axis for axis, (a, b) in enumerate(zip(tall.shape, wide.shape, strict=True)) if a != b]
        shape = list(tall.shape)
        if len(axes) == 1:
            a, b = tall.shape[axes[0]], wide.shape[axes[0]]
            is_table = 0 <= a - grid[0] ** 2 == b - grid[1] ** 2
            shape[axes[0]] = a - grid[0] ** 2 + math.prod(grid) if is_table else b if name.endswith("_w") else a
            is_known = is_table or (a, b) == tuple(2 * side - 1 for side in grid)
        else:
            shape[axes[-1]] = wide.shape[axes[-1]]
            is_known = len(axes) == 2
        if is_known and isinstance(tall, nn.Parameter):
            return nn.Parameter(torch.empty(shape, device="meta"), tall.requires_grad)
        if is_known and torch.equal(tall.flatten(), torch.arange(tall.numel())):
            return torch.arange(math.prod(shape)).view(shape)
    raise ValueError(f"`img_size` must be square for a model whose {name} is {tall} or {wide}.")


def _build(kind: Any, config: Any, seed: int) -> nn.Module:
    without_values: Any = lambda module, name, value: nn.Parameter(value.to("meta"), value.requires_grad)  # noqa: E731
    handle = register_module_parameter_registration_hook(without_values)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built: nn.Module = kind(config)
            return built
    finally:
        handle.remove()


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the parameters, the buffers and the plain attributes of a module."""
    values = {**vars(module), **module._parameters, **module._buffers}
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)


def same_value(value: Any, other: Any) -> bool:
    if isinstance(value, tuple | list) and isinstance(other, tuple | list):
        return len(value) == len(other) and all(map(same_value, value, other))
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and (value.is_meta or torch.equal(value, other))
    return type(value) is type(other) and bool(value == other)
